import asyncio
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from slora_api.processes import children
from slora_api.processes.children import SANDBOXES, await_sandboxes
from tests.api.conftest import Kit
from tests.api.served import serving


def test_a_server_is_not_ready_before_its_sandboxes_can_import_what_they_need(
    tmp_path: Path,
    set_variables: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    set_variables(PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setattr(children, "_SANDBOX_PAUSE_S", 0.01)
    broken = tmp_path / "jinja2.py"
    broken.write_text("raise ImportError('the package of this user is missing')", encoding="utf-8")
    unfinished = {SANDBOXES: "not tried yet"}

    async def try_and_mend() -> None:
        trying = asyncio.create_task(await_sandboxes(unfinished))
        while "the package of this user is missing" not in unfinished[SANDBOXES]:
            await asyncio.sleep(0.01)
        broken.unlink()
        await trying

    asyncio.run(try_and_mend())
    assert not unfinished and "the package of this user is missing" in caplog.text


_COUNT_FROZEN = """
import gc
from slora_api.cli.main import main
code = main()
print("frozen", gc.get_freeze_count())
raise SystemExit(code)
"""


def test_at_the_second_signal_a_stream_ends_because_the_server_stops_and_long_lived_objects_were_frozen(
    kit: Kit, tmp_path: Path
) -> None:
    """Born from a bug: a full collection of 75 MiB of modules and routes blocked the event loop for 50 ms."""
    command = (sys.executable, "-P", "-c", _COUNT_FROZEN)
    with serving(kit.base, tmp_path / "data", command=command) as served:
        served.wait_until_ready()
        body = {"model": "default", "prompt": "hi", "max_tokens": 400, "stream": True, "ignore_eos": True}
        with (
            served.client(served.make_key("acme")) as client,
            client.stream("POST", "/v1/completions", json=body) as answer,
        ):
            lines = answer.iter_lines()
            next(lines)
            served.process.send_signal(signal.SIGTERM)
            served.wait_for_line("stopping")
            served.process.send_signal(signal.SIGTERM)
            rest = []
            with suppress(httpx.TransportError):
                rest.extend(lines)
        assert served.process.wait(60) == 0
    frozen = next(line for line in served.lines if line.startswith("frozen "))
    assert int(frozen.split()[1]) > 10_000
    assert not any("died" in line for line in rest)
    assert "[DONE]" in rest[-2] or any("stop" in line or "shutting down" in line for line in rest[-3:])
