"""Watches the free space of the data directory's disk, and writes pending revocations when there is room again.

This is one task of the API process. It checks the disk every few seconds, on a thread, because a disk may stall.
"""

import asyncio
import logging

from slora_adapters.disk_reserve import DiskReserve
from slora_adapters.errors import DiskFull, StoreUnavailable
from slora_api.tenants.key_store import KeyStore

__all__ = ["DiskWatch"]

logger = logging.getLogger(__name__)

_PERIOD_S = 2.0


class DiskWatch:
    """A read-only server becomes writable again only while `run` is running."""

    def __init__(self, reserve: DiskReserve, key_store: KeyStore) -> None:
        self._reserve = reserve
        self._key_store = key_store
        # The last error, so that a lasting error is logged once.
        self._trouble = ""

    async def run(self) -> None:
        """Checks the disk periodically, until cancelled."""
        while True:
            await asyncio.to_thread(self.check)
            await asyncio.sleep(_PERIOD_S)

    def check(self) -> None:
        """Checks the disk once. Pending revocations are tried even if it is full, because the disk reserve is meant for
        them.
        """
        trouble = ""
        try:
            self._reserve.watch()
            self._key_store.write_pending_revocations()
        except DiskFull:
            pass  # `DiskReserve` has logged it
        except (OSError, StoreUnavailable) as error:
            trouble = str(error)
        if trouble and trouble != self._trouble:
            logger.error("the disk of %s cannot be used: %s", self._reserve.directory, trouble)
        self._trouble = trouble
