"""Follows how full the data directory's disk is, and finishes what had to wait for room.

One task of the API process. The disk is looked at every few seconds, on a thread, because a disk may stall.
"""

import asyncio
import logging

from slora_adapters.disk_reserve import DiskReserve
from slora_adapters.errors import DiskFull, StoreUnavailable
from slora_api.tenants.tenancy import Tenancy

__all__ = ["DiskWatch"]

logger = logging.getLogger(__name__)

_PERIOD_S = 2.0


class DiskWatch:
    """`run` must be running for a server on a full disk to become writable again."""

    def __init__(self, reserve: DiskReserve, tenancy: Tenancy) -> None:
        self._reserve = reserve
        self._tenancy = tenancy
        # What was logged last, so that a lasting error is logged once.
        self._trouble = ""

    async def run(self) -> None:
        """Watches, until cancelled."""
        while True:
            await asyncio.to_thread(self.look)
            await asyncio.sleep(_PERIOD_S)

    def look(self) -> None:
        """Once. Revocations are tried on a full disk, too: the reserve is theirs."""
        trouble = ""
        try:
            self._reserve.watch()
            self._tenancy.write_pending_revocations()
        except DiskFull:
            pass  # the reserve has said so
        except (OSError, StoreUnavailable) as error:
            trouble = str(error)
        if trouble and trouble != self._trouble:
            logger.error("the disk of %s cannot be used: %s", self._reserve.directory, trouble)
        self._trouble = trouble
