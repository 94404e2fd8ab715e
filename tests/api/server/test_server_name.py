"""Two servers never have the same name, even if one data directory is a copy of the other."""

import shutil
from pathlib import Path

import pytest

from slora_api.server.server_name import read_server_name


def test_a_server_keeps_its_name_over_restarts(tmp_path: Path) -> None:
    name = read_server_name(tmp_path / "server-name")
    assert len(name) == 32 and read_server_name(tmp_path / "server-name") == name


def test_a_copied_data_directory_gets_another_name(tmp_path: Path) -> None:
    original, copy = tmp_path / "data", tmp_path / "copy"
    original.mkdir()
    name = read_server_name(original / "server-name")
    shutil.copytree(original, copy)
    other = read_server_name(copy / "server-name")
    assert other != name and read_server_name(copy / "server-name") == other
    assert read_server_name(original / "server-name") == name, "the original keeps its name"


def test_the_same_directory_on_another_machine_gets_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cloned volume has the same inodes, so the machine must be part of the check."""
    monkeypatch.setattr("slora_api.server.server_name._read_machine_id", lambda: "one")
    name = read_server_name(tmp_path / "server-name")
    monkeypatch.setattr("slora_api.server.server_name._read_machine_id", lambda: "other")
    assert read_server_name(tmp_path / "server-name") != name


@pytest.mark.parametrize("content", ["", "0" * 32, "a\nb\nc"])
def test_a_file_without_a_place_is_replaced(tmp_path: Path, content: str) -> None:
    """Earlier releases wrote only the name. Such a file may be a copy."""
    (tmp_path / "server-name").write_text(content)
    name = read_server_name(tmp_path / "server-name")
    assert name != content and read_server_name(tmp_path / "server-name") == name
