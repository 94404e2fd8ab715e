"""Detects from inodes whether an adapter's files have changed."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from slora_adapters.peft.adapter import TENSORS_NAME
from slora_adapters.peft.peft_directory import MEMBER_NAMES, DirectoryState
from tests.adapters.hand_made import make_members, write_directory

LONG_NS = 10**10


def take(directory: Path) -> DirectoryState:
    """The directory's state, as if it were taken long after its last write."""
    newest = max(path.stat().st_ctime_ns for path in directory.iterdir())
    return replace(DirectoryState.read(directory), read_ns=newest + LONG_NS)


def replace_in_place(path: Path) -> None:
    times = path.stat().st_mtime_ns
    path.write_bytes(bytes(len(path.read_bytes())))
    os.utime(path, ns=(times, times))


def replace_by_rename(path: Path) -> None:
    times = path.stat().st_mtime_ns
    other = path.with_suffix(".new")
    other.write_bytes(bytes(len(path.read_bytes())))
    os.utime(other, ns=(times, times))
    other.rename(path)


CHANGES: dict[str, Callable[[Path], None]] = {
    "written": lambda path: path.write_bytes(b"{}") and None,
    "in place": replace_in_place,
    "renamed": replace_by_rename,
    "removed": Path.unlink,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", MEMBER_NAMES)
def test_a_change_of_any_file_is_seen(tmp_path: Path, name: str, change: str) -> None:
    write_directory(tmp_path, make_members())
    path = tmp_path / name
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_text("something", encoding="utf-8")
    before = take(tmp_path)
    assert take(tmp_path).proves_unchanged(before)
    CHANGES[change](path)
    assert not take(tmp_path).proves_unchanged(before)


def test_a_file_that_has_just_changed_is_not_proved_unchanged(tmp_path: Path) -> None:
    """Another write within the same tick of the file system's clock would not change the state."""
    write_directory(tmp_path, make_members())
    os.utime(tmp_path / TENSORS_NAME)
    state = DirectoryState.read(tmp_path)
    assert not DirectoryState.read(tmp_path).proves_unchanged(state)
