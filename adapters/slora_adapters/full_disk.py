"""Tells an error of a file system that has no room from all others."""

import errno

__all__ = ["is_full"]

# The disk, the owner's quota, the limit on one file.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in _FULL
