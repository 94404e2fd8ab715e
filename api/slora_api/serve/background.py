"""The background tasks of an API process: it passes the state of the host on, follows changes and watches the disk."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from slora.client.replica_group import ReplicaGroup
from slora.core.errors import EngineUnavailable
from slora_adapters.database.change_feed import Changes
from slora_adapters.errors import DiskFull, StoreUnavailable
from slora_adapters.process.full_disk import DiskReserve
from slora_adapters.registry.registry import Registry
from slora_api.completions.services import Generator
from slora_api.core.host_board import HostBoard, HostChanges
from slora_api.core.threads import control_thread
from slora_api.keys.key_admin import KeyAdmin
from slora_api.keys.key_store import KeyStore
from slora_api.operations.engines import Engines
from slora_api.quotas.quota_store import QuotaStore

_log = logging.getLogger(__name__)

_STATE_PERIOD_S, _DISK_PERIOD_S = 0.1, 2.0


class HostState:
    """Passes the state of the host from the main process to the API workers, between the board and the `Obstacles` and
    `Metrics` of `generator`: the stalled processes, the unfinished parts of the start, and the restarts of
    each process.
    """

    def __init__(self, generator: Generator, engines: Engines, board: HostBoard) -> None:
        self._obstacles = generator.obstacles
        self._metrics = generator.metrics
        self._engines = engines
        self._board = board

    async def publish(self) -> None:
        """Writes each new state to the board, until cancelled. This runs in the main process."""
        written: dict[str, Any] = {}
        while True:
            state: dict[str, Any] = {
                "stalls": dict(self._obstacles.stalls),
                "unfinished": dict(self._obstacles.unfinished),
                "restarts": dict(self._metrics.restarts),
            }
            if state != written:
                self._board.write_state(state)
                written = state
            await asyncio.sleep(_STATE_PERIOD_S)

    async def follow(self) -> None:
        """Applies each new state, and reports which engines serve in this worker, until cancelled. This runs in each
        worker.
        """
        while True:
            if (state := self._board.read_state()) is not None:
                self._obstacles.stalls = state["stalls"]
                self._obstacles.unfinished = state["unfinished"]
                self._metrics.restarts = Counter(state["restarts"])
            self._engines.publish()
            await asyncio.sleep(_STATE_PERIOD_S)


# Interval of reading the feed. Every process must see a change within a second.
_POLL_S = 0.2
# Interval at which the board is checked for changes by other processes of this host.
_BOARD_POLL_S = 0.02


class ChangeFollower:
    """Reads the feed of changes and applies them to this process and its engine. Runs on one event loop.

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
            suspects |= self._engine.sent_versions
        if suspects:
            # A version may have been pushed again since the change.
            named = await control_thread(self._registry.named, suspects)
            for version in suspects:
                if version not in named:
                    with suppress(EngineUnavailable):
                        await self._engine.remove_adapter(version)
        if changes.resync or any(change.moved_pin for change in changes.changes):
            self._on_moved_pin()


class DiskWatch:
    """Watches the free space of the data directory's disk, on a thread, because a disk may stall. Writes pending
    revocations to the database.

    It watches while `run` is running. Without `run`, a read-only server never becomes writable again."""

    def __init__(self, reserve: DiskReserve, key_admin: KeyAdmin) -> None:
        self._reserve = reserve
        self._key_admin = key_admin
        # The last logged error, so that a lasting error is logged only once.
        self._trouble = ""

    async def run(self) -> None:
        """Checks the disk periodically, until cancelled."""
        while True:
            await control_thread(self.check)
            await asyncio.sleep(_DISK_PERIOD_S)

    def check(self) -> None:
        """Checks the disk once, and writes pending revocations even if the disk is full. The disk reserve makes room
        for them.
        """
        trouble = ""
        try:
            self._reserve.watch()
            self._key_admin.write_pending_revocations()
        except DiskFull:
            pass  # `DiskReserve` has logged the error.
        except (OSError, StoreUnavailable) as error:
            trouble = str(error)
        if trouble and trouble != self._trouble:
            _log.error("the disk of %s cannot be used: %s", self._reserve.directory, trouble)
        self._trouble = trouble
