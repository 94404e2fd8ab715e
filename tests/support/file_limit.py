"""Limits the file size that this process and its children may write. It simulates a full disk on any machine."""

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def largest_file(num_bytes: int) -> Iterator[Callable[[], None]]:
    """While the context is open, no file can grow beyond `num_bytes`. Yields a function that removes the limit
    early.

    The kernel answers EFBIG, where a full disk answers ENOSPC.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))

    def lift() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    try:
        yield lift
    finally:
        lift()
