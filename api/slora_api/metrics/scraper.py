"""Answers scrapes: asks the engine for its snapshot, and renders it with what the API processes have counted."""

import asyncio
import time
from collections.abc import Callable

from slora.client.replica_group import ReplicaGroup
from slora.core.engine_state import EngineInfo
from slora.core.errors import EngineUnavailable
from slora_adapters.process.full_disk import DiskReserve
from slora_adapters.version import AdapterVersion
from slora_api.core.errors import Starting
from slora_api.core.threads import HOUSEKEEPING, control_thread, tenant_thread
from slora_api.metrics.engine_metrics import EngineNumbers, name_tenants, tenants_of
from slora_api.metrics.metrics import HostNumbers, Metrics
from slora_api.metrics.names import ServerNames
from slora_api.usage.usage_shipper import UsageShipper

# The time limit for reading the engine's snapshot. The engine answers between two steps, and even the longest step
# takes well below a second.
PATIENCE_S = 2.0
# Gateways scrape twenty times a second.
CACHED_S = 0.05


class Scraper:
    """Makes the text of scrapes. find_info: see `Generator.engine_info`."""

    def __init__(
        self,
        metrics: Metrics,
        client: ReplicaGroup,
        find_info: Callable[[], EngineInfo],
        names: ServerNames,
        reserve: DiskReserve,
        shipper: UsageShipper,
    ) -> None:
        self._metrics = metrics
        self._client = client
        self._find_info = find_info
        self._names = names
        self._reserve = reserve
        self._shipper = shipper
        # The last answer of the engine, and the question that is not answered yet.
        self._last: EngineNumbers | None = None
        self._asking: asyncio.Task[EngineNumbers | None] | None = None
        self._for_gateways = b""
        self._made_at = float("-inf")
        self._making = asyncio.Lock()

    async def render(self) -> bytes:
        """Returns all metrics."""
        engine = await self._read_engine()
        if engine is not None:
            names = await self._names.tenants.find(tenants_of(engine.stats))
            engine = engine._replace(stats=name_tenants(engine.stats, names))
        journal_bytes = await control_thread(self._shipper.measure_journal)
        host = HostNumbers(self._client.health, self._reserve.is_full, journal_bytes, self._shipper.lag_s)
        # The numbers of adapters and tenants are not limited, and the text takes about 10 us a line.
        return await tenant_thread(HOUSEKEEPING, self._metrics.render, engine, host)

    async def render_for_gateway(self) -> bytes:
        """Returns what gateways route by. All scrapes within 50 ms share one answer.

        An answer interrupts the engine and may read the database. Anyone who can reach the server may scrape, so the
        number of scrapes is not limited otherwise.
        """
        async with self._making:
            if time.monotonic() >= self._made_at + CACHED_S:
                self._for_gateways = self._metrics.render_for_gateway(await self._read_engine())
                self._made_at = time.monotonic()
            return self._for_gateways

    async def _read_engine(self) -> EngineNumbers | None:
        """Returns the engine's numbers; None without an engine. A scrape must not wait for long: if the engine answers
        later, because it computes a long step, the numbers are the last known ones. All scrapes at a time wait for the
        same answer, which may also be there for a later one.
        """
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask_engine())
            self._asking.add_done_callback(self._note_engine)
        asking = self._asking
        await asyncio.wait([asking], timeout=PATIENCE_S)
        return asking.result() if asking.done() else self._last

    def _note_engine(self, asking: "asyncio.Task[EngineNumbers | None]") -> None:
        self._asking = None
        if not asking.cancelled() and asking.exception() is None:
            self._last = asking.result()

    async def _ask_engine(self) -> EngineNumbers | None:
        try:
            info, stats = self._find_info(), await self._client.stats()
        except (EngineUnavailable, Starting):
            return None
        versions = [AdapterVersion(*one) for one in (*stats.loaded_adapters, *stats.waiting_adapters)]
        return EngineNumbers(info, stats, await self._names.references.find(versions), time.monotonic())
