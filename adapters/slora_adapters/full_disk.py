"""Tells a file system without room from all other errors."""

import errno
import os
import tempfile
from pathlib import Path

__all__ = ["has_room", "is_full"]

# The disk, the owner's quota, the limit on one file.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in _FULL


def has_room(directory: Path, num_bytes: int) -> bool:
    """Whether a file of this size can be written there. Tries it: `statvfs` knows no quota of the owner."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
    except OSError as error:
        if is_full(error):
            return False
        raise
    return True
