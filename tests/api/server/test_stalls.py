"""An engine or a loader that hangs, as on a device that no longer responds."""

import signal
import time
from collections.abc import Callable

import httpx
import psutil

from tests.api.served import Served, wait_for

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


def test_a_hung_engine_fails_readiness_and_requests_in_flight_continue_after_its_restart(
    mortal: Served, report: Callable[[str], None]
) -> None:
    """Born from a fault: requests hung for ever, and /readyz still returned 200."""
    module = "slora.engine.process"
    engine, key = mortal.child(module), mortal.make_key("hung-engine")
    with mortal.client(key) as client:
        body = BODY | {"max_tokens": 400, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as stream:
            lines = (line for line in stream.iter_lines() if line)
            assert next(lines).startswith("data: ")
            engine.send_signal(signal.SIGSTOP)
            stopped_at = time.monotonic()
            assert "the engine makes no progress" in wait_until_not_ready(mortal)
            report(f"/readyz failed {time.monotonic() - stopped_at:.1f} s after the engine hung")
            refused = client.post("/v1/completions", json=BODY | {"max_tokens": 1})
            assert refused.status_code == 503 and refused.headers["Retry-After"]
            assert "the engine makes no progress" in refused.json()["error"]["message"]
            rest = list(lines)
        assert rest[-1] == "data: [DONE]" and not any('"error"' in line for line in rest)
        wait_for_successor(mortal, module, engine)
        assert client.post("/v1/completions", json=BODY | {"max_tokens": 1}).status_code == 200


def test_a_hung_loader_fails_readiness_and_is_restarted(mortal: Served) -> None:
    module = "slora_adapters.loader.loader_process"
    loader = mortal.child(module)
    loader.send_signal(signal.SIGSTOP)
    assert "the loader makes no progress" in wait_until_not_ready(mortal)
    wait_for_successor(mortal, module, loader)
