"""An engine or a loader that hangs, as on a device that no longer responds."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import httpx
import psutil
import pytest

from tests.api.conftest import Kit
from tests.api.served import Served, serving, wait_for, wait_until

ENGINE, RANK = "slora.engine.process", "slora.runner.rank_process"
BODY = {"model": "base", "prompt": "hello", "temperature": 0, "ignore_eos": True}


def wait_until_not_ready(served: Served) -> str:
    """Waits, and returns the body of /readyz."""

    with httpx.Client(base_url=served.url) as client:

        def look() -> str | None:
            answer = client.get("/readyz")
            return answer.json()["error"]["message"] if answer.status_code == 503 else None

        return wait_for(look, served.alive)


def wait_for_successor(served: Served, module: str, hung: psutil.Process) -> None:
    def find() -> bool | None:
        try:
            return served.child(module).pid != hung.pid or None
        except (StopIteration, psutil.Error):  # the hung one has ended, and the next has not begun
            return None

    wait_for(find, served.alive)
    served.wait_until_ready()


@contextmanager
def streaming(client: httpx.Client) -> Iterator[Iterator[str]]:
    """Yields the lines of a stream that has begun."""
    body = BODY | {"max_tokens": 400, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as stream:
        lines = (line for line in stream.iter_lines() if line.startswith("data: "))
        assert next(lines).startswith("data: ")
        yield lines


def check_completed(lines: Iterator[str]) -> None:
    """Asserts that a stream goes on to its end."""
    rest = list(lines)
    assert rest[-1] == "data: [DONE]" and not any('"error"' in line for line in rest)


def has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_a_hung_engine_fails_readiness_and_requests_in_flight_continue_after_its_restart(
    mortal: Served, report: Callable[[str], None]
) -> None:
    """Born from a fault: requests hung for ever, and /readyz still returned 200."""
    engine, key = mortal.child(ENGINE), mortal.make_key("hung-engine")
    with mortal.client(key) as client:
        with ExitStack() as stack:
            with mortal.slowed():
                lines = stack.enter_context(streaming(client))
                engine.send_signal(signal.SIGSTOP)
            stopped_at = time.monotonic()
            assert "the engine makes no progress" in wait_until_not_ready(mortal)
            report(f"/readyz failed {time.monotonic() - stopped_at:.1f} s after the engine hung")
            refused = client.post("/v1/completions", json=BODY | {"max_tokens": 1})
            assert refused.status_code == 503 and refused.headers["Retry-After"]
            assert "the engine makes no progress" in refused.json()["error"]["message"]
            check_completed(lines)
        wait_for_successor(mortal, ENGINE, engine)
        assert client.post("/v1/completions", json=BODY | {"max_tokens": 1}).status_code == 200


def test_a_hung_loader_fails_readiness_and_is_restarted(mortal: Served) -> None:
    module = "slora_adapters.loader.loader_process"
    loader = mortal.child(module)
    loader.send_signal(signal.SIGSTOP)
    assert "the loader makes no progress" in wait_until_not_ready(mortal)
    wait_for_successor(mortal, module, loader)


@pytest.fixture(scope="module")
def divided(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of two tensor-parallel ranks. Each test leaves it ready."""
    data = tmp_path_factory.mktemp("divided") / "data"
    flags = ("--tensor-parallel-size", "2", "--stall-seconds", "9")
    # Each rank would load the CPU kernels itself.
    with serving(kit.base, data, *flags, kernels="torch") as served:
        served.wait_until_ready()
        yield served


@pytest.mark.soak
def test_a_hung_rank_fails_readiness_and_its_group_is_restarted(
    divided: Served, report: Callable[[str], None]
) -> None:
    engine, rank = divided.child(ENGINE), divided.child(RANK)
    with divided.client(divided.make_key("hung-rank")) as client:
        with streaming(client) as lines:
            rank.suspend()
            stopped_at = time.monotonic()
            assert "the engine makes no progress" in wait_until_not_ready(divided)
            report(f"/readyz failed {time.monotonic() - stopped_at:.1f} s after the rank hung")
            check_completed(lines)
        wait_for_successor(divided, ENGINE, engine)
        wait_until(lambda: has_ended(rank))
        assert divided.child(RANK).pid != rank.pid
        assert client.post("/v1/completions", json=BODY | {"max_tokens": 1}).status_code == 200


@pytest.mark.soak
def test_a_killed_rank_fails_readiness_and_its_group_is_restarted(
    divided: Served, report: Callable[[str], None]
) -> None:
    engine, rank = divided.child(ENGINE), divided.child(RANK)
    with divided.client(divided.make_key("killed-rank")) as client:
        with streaming(client) as lines:
            rank.kill()
            killed_at = time.monotonic()
            wait_until_not_ready(divided)
            report(f"/readyz failed {time.monotonic() - killed_at:.2f} s after the rank was killed")
            check_completed(lines)
        wait_for_successor(divided, ENGINE, engine)
        assert client.post("/v1/completions", json=BODY | {"max_tokens": 1}).status_code == 200
