"""The command `slora doctor`: its lines, its JSON, its exit code, and what it must not print or change."""

import json
import socket
from pathlib import Path

import pytest

from slora.device.device_facts import DeviceFacts
from slora_api.doctor import doctor
from slora_api.doctor.finding import Finding, Result, fine, warning
from slora_api.doctor.secret_mask import SecretMask
from tests.api.command import Ended, run_command

DEMO = Path(__file__).parents[3] / "demo"
CPU = DeviceFacts("cpu", "CPU", 0, "numba", "2.13", "3.9", "0.68", 1, None, None)
NAMES = [
    "settings", "device", "model", "memory", "shared memory", "cores", "open files", "port", "data directory",
    "secrets", "database", "store", "redis", "clock",
]  # fmt: skip


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real program, which has a test of its own, takes seconds to import torch."""
    monkeypatch.setattr(doctor, "find_device", lambda config: CPU)


def examine(directory: Path, *flags: str, **variables: str) -> Ended:
    chosen = ["--data-dir", str(directory / "data"), "--port", "0", "--host-cache-bytes", "1MiB"]
    if "--model" not in flags:
        chosen += ["--demo", str(DEMO)]
    return run_command("doctor", *chosen, "--pool-bytes", "1MiB", *flags, **variables)


def statuses(ended: Ended) -> dict[str, str]:
    return {one["name"]: one["status"] for one in json.loads(ended.stdout)["checks"]}


def test_each_check_prints_one_line_and_nothing_is_created(tmp_path: Path) -> None:
    ended = examine(tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    *lines, last = ended.stdout.splitlines()
    assert [line[9:23].strip() for line in lines] == NAMES
    assert {line.split()[0] for line in lines} <= {"ok", "warning"}
    assert "slora-demo" in lines[2] and last.startswith("slora: ")
    assert list(tmp_path.iterdir()) == []


def test_json_has_the_same_results(tmp_path: Path) -> None:
    ended = examine(tmp_path, "--json")
    found = json.loads(ended.stdout)
    assert found["ok"] is True and [one["name"] for one in found["checks"]] == NAMES
    assert set(found["checks"][0]) == {"name", "status", "detail", "remedy"}


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
    for text in ("pa55", "the-operators-own-key"):
        assert text not in ended.stdout + ended.stderr
    assert "other users of the machine can see --database" in ended.stdout


def test_a_password_in_a_message_of_a_library_is_masked() -> None:
    mask = SecretMask({"redis": "redis://u:s3cr%2Fet-pw@host/0", "admin_key": "an-admin-key"})
    told = mask.mask(
        "s3cr/et-pw s3cr%2Fet-pw an-admin-key postgresql://slora:a@b@host/x slora_abcdefgh_" + "x" * 43
    )
    assert told == "*** *** *** postgresql://slora:***@host/x slora_abcdefgh_***"


def test_the_worst_findings_of_a_check_come_first_and_control_characters_are_replaced() -> None:
    found: list[Finding] = [warning("\x1b[2Jodd\nname", "rename it"), fine("rest.")]
    assert (
        doctor._format_line(Result("store", found))
        == "warning  store           ?[2Jodd?name; rest. Remedy: rename it"
    )


def test_a_redis_that_hangs_is_a_failed_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slora_adapters.store.redis_facts._TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        ended = examine(tmp_path, "--redis", url, "--json")
    assert ended.returncode == 1 and statuses(ended)["redis"] == "fails"
