"""Chooses the directory that keeps compiled kernels between starts.

An installation may be read-only, and its user may have no home directory. The server therefore names a directory of its
own as the last place, in `FALLBACK_VARIABLE`.
"""

import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

_log = logging.getLogger("slora.kernels")

FALLBACK_VARIABLE = "SLORA_KERNEL_CACHE"
# Many times as long as a busy machine compiles one kernel. The process that compiles it may have been stopped.
_MAX_WAIT_S = 600.0


def choose_kernel_cache(preferred: str) -> Path | None:
    """Returns the first directory that can be written: `preferred`, slora's directory in the user's cache, or the
    server's. Returns None if there is none. Logs a line unless it is `preferred`.
    """
    places = [preferred, _find_user_cache(), os.environ.get(FALLBACK_VARIABLE)]
    return _choose(tuple(place for place in places if place))


@cache
def _choose(places: Sequence[str]) -> Path | None:
    first = places[0]
    for place in places:
        if _can_write(Path(place)):
            if place != first:
                _log.warning("compiled kernels are kept in %s, because %s cannot be written", place, first)
            return Path(place)
    _log.warning(
        "compiled kernels are not kept, so each start compiles them: none of %s can be written",
        ", ".join(places),
    )
    return None


def _find_user_cache() -> str | None:
    root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    try:
        return str(root.expanduser() / "slora")
    except RuntimeError:  # The user has no home directory, or is not known on this machine.
        return None


def _can_write(directory: Path) -> bool:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"x")
            file.flush()
    except OSError:
        return False
    return True


@contextmanager
def lock_kernel(directory: Path, name: str) -> Iterator[None]:
    """Lets one process at a time compile a kernel that is kept in `directory`. The next one finds it there.

    Engines that start together, and the ranks of one engine, need the same kernels. Raises OSError if the directory
    cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / f"{name}.lock").open("wb") as file:
        _lock(file.fileno(), name)
        try:
            yield
        finally:
            # A forked process may have the same open file, whose lock would last until that process ends.
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)


def _lock(descriptor: int, name: str) -> None:
    limit_s, has_told = time.monotonic() + _MAX_WAIT_S, False
    while time.monotonic() < limit_s:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not has_told:
                _log.info("another process compiles the CPU kernel %s; waiting for its end", name)
            has_told = True
            time.sleep(0.05)
        except OSError:  # Some network file systems have no locks.
            return
        else:
            return


def prepare_triton_cache() -> None:
    """Gives triton a directory that it can write. Without one, triton fails instead of compiling without a cache."""
    if os.environ.get("TRITON_CACHE_DIR"):
        preferred = os.environ["TRITON_CACHE_DIR"]
    else:
        preferred = os.path.join(os.environ.get("TRITON_HOME") or os.path.expanduser("~"), ".triton", "cache")
    chosen = choose_kernel_cache(preferred)
    os.environ["TRITON_CACHE_DIR"] = str(chosen or tempfile.mkdtemp(prefix="slora-triton-"))
