"""What this process and its children may write, for a while: how a full disk feels to them, on any machine."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Meanwhile no file grows beyond this: the kernel answers EFBIG, where a full disk answers ENOSPC."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
