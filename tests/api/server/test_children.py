import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slora_api.processes import children
from slora_api.processes.children import SANDBOXES, await_sandboxes


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
