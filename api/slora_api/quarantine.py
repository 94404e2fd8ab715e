"""Where files of strangers lie until they have been checked: folders that last as long as somebody deals with them.

Whoever fills a folder bounds what goes into it; how many there are at once is bounded by admission.
"""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

__all__ = ["Quarantine"]


class Quarantine:
    """Owns one directory, and empties it when it starts: what is there then, a killed server left behind."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(mode=0o700, parents=True)

    @asynccontextmanager
    async def folder(self) -> AsyncIterator[Path]:
        """An empty folder, gone with the context, whatever happened."""
        folder = Path(tempfile.mkdtemp(dir=self._directory))
        try:
            yield folder
        finally:
            # On a thread: a disk that stalls must not stall everybody's tokens.
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
