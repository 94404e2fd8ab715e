"""Records when each API key was last used, so that operators can see which keys are unused.

A request only notes the time in memory. Every few seconds, a task writes the noted times to the database, but each key
at most once a minute. While the database cannot be written, the times stay in memory. A killed process loses the times
of its last seconds.
"""

import asyncio
import time
from collections.abc import Callable
from itertools import islice

from sqlalchemy import bindparam, or_, update

from slora_adapters.database import schema
from slora_adapters.database.database import Database
from slora_adapters.errors import StoreUnavailable
from slora_api.core.threads import control_thread
from slora_api.keys.key_record import Caller

_PERIOD_S = 10.0
# The resolution of the times, in seconds.
_GRAIN_S = 60
# The maximum number of times that wait to be written. The cache of keys has the same size.
_MAX_WAITING = 100_000
# The maximum number of keys in one transaction. Such a transaction takes a few milliseconds.
_KEYS_AT_ONCE = 500

_k = schema.api_keys.c
_SET_LAST_USE = (
    update(schema.api_keys)
    .where(
        _k.key_id == bindparam("of_key"),
        or_(_k.last_used_at.is_(None), _k.last_used_at < bindparam("last_used_at")),
    )
    .values(last_used_at=bindparam("last_used_at"))
)


class KeyUse:
    """Notes and writes the last use of keys. Call `note` on one event loop. clock: Unix time."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock
        self._waiting: dict[str, int] = {}
        # Key id -> the time that was written last, if that time is within the last minute.
        self._written: dict[str, int] = {}

    def __len__(self) -> int:
        """The number of keys of which a time is in memory."""
        return len(self._waiting.keys() | self._written.keys())

    def note(self, key: Caller) -> None:
        """Notes that the key is used now."""
        now = int(self._clock())
        before = max(key.last_used_at or 0, self._written.get(key.key_id, 0))
        if now - before >= _GRAIN_S and len(self._waiting) < _MAX_WAITING:
            self._waiting[key.key_id] = now

    async def run(self) -> None:
        """Writes the noted times until cancelled."""
        while True:
            await asyncio.sleep(_PERIOD_S)
            await self.write()

    async def write(self) -> None:
        """Writes all noted times, or as many as the database accepts."""
        oldest = int(self._clock()) - _GRAIN_S
        self._written = {key_id: at for key_id, at in self._written.items() if at > oldest}
        while noted := dict(islice(self._waiting.items(), _KEYS_AT_ONCE)):
            try:
                await control_thread(self._write, noted)
            except StoreUnavailable:
                return  # Other tasks that depend on the database log this error.
            self._written |= noted
            for key_id, at in noted.items():
                if self._waiting.get(key_id) == at:
                    del self._waiting[key_id]

    def _write(self, noted: dict[str, int]) -> None:
        # Sort the keys, so that two processes that write the same keys lock them in the same order.
        rows = [{"of_key": key_id, "last_used_at": at} for key_id, at in sorted(noted.items())]
        with self._database.transaction() as connection:
            connection.execute(_SET_LAST_USE, rows)
