"""The names by which requests call the engine's adapters. Gateways compare them with the model of a request."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping

from slora_adapters.errors import StoreUnavailable
from slora_adapters.version import AdapterVersion
from slora_api.core.threads import HOUSEKEEPING, tenant_thread

logger = logging.getLogger(__name__)

# Gateways scrape twenty times a second. Aliases may move at any time, so the names are read again after this time.
_CACHED_S = 1.0

FindReferences = Callable[[Collection[AdapterVersion]], Mapping[AdapterVersion, Collection[str]]]


class AdapterReferences:
    """Caches the result of `find_references`, which reads the database, for a second."""

    def __init__(self, find_references: FindReferences, clock: Callable[[], float] = time.monotonic) -> None:
        self._find = find_references
        self._clock = clock
        self._read_at = float("-inf")
        self._read: frozenset[AdapterVersion] = frozenset()
        self._references: Mapping[AdapterVersion, Collection[str]] = {}
        self._reading = asyncio.Lock()

    async def find(self, versions: Collection[AdapterVersion]) -> Mapping[AdapterVersion, Collection[str]]:
        """Returns the references of these versions, and possibly those of others. While the database does not answer,
        the references are those that were read last.
        """
        async with self._reading:
            wanted = frozenset(versions)
            if not wanted <= self._read or self._clock() > self._read_at + _CACHED_S:
                self._read, self._read_at = wanted, self._clock()
                try:
                    self._references = await tenant_thread(HOUSEKEEPING, self._find, wanted)
                except StoreUnavailable as error:
                    logger.warning("names of adapters cannot be looked up for a gateway: %s", error)
        return self._references
