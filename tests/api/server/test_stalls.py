"""An engine or a loader that hangs, as on a device that no longer responds."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.api.conftest import Kit
from tests.api.served import Served, serving, wait_for

STALL_S = 5
BODY = {"model": "base", "prompt": "hello", "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def served(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    data = tmp_path_factory.mktemp("data")
    with serving(kit.base, data, "--model-name", "base", "--stall-seconds", str(STALL_S)) as served:
        served.wait_until_ready()
        yield served


def wait_until_not_ready(served: Served) -> str:
    """Waits, and returns the body of /readyz."""

    def look() -> str | None:
        answer = httpx.get(served.url + "/readyz", verify=False)
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


def test_a_hung_engine_fails_readiness_and_requests_in_flight_and_is_restarted(
    served: Served, report: Callable[[str], None]
) -> None:
    """Born from a fault: requests hung for ever, and /readyz still returned 200."""
    module = "slora.engine.process"
    engine, key = served.child(module), served.make_key("hung-engine")
    with served.client(key) as client:
        body = BODY | {"max_tokens": 400, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as stream:
            lines = (line for line in stream.iter_lines() if line)
            assert next(lines).startswith("data: ")
            engine.send_signal(signal.SIGSTOP)
            stopped_at = time.monotonic()
            assert "the engine makes no progress" in wait_until_not_ready(served)
            report(f"/readyz failed {time.monotonic() - stopped_at:.1f} s after the engine hung")
            refused = client.post("/v1/completions", json=BODY | {"max_tokens": 1})
            assert refused.status_code == 503 and refused.headers["Retry-After"]
            assert "the engine makes no progress" in refused.json()["error"]["message"]
            errors = [json.loads(line[6:])["error"] for line in lines if '"error"' in line]
        assert [error["code"] for error in errors] == ["engine_unavailable"]
        wait_for_successor(served, module, engine)
        assert client.post("/v1/completions", json=BODY | {"max_tokens": 1}).status_code == 200


def test_a_hung_loader_fails_readiness_and_is_restarted(served: Served, kit: Kit) -> None:
    module = "slora_adapters.loader.loader_process"
    loader = served.child(module)
    loader.send_signal(signal.SIGSTOP)
    assert "the loader makes no progress" in wait_until_not_ready(served)
    wait_for_successor(served, module, loader)


def test_a_server_whose_engine_refuses_its_settings_ends_with_the_reason(
    kit: Kit, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving(kit.base, tmp_path, "--max-model-len", "100000000") as served:
        assert served.process.wait(120) == 1
    said = capfd.readouterr().err
    assert "slora: the engine cannot start: exit code 2: max_model_len is 100000000, but this" in said
