"""The answer to scrapes of the metrics without a key."""

import asyncio
import time
from collections.abc import Awaitable, Callable

# Gateways scrape twenty times a second.
_CACHED_S = 0.05


class GatewayAnswer:
    """Shares one answer among all scrapes within 50 ms.

    An answer interrupts the engine and may read the database. Anyone who can reach the server may scrape, so the number
    of scrapes is not limited otherwise.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._answer = b""
        self._made_at = float("-inf")
        self._making = asyncio.Lock()

    async def read(self, make: Callable[[], Awaitable[bytes]]) -> bytes:
        """Returns the shared answer. make: makes the next one."""
        async with self._making:
            if self._clock() >= self._made_at + _CACHED_S:
                self._answer = await make()
                self._made_at = self._clock()
            return self._answer
