"""Follows the feed of changes and tells this process's engine about the changes that concern it.

Any process that shares the database can change adapters, keys and tenants. This task reads the feed five times a
second, and at once after a change by another process of the same host. Reading it also invalidates the caches of names
and keys. The engine removes versions that no name refers to any more. When a pin has moved, the engine receives all
pins again. If the feed cannot tell which changes were missed, every version that the engine may hold is looked up.

While the database does not answer, requests are served from the caches. Afterwards, the feed delivers the missed
changes.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from slora.client.replica_group import ReplicaGroup
from slora.core.errors import EngineUnavailable
from slora_adapters.database.change_feed import Changes
from slora_adapters.errors import StoreUnavailable
from slora_adapters.registry.registry import Registry
from slora_api.core.host_board import HostChanges
from slora_api.core.threads import control_thread
from slora_api.keys.key_store import KeyStore
from slora_api.quotas.quota_store import QuotaStore

_log = logging.getLogger(__name__)

# Interval of reading the feed. Every process must see a change within a second.
_POLL_S = 0.2
# Interval at which the board is checked for changes by other processes of this host.
_BOARD_POLL_S = 0.02


class ChangeFollower:
    """Reads the feed and applies the changes to this process. Runs on one event loop.

    on_moved_pin: called when the set of pinned versions may have changed. host_changes: None if this process is the
    only API process of the host.
    """

    def __init__(
        self,
        registry: Registry,
        key_store: KeyStore,
        quota_store: QuotaStore,
        engine: ReplicaGroup,
        on_moved_pin: Callable[[], None],
        host_changes: HostChanges | None = None,
    ) -> None:
        self._registry = registry
        self._key_store = key_store
        self._quota_store = quota_store
        self._engine = engine
        self._on_moved_pin = on_moved_pin
        self._host_changes = host_changes

    async def run(self) -> None:
        """Follows the feed until cancelled."""
        cursor: str | None = None
        answers = True
        while True:
            is_all = True
            committed = None if self._host_changes is None else self._host_changes.read()
            try:
                changes = await control_thread(self._registry.changes, cursor)
                self._key_store.apply_changes(changes)
                self._quota_store.apply_changes(changes)
                await self._pass_on(changes)
                # The cursor advances only now, so that changes that could not be passed on are read again.
                cursor, is_all = changes.cursor, changes.is_all
                if self._host_changes is not None and committed is not None and is_all:
                    self._host_changes.apply(committed)
                if not answers:
                    _log.info("the database is available again")
                answers = True
            except StoreUnavailable as error:
                if answers:
                    _log.error(
                        "the database is unavailable, so cached names and keys are used and changes "
                        "are not seen: %s",
                        error,
                    )
                answers = False
            if is_all:
                await self._wait()

    async def _wait(self) -> None:
        """Waits until it is time to read the feed."""
        if self._host_changes is None:
            await asyncio.sleep(_POLL_S)
            return
        for _ in range(round(_POLL_S / _BOARD_POLL_S)):
            await asyncio.sleep(_BOARD_POLL_S)
            if self._host_changes.is_behind():
                return

    async def _pass_on(self, changes: Changes) -> None:
        for tenant in {change.tenant for change in changes.changes if change.purged}:
            with suppress(EngineUnavailable):
                await self._engine.purge_tenant(tenant)
        suspects = {version for change in changes.changes for version in change.orphaned}
        if changes.resync:
            suspects |= self._engine.versions
        if suspects:
            # A version may have been pushed again since the change.
            named = await control_thread(self._registry.named, suspects)
            for version in suspects:
                if version not in named:
                    with suppress(EngineUnavailable):
                        await self._engine.remove_adapter(version)
        if changes.resync or any(change.moved_pin for change in changes.changes):
            self._on_moved_pin()
