"""The command `slora top` without a terminal."""

import json
from collections.abc import Callable

import pytest

from slora_api.metrics import top_command as top
from tests.api.command import Ended, run_command
from tests.api.live.test_frame import STATE
from tests.api.platform import ADMIN_KEY, Platform
from tests.api.scripted_engine import ScriptedEngine


@pytest.fixture(scope="module")
def platform(start_platform: Callable[..., Platform]) -> Platform:
    return start_platform(ScriptedEngine(snapshot=STATE))


@pytest.fixture(autouse=True)
def one_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "NUM_FIRST_FRAMES", 1)


def run_top(platform: Platform, *flags: str, **keys: str) -> Ended:
    return run_command("top", *flags, SLORA_URL=platform.url, COLUMNS="80", **keys)


def test_one_table_is_printed_where_there_is_no_terminal(platform: Platform) -> None:
    ended = run_top(platform, SLORA_ADMIN_KEY=ADMIN_KEY, SLORA_API_KEY=platform.key("mine"))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "all tenants" in ended.stdout and "rival" in ended.stdout
    assert "\x1b" not in ended.stdout and max(map(len, ended.stdout.splitlines())) <= 80
    assert run_top(platform, "--once", SLORA_ADMIN_KEY=ADMIN_KEY).stdout == ended.stdout


def test_a_tenant_sees_its_own(platform: Platform) -> None:
    ended = run_top(platform, "--once", SLORA_API_KEY=platform.key("mine"))
    assert "your tenant" in ended.stdout and "(other tenants)" in ended.stdout and "rival" not in ended.stdout


def test_json_is_the_frame_as_one_line(platform: Platform) -> None:
    ended = run_top(platform, "--once", "--json", SLORA_ADMIN_KEY=ADMIN_KEY)
    (line,) = ended.stdout.splitlines()
    assert json.loads(line)["object"] == "live.frame"


def test_frames_go_on_as_lines_until_the_user_ends_it(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[object] = []

    def take(frame: object) -> None:
        shown.append(frame)
        if len(shown) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(top, "print_frame", take)
    assert run_top(platform, "--json", SLORA_ADMIN_KEY=ADMIN_KEY).returncode == 0
    assert len(shown) == 2


def test_failures_are_one_line(platform: Platform) -> None:
    assert "SLORA_API_KEY is not set" in run_top(platform).stderr
    wrong = run_top(platform, SLORA_ADMIN_KEY="wrong")
    assert wrong.returncode == 1 and "invalid" in wrong.stderr
    platform.engine.ready = False
    away = run_top(platform, SLORA_ADMIN_KEY=ADMIN_KEY)
    platform.engine.ready = True
    assert (away.returncode, away.stdout) == (1, "") and "no engine answers" in away.stderr
    gone = run_command("top", SLORA_URL="http://user:pa55word@127.0.0.1:1", SLORA_ADMIN_KEY=ADMIN_KEY)
    assert gone.returncode == 1 and "check that the server is running" in gone.stderr
