"""The live feed of the console: one task observes the engine a few times a second while a console watches.

All viewers of this process share its observations, and viewers with the same rights share the JSON of a frame. A viewer
that reads slowly skips frames and gets the newest one. It delays no other viewer, and no frames are kept for it.
Without viewers, nothing is observed, and the engine records nothing.
"""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Mapping

from slora.client.client import EngineClient
from slora.core.engine_state import LiveState
from slora.core.errors import EngineUnavailable
from slora_adapters.errors import StoreUnavailable
from slora_adapters.version import AdapterVersion
from slora_api.core.errors import ServerBusy, TenantBusy
from slora_api.core.threads import HOUSEKEEPING, tenant_thread
from slora_api.metrics.frame import FrameMaker, Names

logger = logging.getLogger(__name__)

_INTERVAL_S = 0.4
# The interval between two observations is at least this time multiplied by the number of watching tenants. Each tenant
# has a frame of its own, which takes half a millisecond on the event loop.
_TENANT_INTERVAL_S = 0.015
# The engine stops recording if it is not observed for five seconds.
_MAX_INTERVAL_S = 4.0
# How long an observation may take. The engine answers between two steps. After this time, viewers get null instead of a
# frame.
_PATIENCE_S = 5.0
# The maximum numbers of viewers in one process: of all tenants, and of one tenant. The operators together count as one
# tenant.
_MAX_VIEWERS, _MAX_VIEWERS_OF_TENANT = 512, 64
# How long the name of an adapter is cached.
_NAMES_S = 30.0

FindNames = Callable[[Collection[AdapterVersion]], Mapping[AdapterVersion, str]]
FindTenants = Callable[[Collection[str]], Mapping[str, str]]


class LiveFeed:
    """Observes the engine for the viewers of this process.

    find_names, find_tenants: look up names of adapters and of tenants in the database. is_stopping: whether the server
    is shutting down, which ends all feeds.
    """

    def __init__(
        self,
        client: EngineClient,
        find_names: FindNames,
        find_tenants: FindTenants,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._client = client
        self._find_names = find_names
        self._find_tenants = find_tenants
        self._is_stopping = is_stopping
        self._viewers: Counter[str | None] = Counter()
        self._sampling: asyncio.Task[None] | None = None
        self._maker: FrameMaker | None = None
        self._texts: dict[str | None, bytes] = {}
        self._number = 0
        self._changed = asyncio.Event()
        self._names: dict[AdapterVersion, str] = {}
        self._tenants: dict[str, str] = {}
        self._named: set[AdapterVersion | str] = set()
        self._named_at = float("-inf")
        self.num_observations = 0

    async def watch(self, tenant: str | None) -> AsyncGenerator[bytes, None]:
        """Yields frames as server-sent events, until the server stops. A frame is null while no engine answers.

        tenant: the id of the viewer's tenant; None for an operator. Raises TenantBusy or ServerBusy.
        """
        self._admit(tenant)
        self._viewers[tenant] += 1
        try:
            # The first frame must come from an observation that includes this viewer's tenant.
            seen = self._number
            if self._sampling is None or self._sampling.done():
                self._sampling = asyncio.create_task(self._sample())
            while not self._is_stopping():
                if self._number == seen:
                    await self._changed.wait()
                    continue
                seen = self._number
                yield self._encode(tenant)
        finally:
            self._viewers[tenant] -= 1
            if not self._viewers[tenant]:
                del self._viewers[tenant]

    def _admit(self, tenant: str | None) -> None:
        if self._viewers[tenant] >= _MAX_VIEWERS_OF_TENANT:
            raise TenantBusy(
                f"{_MAX_VIEWERS_OF_TENANT} consoles watch with keys of the same tenant already. Close one of them."
            )
        if self._viewers.total() >= _MAX_VIEWERS:
            raise ServerBusy(f"{_MAX_VIEWERS} consoles watch this server already. Try again later.")

    async def _sample(self) -> None:
        loop = asyncio.get_running_loop()
        while self._viewers:
            begun_at = loop.time()
            try:
                await self._observe(loop.time())
            except Exception:
                # The viewers get null, so that a bug does not leave them waiting forever.
                logger.exception("the live feed failed to observe the engine")
                self._publish(None)
            interval_s = min(max(_INTERVAL_S, _TENANT_INTERVAL_S * len(self._viewers)), _MAX_INTERVAL_S)
            await asyncio.sleep(max(interval_s / 4, begun_at + interval_s - loop.time()))

    async def _observe(self, now: float) -> None:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                state = await self._client.observe({one for one in self._viewers if one is not None})
        except (EngineUnavailable, TimeoutError):
            self._publish(None)
            return
        await self._look_up_names(state, now)
        self.num_observations += 1
        self._publish(state)

    async def _look_up_names(self, state: LiveState, now: float) -> None:
        """Looks up the names of the tenants and adapters that a viewer may see, except recently looked-up names."""
        if now > self._named_at + _NAMES_S:
            self._named_at = now
            self._names, self._tenants, self._named = {}, {}, set()
        shown = {(one.tenant, one.digest) for one in state.page_map.owners}
        shown |= {(one.tenant, one.digest) for one in state.adapters}
        shown |= {(one.tenant, one.digest) for one in state.events}
        versions = {
            AdapterVersion(tenant, digest)
            for tenant, digest in shown
            if digest and (tenant in self._viewers or None in self._viewers)
        }
        tenants = {tenant for tenant, _ in shown} | state.tenants.keys()
        if None not in self._viewers:
            tenants &= self._viewers.keys()
        try:
            if new_versions := versions - self._named:
                self._named |= new_versions
                self._names.update(await tenant_thread(HOUSEKEEPING, self._find_names, new_versions))
            if new_tenants := {tenant for tenant in tenants if tenant} - self._named:
                self._named |= new_tenants
                self._tenants.update(await tenant_thread(HOUSEKEEPING, self._find_tenants, new_tenants))
        except StoreUnavailable as error:  # The console shows digests and ids until the names are known.
            logger.warning("names cannot be looked up for the console: %s", error)

    def _publish(self, state: LiveState | None) -> None:
        self._maker, self._texts = (
            None if state is None else FrameMaker(state, Names(self._names, self._tenants)),
            {},
        )
        self._number += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _encode(self, tenant: str | None) -> bytes:
        text = self._texts.get(tenant)
        if text is None:
            frame = None if self._maker is None else self._maker.make(tenant)
            text = self._texts[tenant] = f"data: {json.dumps(frame, separators=(',', ':'))}\n\n".encode()
        return text
