"""The disk reserve exists completely or not at all, and decides whether changes are allowed."""

from pathlib import Path

import pytest

from slora_adapters.disk_reserve import DiskReserve
from slora_adapters.errors import DiskFull
from tests.support.file_limit import largest_file

SIZE = 1 << 20


def test_the_reserve_takes_its_room_when_it_is_made(tmp_path: Path) -> None:
    reserve = DiskReserve(tmp_path / "reserve", SIZE)
    assert not reserve.is_full and (tmp_path / "reserve").stat().st_blocks * 512 >= SIZE
    reserve.check()
    assert [path.name for path in tmp_path.iterdir()] == ["reserve"]


def test_a_disk_is_full_from_the_first_look_and_until_the_reserve_is_whole_again(tmp_path: Path) -> None:
    with largest_file(1000):
        reserve = DiskReserve(tmp_path / "reserve", SIZE)
        assert reserve.is_full and not reserve.watch() and not list(tmp_path.iterdir())
        with pytest.raises(DiskFull):
            reserve.check()
    assert reserve.is_full, "the disk was not looked at since"
    assert reserve.watch() and not reserve.is_full
    reserve.check()


def test_a_reserve_is_given_up_once_and_made_again(tmp_path: Path) -> None:
    reserve = DiskReserve(tmp_path / "reserve", SIZE)
    assert reserve.free() and reserve.is_full and not (tmp_path / "reserve").exists()
    assert not reserve.free(), "there is nothing left to free"
    assert reserve.watch() and (tmp_path / "reserve").stat().st_size == SIZE


def test_the_room_that_a_given_up_reserve_left_is_not_taken_for_room_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve = DiskReserve(tmp_path / "reserve", SIZE)
    reserve.free()
    monkeypatch.setattr(
        "slora_adapters.disk_reserve.has_space", lambda directory, num_bytes: num_bytes < SIZE
    )
    assert not reserve.watch() and (tmp_path / "reserve").exists()
    monkeypatch.undo()
    assert reserve.watch()
