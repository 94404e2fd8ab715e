"""Detects a file system without free space."""

import errno
import os
import tempfile
from pathlib import Path

__all__ = ["has_space", "is_full"]

# Error numbers of a full disk, an exceeded user quota, and an exceeded limit on file size.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in _FULL


def has_space(directory: Path, num_bytes: int) -> bool:
    """Returns whether a file of this size can be written in the directory. Tries to allocate such a file, because
    `statvfs` ignores the user's quota.
    """
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
    except OSError as error:
        if is_full(error):
            return False
        raise
    return True
