"""Holds uploaded files until they have been checked, in one folder per upload. The folder is deleted when the upload
ends.

The code that fills a folder bounds its contents. `RequestLimiter` bounds the number of folders.
"""

import logging
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from slora_adapters.errors import DiskFull
from slora_adapters.process.full_disk import DiskReserve, is_full
from slora_api.core.threads import control_thread, tenant_thread

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StagedUpload:
    """An upload whose files are on the disk and have not been checked.

    source: a directory with the files of a PEFT adapter, or an archive file.
    base_fingerprint: fingerprint of the base model that the adapter was trained on; None if the client sent none.
    """

    name: str
    source: Path
    base_fingerprint: str | None = None


class Quarantine:
    """Owns one directory and empties it at the start, because a killed server may have left files there.

    reserve: the disk reserve; None if there is none.
    """

    def __init__(self, directory: Path, reserve: DiskReserve | None = None) -> None:
        self._directory = directory
        self._reserve = reserve
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(mode=0o700, parents=True)

    @asynccontextmanager
    async def folder(self, tenant: str) -> AsyncIterator[Path]:
        """Yields an empty folder for an upload of the tenant, and always deletes it at the end of the context. Raises
        DiskFull if the disk has no room for what the context writes.
        """
        if self._reserve is not None:
            self._reserve.check()
        try:
            folder = Path(tempfile.mkdtemp(dir=self._directory))
            try:
                yield folder
            finally:
                # This runs on a thread, because a stalled disk must not delay the tokens of all tenants.
                await tenant_thread(tenant, shutil.rmtree, folder, ignore_errors=True)
        except OSError as error:
            if not is_full(error):
                raise
            _log.error("there is no space for an upload in %s: %s", self._directory, error)
            if self._reserve is not None:
                # Check the reserve only now, when the folder is deleted and the disk has room again. One upload that is
                # too large for the disk must not make the server read-only.
                await control_thread(self._reserve.watch)
            raise DiskFull(self._directory.parent) from None
