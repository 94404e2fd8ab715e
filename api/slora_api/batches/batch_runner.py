"""Works on the batches of all tenants, in each API process.

A runner claims batches with leases in the database. So several processes and hosts share the work, and another runner
takes over the batches of a runner that died.
"""

import asyncio
import logging
import sys
import uuid
from contextlib import suppress
from functools import partial
from weakref import WeakValueDictionary

from starlette.types import ASGIApp

from slora_adapters.errors import StoreUnavailable
from slora_api.batches.batch_run import LEASE_S, BatchRun, BatchWork, DelayedLines
from slora_api.batches.batches import Batches
from slora_api.completions.services import Generator
from slora_api.core.cpu_budget import CpuBudget
from slora_api.core.fair_slots import FairSlots, reserved_slots
from slora_api.core.threads import HOUSEKEEPING, tenant_thread
from slora_api.keys.key_store import KeyStore
from slora_api.keys.running_requests import RunningRequests

logger = logging.getLogger(__name__)

# The maximum number of batches in progress in one process. Each batch holds one line that waits for a slot.
MAX_RUNNING = 16
# This many of the batches are reserved for tenants without another batch in progress in this process.
NUM_RESERVED = reserved_slots(MAX_RUNNING)
_SWEEP_S = 60.0
# The budget of CPU time of one tenant, in one API process. Reading a line of 2 KB and writing its answer take 0.15 ms,
# so a fifth of a core is enough for 1,300 lines/s.
BURST_S, REFILL = 0.1, 0.2


class BatchRunner:
    """Claims batches and works on several at once.

    app: the routes, without the layers that authenticate clients. num_lines: the maximum number of lines in flight in
        this process. poll_s: how often the runner looks for a batch.
    """

    def __init__(
        self,
        batches: Batches,
        app: ASGIApp,
        generator: Generator,
        key_store: KeyStore,
        running: RunningRequests,
        num_lines: int,
    ) -> None:
        self.poll_s = 1.0
        self._generator = generator
        self._batches = batches
        # Each run keeps the lock of its tenant.
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._work = BatchWork(
            uuid.uuid4().hex,
            batches,
            app,
            key_store,
            running,
            # No line is refused, even if many lines wait. A batch reads its next line only after the previous line got
            # a slot.
            FairSlots(num_lines, sys.maxsize, "lines of batches"),
            DelayedLines(num_lines),
            CpuBudget(BURST_S, REFILL, "batches"),
            generator.metrics.count_line,
        )
        self._runs: dict[asyncio.Task[None], str] = {}

    async def run(self) -> None:
        """Works on batches until cancelled, and then releases its leases."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._claim())
                group.create_task(self._sweep())
        finally:
            for task in list(self._runs):
                task.cancel()
            await asyncio.gather(*self._runs, return_exceptions=True)

    async def _claim(self) -> None:
        while True:
            batch = None
            if self._generator.client.ready and len(self._runs) < MAX_RUNNING:
                with suppress(StoreUnavailable):
                    busy = set(self._runs.values())
                    is_reserved = len(self._runs) >= MAX_RUNNING - NUM_RESERVED
                    claim = partial(
                        self._batches.claim, self._work.owner, LEASE_S, busy, others_only=is_reserved
                    )
                    batch = await tenant_thread(HOUSEKEEPING, claim)
            if batch is None:
                await asyncio.sleep(self.poll_s)
                continue
            run = BatchRun(batch, self._work, self._turns.setdefault(batch.tenant, asyncio.Lock()))
            task = asyncio.create_task(run.run())
            self._runs[task] = batch.tenant
            task.add_done_callback(self._end)

    def _end(self, task: "asyncio.Task[None]") -> None:
        del self._runs[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            # The batch is tried again when its lease has expired.
            logger.error("a batch could not be worked on", exc_info=error)

    async def _sweep(self) -> None:
        while True:
            try:
                self._generator.metrics.batches = await tenant_thread(
                    HOUSEKEEPING, self._batches.count_by_status
                )
                while await tenant_thread(HOUSEKEEPING, self._batches.files.delete_expired):
                    pass
            except StoreUnavailable as error:
                logger.warning("expired files are not deleted now: %s", error)
            await asyncio.sleep(_SWEEP_S)
