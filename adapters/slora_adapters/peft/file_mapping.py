"""Memory mapping of files."""

import mmap
from pathlib import Path


def map_file(path: Path) -> memoryview:
    """Returns a read-only view of a file's bytes. It stays valid when the file is unlinked or replaced."""
    with path.open("rb") as file:
        if file.seek(0, 2) == 0:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
