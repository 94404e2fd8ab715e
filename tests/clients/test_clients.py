"""Packages that speak OpenAI's or Anthropic's API work unchanged. Each runs in a process of its own, with one of the
environments that `make soak` sets up.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slora.core.request import FinishReason
from tests.adapters.hand_made import make_members
from tests.api.platform import Platform, running_platform
from tests.api.scripted_engine import ScriptedEngine, deltas_of
from tests.support.tool_templates import HERMES

CLIENTS = Path(os.environ.get("CLIENTS", f"{sys.prefix}-clients"))
CLIENTS3 = Path(os.environ.get("CLIENTS3", f"{sys.prefix}-clients-openai3"))
CLIENTS_TORCH = Path(os.environ.get("CLIENTS_TORCH", f"{sys.prefix}-clients-torch"))
CLIENTS_NODE = Path(os.environ.get("CLIENTS_NODE", f"{sys.prefix}-clients-node"))
# Packages that need the openai package from release 3 on.
ON_OPENAI3 = ("agents", "langchain")
# Scripts that use the base model, and scripts that call tools.
SCRIPTS = sorted(Path(__file__).parent.glob("use_*.py"))
CALLING_SCRIPTS = sorted(Path(__file__).parent.glob("call_*"))
CALL = b'<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
ANSWER = b'```json\n{"name": "Ann"}\n```'


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    engine = ScriptedEngine([deltas_of(ANSWER, FinishReason.STOP)], max_model_len=4096)
    with running_platform(tmp_path_factory.mktemp("data"), engine) as running:
        yield running


def find_environment(script: Path) -> Path:
    if "guidellm" in script.stem:
        return CLIENTS_TORCH
    return CLIENTS3 if any(package in script.stem for package in ON_OPENAI3) else CLIENTS


def find_command(script: Path, directory: Path) -> list[str]:
    """Returns the command that runs the script. Node.js looks for packages beside a script, so it is copied there."""
    if script.suffix == ".py":
        python = find_environment(script) / "bin" / "python"
        assert python.exists(), f"{python} is missing: run `make soak`, which installs the clients"
        return [str(python), "-P", str(script)]
    if shutil.which("npm") is None:
        pytest.skip("this machine has no Node.js")
    packages = CLIENTS_NODE / "node_modules"
    assert packages.exists(), f"{packages} is missing: run `make soak`, which installs the clients"
    (directory / "node_modules").symlink_to(packages)
    return ["node", str(shutil.copy(script, directory))]


def run_script(platform: Platform, script: Path, key: str, directory: Path) -> None:
    command = [*find_command(script, directory), platform.url + "/v1", key]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, encoding="utf-8")
    assert ended.returncode == 0, ended.stderr


@pytest.mark.soak
@pytest.mark.parametrize("script", SCRIPTS, ids=[script.stem for script in SCRIPTS])
def test_a_client_works_unchanged(platform: Platform, script: Path, tmp_path: Path) -> None:
    key = platform.key(script.stem.replace("_", "-"))
    for name in ("voice-a", "voice-b", "voice-c") if "anthropic" in script.stem else ():
        assert platform.upload(key, name).status_code == 201
    run_script(platform, script, key, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("script", CALLING_SCRIPTS, ids=[script.name for script in CALLING_SCRIPTS])
def test_a_client_calls_tools_unchanged(tmp_path: Path, script: Path) -> None:
    """The engine answers with a call and with a text in turn."""
    answers = [deltas_of(text, FinishReason.STOP) for text in (CALL, b"It is warm.")]
    data, scripts = tmp_path / "data", tmp_path / "scripts"
    data.mkdir()
    scripts.mkdir()
    with running_platform(data, ScriptedEngine(answers, max_model_len=4096)) as platform:
        key = platform.key("acme")
        members = make_members() | {"chat_template.jinja": HERMES.encode()}
        assert platform.upload(key, "caller", members).status_code == 201
        run_script(platform, script, key, scripts)
