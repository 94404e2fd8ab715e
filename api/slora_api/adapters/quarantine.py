"""Where uploaded files lie until they have been checked: a folder for each upload, deleted at its end.

The code that fills a folder bounds what goes into it. Admission bounds how many folders there are at once.
"""

import asyncio
import logging
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from slora_adapters.disk_reserve import DiskReserve
from slora_adapters.errors import DiskFull
from slora_adapters.full_disk import is_full

__all__ = ["Quarantine"]

_log = logging.getLogger(__name__)


class Quarantine:
    """Owns one directory, and empties it when it starts: what is there then, a killed server left behind.

    reserve: of the disk; None for none.
    """

    def __init__(self, directory: Path, reserve: DiskReserve | None = None) -> None:
        self._directory = directory
        self._reserve = reserve
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(mode=0o700, parents=True)

    @asynccontextmanager
    async def folder(self) -> AsyncIterator[Path]:
        """An empty folder, deleted with the context, whatever happened. Raises DiskFull if there is no room for what
        the context writes."""
        if self._reserve is not None:
            self._reserve.check()
        try:
            folder = Path(tempfile.mkdtemp(dir=self._directory))
            try:
                yield folder
            finally:
                # On a thread: a disk that stalls must not stall all tenants' tokens.
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        except OSError as error:
            if not is_full(error):
                raise
            _log.error("an upload finds no room in %s: %s", self._directory, error)
            if self._reserve is not None:
                # The folder is gone: an upload that is too large for the disk must not refuse other changes.
                await asyncio.to_thread(self._reserve.watch)
            raise DiskFull(self._directory.parent) from None
