"""`slora complete` against a running API."""

from pathlib import Path

from tests.api.command import run_command
from tests.api.platform import running_platform
from tests.api.scripted_engine import ScriptedEngine, deltas_of


def test_complete_says_on_standard_error_which_version_answered(tmp_path: Path) -> None:
    with running_platform(tmp_path, ScriptedEngine([deltas_of(b"hello.")])) as platform:
        key = platform.key("acme")
        platform.upload(key, "greeter").raise_for_status()
        for model, said in (("greeter", "answered by greeter@1\n"), ("greeter@1", ""), ("base", "")):
            words = ("complete", "hi", "--max-tokens", "9", "--model", model)
            ended = run_command(*words, SLORA_URL=platform.url, SLORA_API_KEY=key)
            assert (ended.returncode, ended.stdout, ended.stderr) == (0, "hello.\n", said)
