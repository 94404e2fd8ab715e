"""The disk reserve exists completely or not at all, and decides whether changes are allowed."""

from pathlib import Path
from unittest.mock import patch

import pytest

from slora_adapters.errors import DiskFull
from slora_adapters.process import full_disk
from slora_adapters.process.full_disk import DiskReserve
from tests.support.file_limit import largest_file

SIZE = 1 << 20


def test_a_new_reserve_allocates_its_disk_space(tmp_path: Path) -> None:
    reserve = DiskReserve(tmp_path / "reserve", SIZE)
    assert not reserve.is_full and (tmp_path / "reserve").stat().st_blocks * 512 >= SIZE
    reserve.check()
    assert [path.name for path in tmp_path.iterdir()] == ["reserve"]


def test_a_full_disk_counts_as_full_until_the_reserve_is_restored(tmp_path: Path) -> None:
    with largest_file(1000):
        reserve = DiskReserve(tmp_path / "reserve", SIZE)
        assert reserve.is_full and not reserve.watch() and not list(tmp_path.iterdir())
        with pytest.raises(DiskFull):
            reserve.check()
    assert reserve.is_full, "the disk was not looked at since"
    assert reserve.watch() and not reserve.is_full
    reserve.check()


def test_a_freed_reserve_is_restored_when_there_is_space(tmp_path: Path) -> None:
    reserve = DiskReserve(tmp_path / "reserve", SIZE)
    assert reserve.free() and reserve.is_full and not (tmp_path / "reserve").exists()
    assert not reserve.free(), "there is nothing left to free"
    assert reserve.watch() and (tmp_path / "reserve").stat().st_size == SIZE


def test_the_space_of_a_freed_reserve_does_not_count_as_free_space(tmp_path: Path) -> None:
    reserve = DiskReserve(tmp_path / "reserve", SIZE)
    reserve.free()
    with patch.object(full_disk, "has_space", lambda directory, num_bytes: num_bytes < SIZE):
        assert not reserve.watch() and (tmp_path / "reserve").exists()
    assert reserve.watch()
