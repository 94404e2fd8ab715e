"""What this process and its children may write, for a while: how a full disk feels to them, on any machine."""

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def largest_file(num_bytes: int) -> Iterator[Callable[[], None]]:
    """Meanwhile no file grows beyond this: the kernel answers EFBIG, where a full disk answers ENOSPC. Yields what ends
    it early."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))

    def lift() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    try:
        yield lift
    finally:
        lift()
