"""What any process does to adapters, as far as this process' engine has to hear of it.

Reads the registry's feed, some times a second: with that the registry's cache forgets what has changed. What nobody has
any more the engine forgets, whoever deleted it, and pins that moved are told again. If it is not known what happened,
everything that the engine may hold is looked up.

While the registry does not answer, requests go on with what is known here; when it is back, the feed tells the rest.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Set
from contextlib import suppress
from typing import Protocol

from slora.errors import EngineUnavailable
from slora_adapters.errors import StoreUnavailable
from slora_adapters.registry.registry import Changes, Registry
from slora_adapters.version import AdapterVersion

__all__ = ["ChangeFollower", "VersionHolder"]

_log = logging.getLogger(__name__)

# Every process is to know within a second.
_POLL_S = 0.2


class VersionHolder(Protocol):
    """An engine, as far as it matters here."""

    @property
    def versions(self) -> Set[AdapterVersion]:
        """What it may hold."""

    async def forget(self, version: AdapterVersion) -> None:
        """Raises EngineUnavailable; one that is not there has nothing to forget."""


class ChangeFollower:
    """Lives on one event loop. on_moved_pin: called when something else may be pinned."""

    def __init__(self, registry: Registry, engine: VersionHolder, on_moved_pin: Callable[[], None]) -> None:
        self._registry = registry
        self._engine = engine
        self._on_moved_pin = on_moved_pin

    async def run(self) -> None:
        """Follows, until cancelled."""
        cursor: str | None = None
        answers = True
        while True:
            is_all = True
            try:
                changes = await asyncio.to_thread(self._registry.changes, cursor)
                await self._pass_on(changes)
                # Not before: what could not be passed on is read again.
                cursor, is_all = changes.cursor, changes.is_all
                if not answers:
                    _log.info("the registry answers again")
                answers = True
            except StoreUnavailable as error:
                if answers:
                    _log.error(
                        "changes of adapters can't be followed, known ones go on as they are: %s", error
                    )
                answers = False
            if is_all:
                await asyncio.sleep(_POLL_S)

    async def _pass_on(self, changes: Changes) -> None:
        suspects: Collection[AdapterVersion]
        if changes.resync:
            suspects = set(self._engine.versions)
        else:
            suspects = dict.fromkeys(version for change in changes.changes for version in change.orphaned)
        if suspects:
            # It may have been pushed again since.
            named = await asyncio.to_thread(self._registry.named, suspects)
            for version in suspects:
                if version not in named:
                    with suppress(EngineUnavailable):
                        await self._engine.forget(version)
        if changes.resync or any(change.moved_pin for change in changes.changes):
            self._on_moved_pin()
