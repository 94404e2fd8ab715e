"""Watches the free space of the data directory's disk, and writes pending revocations to the database.

Each API process runs this as one task. The disk is checked every few seconds, on a thread, because a disk may stall.
"""

import asyncio
import logging

from slora_adapters.errors import DiskFull, StoreUnavailable
from slora_adapters.process.full_disk import DiskReserve
from slora_api.core.threads import control_thread
from slora_api.keys.key_store import KeyStore

logger = logging.getLogger(__name__)

_PERIOD_S = 2.0


class DiskWatch:
    """Watches the disk while `run` is running. Without `run`, a read-only server never becomes writable again."""

    def __init__(self, reserve: DiskReserve, key_store: KeyStore) -> None:
        self._reserve = reserve
        self._key_store = key_store
        # The last logged error, so that a lasting error is logged only once.
        self._trouble = ""

    async def run(self) -> None:
        """Checks the disk periodically, until cancelled."""
        while True:
            await control_thread(self.check)
            await asyncio.sleep(_PERIOD_S)

    def check(self) -> None:
        """Checks the disk once, and writes pending revocations even if the disk is full. The disk reserve makes room
        for them.
        """
        trouble = ""
        try:
            self._reserve.watch()
            self._key_store.write_pending_revocations()
        except DiskFull:
            pass  # `DiskReserve` has logged the error.
        except (OSError, StoreUnavailable) as error:
            trouble = str(error)
        if trouble and trouble != self._trouble:
            logger.error("the disk of %s cannot be used: %s", self._reserve.directory, trouble)
        self._trouble = trouble
