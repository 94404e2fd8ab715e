import ctypes
import fcntl
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from slora_kernels.kernel_cache import FALLBACK_VARIABLE, choose_kernel_cache, prepare_triton_cache

Keep = Callable[[Path | None, Path | None], None]


@pytest.fixture
def barred(tmp_path: Path) -> Path:
    """A path that not even root can create: its parent is a file."""
    (tmp_path / "file").write_bytes(b"")
    return tmp_path / "file" / "cache"


@pytest.fixture
def keep(set_variables: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Keep:
    """Sets the places of the cache of a user without a home directory: those of the user and of the server."""
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    set_variables(HOME=None)

    def set_places(user_cache: Path | None, server: Path | None) -> None:
        places = {"XDG_CACHE_HOME": user_cache, FALLBACK_VARIABLE: server}
        set_variables(**{name: place and str(place) for name, place in places.items()})

    return set_places


def test_kernels_are_kept_in_the_first_place_that_can_be_written(
    tmp_path: Path, barred: Path, keep: Keep, caplog: pytest.LogCaptureFixture
) -> None:
    package, user, server = tmp_path / "package", tmp_path / "user", tmp_path / "data" / "kernels"
    keep(user, server)
    assert choose_kernel_cache(str(package)) == package and not caplog.messages
    assert choose_kernel_cache(str(barred)) == user / "slora"
    for number, unusable in enumerate((barred, None)):
        keep(unusable, server)
        preferred = str(barred / str(number))
        assert choose_kernel_cache(preferred) == choose_kernel_cache(preferred) == server
    lines = [f"kept in {place}, because {barred}" for place in (user / "slora", server, server)]
    assert len(caplog.messages) == 3
    assert all(line in message for line, message in zip(lines, caplog.messages, strict=True))


def test_without_any_place_kernels_are_compiled_and_one_line_says_so(
    barred: Path, keep: Keep, set_variables: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    keep(None, barred)
    set_variables(TRITON_CACHE_DIR=str(barred))
    prepare_triton_cache()
    assert Path(os.environ["TRITON_CACHE_DIR"]).is_dir()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "each start compiles them" in caplog.text


@pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed")
def test_a_worker_is_compiled_without_a_cache(
    barred: Path, keep: Keep, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numba  # noqa: PLC0415

    from slora_kernels.cpu.workers import compiler  # noqa: PLC0415

    def worker(job: object) -> None:
        pass

    keep(None, None)
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(barred))
    assert compiler.compile_function(worker, numba.float32).address
    # The directory can be written when it is chosen, and not any more when the kernel is kept.
    monkeypatch.setattr(compiler, "choose_kernel_cache", lambda _: barred)
    assert compiler.compile_function(worker, numba.float32).address


@pytest.fixture
def compile_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Compiles a worker that does nothing, and keeps it in `tmp_path`."""
    import numba  # noqa: PLC0415

    from slora_kernels.cpu.workers import compiler  # noqa: PLC0415

    def worker(job: object) -> None:
        pass

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    return lambda: compiler.compile_function(worker, numba.float32)


@pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed")
def test_compiling_a_worker_is_logged_and_loading_it_is_not(
    compile_worker: Callable[[], Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "slora.kernels"):
        assert compile_worker().address
        (message,) = caplog.messages
        assert message.startswith(f"compiling the CPU kernel worker, because it is not in {tmp_path} yet")
        caplog.clear()
        assert compile_worker().address
        assert not caplog.messages


@pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed")
def test_machine_code_is_emitted_for_a_worker_and_not_for_what_is_inlined_into_it(
    keep: Keep, barred: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numba  # noqa: PLC0415
    from numba.core.codegen import JITCodeLibrary  # noqa: PLC0415

    from slora_kernels.cpu.workers import compiler, intrinsics  # noqa: PLC0415

    @intrinsics.compiled
    def add(x: float, y: float) -> float:
        return x + y

    @intrinsics.compiled
    def add_three(x: float, y: float, z: float) -> float:
        return add(add(x, y), z)

    def worker(job: Any) -> None:
        job[3] = add_three(job[0], job[1], job[2])

    emitted, emit = list[str](), JITCodeLibrary._finalize_specific

    def note(library: Any) -> None:
        emitted.append(library.name)
        emit(library)

    monkeypatch.setattr(JITCodeLibrary, "_finalize_specific", note)
    keep(None, None)
    # Compiled and kept, loaded, and compiled without a cache.
    for place in (tmp_path / "cache", tmp_path / "cache", barred):
        monkeypatch.setattr(numba.config, "CACHE_DIR", str(place))
        function = compiler.compile_function(worker, numba.float32)
        job = (ctypes.c_float * 4)(1, 2, 4)
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function.address)(job)
        assert job[3] == 7
    assert [name.rpartition(".")[2] for name in emitted] == ["worker"] * 3
    # Functions of other users of numba are compiled as always.
    assert numba.njit(lambda x: x + 1)(1) == 2


@pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed")
def test_a_worker_that_another_process_compiles_is_waited_for(
    compile_worker: Callable[[], Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise, engines that start together would each compile the same workers for minutes."""
    assert compile_worker().address
    (lock,) = tmp_path.rglob("*.lock")
    with (
        caplog.at_level(logging.INFO, "slora.kernels"),
        lock.open("wb") as file,
        ThreadPoolExecutor(1) as pool,
    ):
        fcntl.flock(file, fcntl.LOCK_EX)
        waiting = pool.submit(compile_worker)
        limit_s = time.monotonic() + 300
        while not caplog.messages:
            assert time.monotonic() < limit_s
            time.sleep(0.01)
        assert not waiting.done()
        fcntl.flock(file, fcntl.LOCK_UN)
        assert waiting.result(300).address
    (message,) = caplog.messages
    assert message.startswith("another process compiles the CPU kernel worker-float32; waiting")


@pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed")
def test_threads_that_compile_at_once_use_one_cache(
    tmp_path: Path, keep: Keep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Born from a review: the second thread took the directory of the first one for the user's choice."""
    import numba  # noqa: PLC0415

    from slora_kernels.cpu.workers import compiler  # noqa: PLC0415

    preferred, found = list[str](), list[str]()

    def choose(place: str) -> Path:
        preferred.append(place)
        return tmp_path

    def compile_slowly(*_: object, cache: bool) -> None:
        if len(preferred) == 1:
            others.append(pool.submit(compiler.compile_function, worker, numba.float32))
            time.sleep(0.5)
        found.append(numba.config.CACHE_DIR)

    def worker(job: object) -> None:
        pass

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiler, "choose_kernel_cache", choose)
    monkeypatch.setattr(compiler, "_compile", compile_slowly)
    others: list[Any] = []
    with ThreadPoolExecutor(1) as pool:
        compiler.compile_function(worker, numba.float32)
        others[0].result()
    assert preferred == [str(tmp_path)] * 2 and found == [found[0]] * 2
    assert str(tmp_path) == numba.config.CACHE_DIR
