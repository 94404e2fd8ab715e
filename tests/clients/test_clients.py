"""Packages that speak OpenAI's API work unchanged. Each runs in a process of its own, with the Python environment that
`make soak` sets up.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slora.request import FinishReason
from tests.api.platform import Platform, running_platform
from tests.api.scripted_engine import ScriptedEngine, deltas_of

PYTHON = Path(os.environ.get("CLIENTS", f"{sys.prefix}-clients")) / "bin" / "python"
SCRIPTS = sorted(Path(__file__).parent.glob("use_*.py"))
ANSWER = b'```json\n{"name": "Ann"}\n```'


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    engine = ScriptedEngine([deltas_of(ANSWER, FinishReason.STOP)], max_model_len=4096)
    with running_platform(tmp_path_factory.mktemp("data"), engine) as running:
        yield running


@pytest.mark.soak
@pytest.mark.parametrize("script", SCRIPTS, ids=[script.stem for script in SCRIPTS])
def test_a_client_works_unchanged(platform: Platform, script: Path) -> None:
    assert PYTHON.exists(), f"{PYTHON} is missing: run `make soak`, which installs the clients"
    key = platform.key(script.stem.replace("_", "-"))
    command = [str(PYTHON), "-P", str(script), platform.url + "/v1", key]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
