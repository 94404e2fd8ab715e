"""Detects whether an adapter's directory has changed since its files were read, without reading them again."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from slora_adapters.peft.peft_directory import MEMBER_NAMES

__all__ = ["DirectoryState"]

# A file system's timestamps may be as coarse as one second. Two writes within one tick have the same timestamp, so an
# equal timestamp does not prove that a recently written file is unchanged.
_TICK_NS = 2_000_000_000

# Device, inode, size, mtime, ctime. A program cannot set the ctime back.
_FileState = tuple[int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class DirectoryState:
    """The state of every file that affects an adapter's output. The state must be taken before the files are read."""

    files: tuple[_FileState | None, ...]
    read_ns: int

    @classmethod
    def read(cls, directory: Path) -> Self:
        read_ns = time.time_ns()
        return cls(tuple(_file_state(directory / name) for name in MEMBER_NAMES), read_ns)

    def proves_unchanged(self, earlier: "DirectoryState") -> bool:
        """Returns whether no file has changed since the earlier state was taken. Returns False if that is uncertain."""
        return self.files == earlier.files and earlier._is_settled()

    def _is_settled(self) -> bool:
        newest_ns = max((state[-1] for state in self.files if state is not None), default=0)
        return newest_ns + _TICK_NS < self.read_ns


def _file_state(path: Path) -> _FileState | None:
    try:
        found = os.stat(path)
    except OSError:  # a later read of the directory reports the error
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
