"""The command `slora doctor`: its lines, its JSON, its exit code, and what it must not print or change."""

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from slora.core.errors import ConfigError
from slora.runner.device_facts import DeviceFacts
from slora_api.doctor import doctor
from slora_api.doctor.checks import Finding, Severity, fine, warning
from slora_api.doctor.doctor import Check, Result, run_checks
from tests.api.command import Ended, run_command
from tests.api.platform import running_platform
from tests.api.scripted_engine import ScriptedEngine

DEMO = Path(__file__).parents[3] / "demo"
CPU = DeviceFacts("cpu", "CPU", 0, "cpu", True, "2.13", "3.9", "0.68", 1, None, None)
NAMES = [
    "settings", "device", "model", "memory", "open files", "port", "data directory", "secrets", "database", "store",
    "redis",
]  # fmt: skip


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real program, which has a test of its own, takes seconds to import torch."""
    monkeypatch.setattr(doctor, "find_device", lambda config: CPU)


def examine(directory: Path, *flags: str, **variables: str) -> Ended:
    chosen = ["--data-dir", str(directory / "data"), "--port", "0", "--host-cache-bytes", "1MiB"]
    if "--model" not in flags:
        chosen += ["--model", str(DEMO / "model"), "--model-name", "slora-demo"]
    return run_command("doctor", *chosen, "--pool-bytes", "1MiB", *flags, **variables)


def statuses(ended: Ended) -> dict[str, str]:
    return {one["name"]: one["status"] for one in json.loads(ended.stdout)["checks"]}


def test_each_check_prints_one_line_or_an_object_of_json_and_nothing_is_created(tmp_path: Path) -> None:
    ended = examine(tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    *lines, last = ended.stdout.splitlines()
    assert [line[9:23].strip() for line in lines] == NAMES
    assert {line.split()[0] for line in lines} <= {"ok", "warning"}
    assert "slora-demo" in lines[2] and last.startswith("slora: ")
    found = json.loads(examine(tmp_path, "--json").stdout)
    assert found["ok"] is True and [one["name"] for one in found["checks"]] == NAMES
    assert set(found["checks"][0]) == {"name", "status", "detail", "remedy"}
    assert list(tmp_path.iterdir()) == []


def test_only_a_failing_check_makes_the_exit_code_1(tmp_path: Path) -> None:
    warned = examine(tmp_path, "--json", SLORA_ADMIN_KEY="short", SLORA_PROT="80")
    assert warned.returncode == 0
    assert statuses(warned)["secrets"] == statuses(warned)["settings"] == "warning"
    assert "did you mean SLORA_PORT?" in warned.stdout
    failed = examine(tmp_path, "--json", "--model", str(tmp_path / "nowhere"))
    assert failed.returncode == 1 and not json.loads(failed.stdout)["ok"]
    assert statuses(failed)["model"] == "fails" and statuses(failed)["port"] == "ok"


def test_without_a_model_everything_else_is_checked(tmp_path: Path) -> None:
    ended = run_command("doctor", "--json", "--data-dir", str(tmp_path / "data"), "--port", "0")
    assert ended.returncode == 1
    assert [name for name, status in statuses(ended).items() if status == "fails"] == ["model"]
    assert "SLORA_MODEL" in ended.stdout


def test_settings_that_serve_refuses_are_the_only_result(tmp_path: Path) -> None:
    ended = examine(tmp_path, "--max-num-seqs", "0", "--json")
    assert ended.returncode == 1 and statuses(ended) == {"settings": "fails"}
    assert "at least 1" in ended.stdout


def test_no_password_is_printed(tmp_path: Path) -> None:
    secret = "pa55-word%40x"
    place = f"slora:{secret}@127.0.0.1:1"
    ended = examine(
        tmp_path,
        *("--database", f"postgresql://{place}/x", "--store", f"redis://{place}/0"),
        *("--quota-redis", f"redis://:{secret}/@127.0.0.1:1/0", "--redis", f"http://{place}/0"),
        SLORA_ADMIN_KEY="the-operators-own-key",
    )
    assert ended.returncode == 1
    for name in ("database", "store", "redis"):
        assert f"fails    {name} " in ended.stdout
    assert ".;" not in ended.stdout
    for text in ("pa55", "the-operators-own-key"):
        assert text not in ended.stdout + ended.stderr
    assert "other users of the machine can see --database" in ended.stdout


def test_a_password_in_a_message_of_a_library_is_masked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "s3cr/et-pw s3cr%2Fet-pw an-admin-key postgresql://slora:a@b@host/x slora_abcdefgh_" + "x" * 43

    def fail(_: object) -> Iterator[Finding]:
        yield warning(text)

    monkeypatch.setattr(doctor.checks, "check_redis", fail)
    ended = examine(tmp_path, "--redis", "redis://u:s3cr%2Fet-pw@host/0", SLORA_ADMIN_KEY="an-admin-key")
    assert "*** *** *** postgresql://slora:***@host/x slora_abcdefgh_***\n" in ended.stdout


def test_a_running_server_is_checked_in_place_of_the_machine(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir(mode=0o700)
    with running_platform(tmp_path / "data", ScriptedEngine()) as platform:
        ended = examine(tmp_path, "--port", platform.url.rpartition(":")[2], "--json")
    assert list(statuses(ended)) == [
        *("settings", "server", "data directory", "secrets", "database", "store", "redis")
    ]
    assert ended.returncode == 0 and statuses(ended)["server"] == "ok", ended.stdout


def test_the_worst_findings_of_a_check_come_first_and_control_characters_are_replaced() -> None:
    found: list[Finding] = [warning("\x1b[2Jodd\nname", "rename it"), fine("rest.")]
    assert (
        doctor.format_line(Result("store", found))
        == "warning  store           ?[2Jodd?name; rest. Remedy: rename it"
    )


def test_a_redis_that_hangs_is_a_failed_check(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        ended = examine(tmp_path, "--redis", url, "--json")
    assert ended.returncode == 1 and statuses(ended)["redis"] == "fails"


def test_a_check_that_hangs_fails_after_its_limit_and_keeps_what_it_found() -> None:
    released = threading.Event()

    def hang() -> Iterator[Finding]:
        yield fine("begun")
        released.wait()

    def end() -> Iterator[Finding]:
        yield fine("done")

    with ThreadPoolExecutor() as threads:
        (late, has_late_ended), (prompt, has_ended) = run_checks(
            [Check("disk", hang, 0.05), Check("other", end, 600)], threads
        )
        released.set()
    assert (late.status, has_late_ended) == (Severity.FAILS, False)
    assert late.detail == "no result within 0.05 s; begun" and "hangs" in late.remedy
    assert (prompt.status, prompt.detail, has_ended) == (Severity.OK, "done", True)


def test_an_error_ends_a_check_with_its_message() -> None:
    def refuse() -> Iterator[Finding]:
        yield warning("odd", "mend it")
        raise ConfigError("it is wrong; do this")

    def break_down() -> Iterator[Finding]:
        yield fine(str(1 // 0))

    with ThreadPoolExecutor() as threads:
        (refused, _), (broken, _) = run_checks(
            [Check("a", refuse, 600), Check("b", break_down, 600)], threads
        )
    assert (refused.detail, refused.remedy) == ("it is wrong; do this; odd", "mend it")
    assert broken.status is Severity.FAILS and "ZeroDivisionError" in broken.detail
