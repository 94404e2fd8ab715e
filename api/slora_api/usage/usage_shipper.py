"""Moves records from the usage journal to the ledger about once a second.

A segment is deleted after its records are committed. If the process crashes before the deletion, the records are sent
again, and the ledger still counts each request once. Each API process also ships the segments of processes that have
died, including those of the engine. While the database does not answer, the records stay in the journal.

The shipper also deletes records and sums that are older than the retention.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from slora.core.usage_journal import UsageJournal, closed_segments, measure_bytes
from slora_adapters.errors import DiskFull, StoreUnavailable
from slora_api.core.threads import control_thread
from slora_api.usage.usage_ledger import DAY_S, HOUR_S, UsageLedger

logger = logging.getLogger(__name__)

_PERIOD_S, _RETRY_S = 1.0, 3.0
# The number of records in one transaction. On SQLite, other writers wait until the transaction ends.
_RECORDS_AT_ONCE = 1000


class UsageShipper:
    """Ships the records of one journal directory.

    journal: the journal of this process, in `directory`.
    retention_days: None if another process deletes old records and sums.
    clock: Unix time.
    """

    def __init__(
        self,
        journal: UsageJournal,
        directory: Path,
        ledger: UsageLedger,
        retention_days: int | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._journal = journal
        self._directory = directory
        self._ledger = ledger
        self._retention_days = retention_days
        self._clock = clock
        self._delete_at = 0.0
        # When the ledger last contained all records of this process.
        self._current_at = clock()
        self._trouble = ""

    @property
    def lag_s(self) -> float:
        """Seconds since the ledger last contained all records of this process."""
        return max(0.0, self._clock() - self._current_at)

    def measure_journal(self) -> int:
        """Returns the size of this host's journals in bytes."""
        return measure_bytes(self._directory)

    async def run(self) -> None:
        """Ships periodically, until cancelled."""
        while True:
            await control_thread(self.ship)
            await asyncio.sleep(_RETRY_S if self._trouble else _PERIOD_S)

    def ship(self) -> None:
        """Ships all records once, and then deletes some of the old records and sums. A lasting error is logged only
        once.
        """
        started_at = self._clock()
        try:
            self._ship_closed()
            # Close the open segment only if the database can be written. Otherwise, an outage would leave thousands of
            # files, and a full disk has no room for another segment.
            if self._journal.has_records:
                self._ledger.check()
                self._journal.rotate().result()
                self._ship_closed()
            self._current_at = started_at
            self._delete_old()
        except (StoreUnavailable, OSError) as error:
            self._note(error)
        else:
            self._note(None)

    def _ship_closed(self) -> None:
        for segment in closed_segments(self._directory):
            records = segment.records
            for start in range(0, len(records), _RECORDS_AT_ONCE):
                self._ledger.add(records[start : start + _RECORDS_AT_ONCE])
            segment.delete()

    def _delete_old(self) -> None:
        """Deletes a limited number of rows in each call, so that new records are not delayed."""
        if self._retention_days is None or self._clock() < self._delete_at:
            return
        if not self._ledger.delete_old(self._clock() - self._retention_days * DAY_S):
            self._delete_at = self._clock() + HOUR_S

    def _note(self, error: Exception | None) -> None:
        trouble = "" if error is None else str(error)
        if trouble and not self._trouble:
            waits = "the disk has space" if isinstance(error, DiskFull) else "the database answers"
            logger.error(
                "usage records stay in the journal of this host, %s, until %s: %s",
                self._directory,
                waits,
                error,
            )
        elif self._trouble and not trouble:
            logger.info("the usage ledger has all records of this process again")
        self._trouble = trouble
