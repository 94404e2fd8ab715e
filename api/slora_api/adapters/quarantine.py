"""Where files of strangers lie until they have been checked: folders that last as long as somebody deals with them.

Whoever fills a folder bounds what goes into it; how many there are at once is bounded by admission.
"""

import asyncio
import logging
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from slora_adapters.full_disk import is_full
from slora_api.errors import DiskFull

__all__ = ["Quarantine"]

_log = logging.getLogger(__name__)


class Quarantine:
    """Owns one directory, and empties it when it starts: what is there then, a killed server left behind."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(mode=0o700, parents=True)

    @asynccontextmanager
    async def folder(self) -> AsyncIterator[Path]:
        """An empty folder, gone with the context, whatever happened. Raises DiskFull if there is no room for what the
        context writes."""
        try:
            folder = Path(tempfile.mkdtemp(dir=self._directory))
            try:
                yield folder
            finally:
                # On a thread: a disk that stalls must not stall everybody's tokens.
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        except OSError as error:
            if not is_full(error):
                raise
            _log.error("an upload finds no room in %s: %s", self._directory, error)
            raise DiskFull from None
