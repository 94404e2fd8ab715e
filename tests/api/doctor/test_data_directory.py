"""The data directory, its secrets, and the file system below it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slora_api.core.data_dir import find_lock_holder, open_data_dir
from slora_api.core.settings import Settings
from slora_api.doctor import checks
from slora_api.doctor.checks import Finding, Severity, check_data_directory, check_secrets, find_file_system
from tests.api.doctor.test_machine import SETTINGS, worst

MOUNTS = """\
21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 21 0:40 / /srv rw - nfs4 host:/srv rw
31 30 0:41 / /srv/my\\040disk rw - xfs /dev/sdb rw
32 21 0:42 / /run rw - tmpfs tmpfs rw
"""


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "data").mkdir(mode=0o700)
    return replace(SETTINGS, data_dir=str(tmp_path / "data"))


def check(settings: Settings) -> Iterator[Finding]:
    return check_data_directory(settings, is_in_use=False)


def test_a_directory_that_another_server_uses_fails_unless_it_answers_on_the_port(settings: Settings) -> None:
    path = Path(settings.data_dir)
    assert find_lock_holder(path) is None
    with open_data_dir(path):
        status, text = worst(check(settings))
        assert status is Severity.FAILS and "another slora server uses it (process " in text
        assert worst(check_data_directory(settings, is_in_use=True))[0] is not Severity.FAILS
    assert find_lock_holder(path) is None


@pytest.mark.parametrize(
    ("kind", "status", "words"),
    [
        ("nfs4", Severity.WARNING, "PostgreSQL"),
        ("tmpfs", Severity.WARNING, "it is on tmpfs"),
        ("overlay", Severity.WARNING, "mount a volume"),
        ("xfs", Severity.OK, "on xfs"),
    ],
)
def test_a_file_system_that_may_lose_data_is_a_warning(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, kind: str, status: Severity, words: str
) -> None:
    monkeypatch.setattr(checks, "find_file_system", lambda _: kind)
    found, text = worst(check(replace(settings, max_upload_bytes=1)))
    assert found is status and words in text


def test_a_disk_with_little_room_is_a_warning_and_a_full_one_fails(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, text = worst(check(replace(settings, max_upload_bytes=1 << 60)))
    assert status is Severity.WARNING and "uploads" in text
    monkeypatch.setattr(checks, "has_space", lambda *_: False)
    assert worst(check(settings))[0] is Severity.FAILS


def test_a_disk_that_does_not_sync_fails(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.fsync", fail)
    status, text = worst(check(settings))
    assert status is Severity.FAILS and "Input/output error" in text
    assert list(Path(settings.data_dir).iterdir()) == []


def test_the_mount_with_the_longest_path_decides(tmp_path: Path) -> None:
    table = tmp_path / "proc" / "self" / "mountinfo"
    table.parent.mkdir(parents=True)
    table.write_text(MOUNTS, encoding="utf-8")
    kinds = [find_file_system(Path(p), tmp_path) for p in ("/srv/a", "/srv/my disk/a", "/run", "/srvx")]
    assert kinds == ["nfs4", "xfs", "tmpfs", "ext4"]


def test_secrets_that_others_may_read_are_a_warning(settings: Settings) -> None:
    pepper = Path(settings.data_dir) / "pepper"
    pepper.write_bytes(bytes(32))
    pepper.chmod(0o600)
    assert worst(check_secrets(settings, {}))[0] is Severity.OK
    pepper.chmod(0o640)
    status, text = worst(check_secrets(settings, {}))
    assert status is Severity.WARNING and f"chmod 600 {pepper}" in text


def test_a_database_without_its_pepper_fails(settings: Settings) -> None:
    (Path(settings.data_dir) / "slora.db").touch()
    status, text = worst(check_secrets(settings, {}))
    assert status is Severity.FAILS and "restore the file from a backup" in text
    assert not (Path(settings.data_dir) / "pepper").exists()


def test_secrets_in_flags_are_a_warning(settings: Settings) -> None:
    given = {"admin_key": "a-long-and-random-key", "redis": "redis://:pw@host/0", "store": "redis://host/0"}
    status, text = worst(check_secrets(settings, given))
    assert status is Severity.WARNING
    assert "SLORA_ADMIN_KEY" in text and "SLORA_REDIS" in text and "SLORA_STORE" not in text
