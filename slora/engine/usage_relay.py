"""Usage that no API process has recorded yet.

The engine sends the usage of each ended request to the API process that sent the request. That process writes the usage
to its journal and acknowledges it. If the process dies first, the engine writes the record to its own journal. So the
usage is recorded at least once, whichever process dies, and the ledger counts each request id once.

    add ---> unfinished ---- end ----> unacknowledged ---- acknowledge ----> (recorded by the API process)
   release <-----+                          |
              abandon                    abandon
                 v                          v
             abandoned ----- end ----> (recorded by the engine)
"""

import time
from dataclasses import replace
from itertools import islice

from slora.core.request import EngineRequest, RequestUsage
from slora.core.usage_journal import UsageJournal, UsageRecord

# With more unacknowledged requests, the engine records the oldest ones itself.
_MAX_UNACKNOWLEDGED = 10_000


class UsageRelay:
    """The usage of one API process's requests.

    Call the methods on one event loop. Ids are those of the API process.
    """

    def __init__(self, journal: UsageJournal) -> None:
        self._journal = journal
        self._unfinished: dict[str, UsageRecord] = {}
        self._unacknowledged: dict[str, UsageRecord] = {}
        self._is_abandoned = False

    @property
    def is_empty(self) -> bool:
        """Whether the API process knows the usage of all requests, and has recorded it."""
        return not (self._unfinished or self._unacknowledged)

    @property
    def unfinished(self) -> list[str]:
        """The ids of the requests whose usage is not known yet."""
        return list(self._unfinished)

    @property
    def num_unacknowledged(self) -> int:
        return len(self._unacknowledged)

    def add(self, request_id: str, request: EngineRequest) -> None:
        self._unfinished[request_id] = UsageRecord(
            request_id,
            request.tenant,
            request.account,
            request.adapter_digests,
            0.0,
            RequestUsage(),
            is_batch=request.is_background,
        )

    def end(self, request_id: str, usage: RequestUsage) -> None:
        """Adds the usage of an ended request. Makes no record if nothing was used or there is no account to bill."""
        record = self._unfinished.pop(request_id, None)
        if record is None or not record.account or usage == RequestUsage():
            return
        record = replace(record, ended_at=time.time(), usage=usage)
        if self._is_abandoned:
            self._record([record])
            return
        self._unacknowledged[request_id] = record
        if len(self._unacknowledged) > _MAX_UNACKNOWLEDGED:
            oldest = list(islice(self._unacknowledged, _MAX_UNACKNOWLEDGED // 2))
            self._record([self._unacknowledged.pop(request_id) for request_id in oldest])

    def release(self, request_id: str) -> None:
        """Forgets an unfinished request, which another engine continues. That engine reports the usage of all of it."""
        self._unfinished.pop(request_id, None)

    def acknowledge(self, request_id: str) -> None:
        """Forgets a request whose usage the API process has recorded."""
        self._unacknowledged.pop(request_id, None)

    def abandon(self) -> None:
        """Called when the API process is gone. From now on, the engine records the usage itself.

        The engine records unacknowledged usage now, and the usage of unfinished requests when they end.
        """
        self._is_abandoned = True
        records, self._unacknowledged = list(self._unacknowledged.values()), {}
        self._record(records)

    def _record(self, records: list[UsageRecord]) -> None:
        # The journal logs a record that it cannot write.
        for record in records:
            self._journal.append(record)
        if records:
            self._journal.rotate()
