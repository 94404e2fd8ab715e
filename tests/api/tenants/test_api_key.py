import re
import stat
from pathlib import Path

import pytest

from slora_api.core.data_dir import DataDir
from slora_api.keys.key_record import Pepper, make_key, open_admin_key, read_key_id
from slora_api.serve.main_process import keep_until_seen
from tests.support.file_limit import largest_file


def test_a_key_has_prefix_id_secret_and_checksum_is_new_and_hides_its_secret() -> None:
    key = make_key()
    assert re.fullmatch(r"slora_[0-9A-Za-z]{8}_[0-9A-Za-z]{43}_[0-9A-Za-z]{6}", key.secret)
    assert read_key_id(key.secret) == key.key_id
    assert key.secret not in repr(key)
    assert len({make_key().secret for _ in range(100)}) == 100


@pytest.mark.parametrize("position", [6, 20, -1])
def test_a_key_with_one_changed_character_fails_its_checksum(position: int) -> None:
    text = list(make_key().secret)
    text[position] = "A" if text[position] != "A" else "B"
    assert read_key_id("".join(text)) is None


@pytest.mark.parametrize(
    "text", ["", "slora_", "sk-abc", "slora_12345678_short_000000", "x" * 10_000, "slora_é"]
)
def test_malformed_keys_have_no_key_id(text: str) -> None:
    assert read_key_id(text) is None


def test_the_pepper_is_made_once_readable_by_its_owner_only_and_another_recognises_no_key(
    tmp_path: Path,
) -> None:
    path = tmp_path / "pepper"
    first, second = Pepper.from_file(path), Pepper.from_file(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    other = Pepper.from_file(tmp_path / "other")
    assert second.matches("a key", first.digest("a key"))
    assert not other.matches("a key", first.digest("a key"))


def test_a_pepper_that_could_not_be_written_is_created_at_the_next_start(tmp_path: Path) -> None:
    """Born from a bug: a full disk left an empty pepper file, with which no server could start any more."""
    with largest_file(0), pytest.raises(OSError, match="File too large"):
        Pepper.from_file(tmp_path / "pepper")
    assert Pepper.from_file(tmp_path / "pepper").digest("a key")


def test_an_admin_key_that_could_not_be_written_is_created_at_the_next_start(tmp_path: Path) -> None:
    pepper = Pepper.from_file(tmp_path / "pepper")
    with largest_file(0), pytest.raises(OSError, match="File too large"):
        open_admin_key("", tmp_path, pepper)
    assert open_admin_key("", tmp_path, pepper).shown_once is not None


def test_an_admin_key_that_nobody_could_see_is_made_again_at_the_next_start(tmp_path: Path) -> None:
    """Born from a fault: on a full disk, the hash of the key was kept and the key itself was not."""
    pepper = Pepper.from_file(tmp_path / "pepper")
    made = open_admin_key("", tmp_path, pepper)
    with largest_file(0), pytest.raises(OSError, match="File too large"):
        keep_until_seen(DataDir(tmp_path), made)
    again = open_admin_key("", tmp_path, pepper)
    keep_until_seen(DataDir(tmp_path), again)
    assert (tmp_path / "admin-key").read_text(encoding="utf-8") == again.shown_once


def test_a_damaged_pepper_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "pepper").write_bytes(b"short")
    with pytest.raises(ValueError, match="restore the file from a backup"):
        Pepper.from_file(tmp_path / "pepper")


def test_the_admin_key_is_made_and_shown_once_and_stored_hashed(tmp_path: Path) -> None:
    pepper = Pepper.from_file(tmp_path / "pepper")
    first = open_admin_key("", tmp_path, pepper)
    assert first.shown_once is not None and first.matches(first.shown_once)
    second = open_admin_key("", tmp_path, pepper)
    assert second.shown_once is None and second.matches(first.shown_once)
    stored = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert first.shown_once.encode() not in stored
    assert first.shown_once not in repr(first)


def test_a_given_admin_key_is_the_only_one_that_is_valid(tmp_path: Path) -> None:
    pepper = Pepper.from_file(tmp_path / "pepper")
    made = open_admin_key("", tmp_path, pepper).shown_once
    given = open_admin_key("a-key-of-the-operator", tmp_path, pepper)
    assert made is not None and not given.matches(made)
    assert given.matches("a-key-of-the-operator") and given.shown_once is None
