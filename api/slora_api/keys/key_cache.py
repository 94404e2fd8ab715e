"""A cache of API keys in one process, so that authentication needs no database round trip.

A key stays until the cache is full, or until it is dropped because the key or its tenant changed. If any key is dropped
during a lookup, the result of the lookup is not cached, because it may be outdated.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Generic, Protocol, TypeVar

from slora_adapters.database.change_feed import Changes

# An entry takes about one kilobyte.
_MAX_KEYS = 100_000
# The maximum number of unknown ids in the cache, and the seconds for which each id stays. A client that repeats a wrong
# key causes only one lookup in this time. A client may send a key before another host creates it. The key is then
# refused until the id has left the cache.
_MAX_ABSENT, _ABSENT_S = 10_000, 1.0


class _Owned(Protocol):
    @property
    def tenant(self) -> str | None: ...


T = TypeVar("T", bound=_Owned)


class KeyCache(Generic[T]):
    """A thread-safe LRU cache: key id -> a value about the key, such as its record or its quotas.

    is_behind: whether entries may lack a change of another process. If so, `get` finds nothing. clock: monotonic
    seconds.
    """

    def __init__(
        self,
        max_keys: int = _MAX_KEYS,
        is_behind: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_keys = max_keys
        self._is_behind = is_behind
        self._clock = clock
        self._keys: OrderedDict[str, T] = OrderedDict()
        # Unknown id -> when its entry expires.
        self._absent: OrderedDict[str, float] = OrderedDict()
        self._num_drops = 0
        self._lock = Lock()

    def get(self, key_id: str) -> T | None:
        """Returns the value of a key; None if it is not cached."""
        if self._is_behind():
            return None
        with self._lock:
            found = self._keys.get(key_id)
            if found is not None:
                self._keys.move_to_end(key_id)
            return found

    def is_absent(self, key_id: str) -> bool:
        """Whether a lookup has recently found no key with this id."""
        if self._is_behind():
            return False
        with self._lock:
            return self._absent.get(key_id, 0.0) > self._clock()

    def look_up(self, key_id: str, find: Callable[[], T | None]) -> T | None:
        """Calls `find`, caches its result and returns it. The result None is cached only briefly."""
        num_drops = self._num_drops
        found = find()
        with self._lock:
            if num_drops != self._num_drops:
                return found
            if found is None:
                self._absent[key_id] = self._clock() + _ABSENT_S
                self._absent.move_to_end(key_id)
                if len(self._absent) > _MAX_ABSENT:
                    self._absent.popitem(last=False)
            else:
                self._keys[key_id] = found
                self._keys.move_to_end(key_id)
                if len(self._keys) > self._max_keys:
                    self._keys.popitem(last=False)
        return found

    def drop(self, key_id: str) -> None:
        with self._lock:
            self._num_drops += 1
            self._keys.pop(key_id, None)
            self._absent.pop(key_id, None)

    def drop_tenant(self, tenant: str) -> None:
        """Drops all keys of a tenant."""
        with self._lock:
            self._num_drops += 1
            for key_id in [key_id for key_id, one in self._keys.items() if one.tenant == tenant]:
                del self._keys[key_id]

    def apply_changes(self, changes: Changes) -> None:
        """Drops changed keys, and all keys of changed tenants."""
        if changes.resync:
            self.clear()
        for change in changes.changes:
            if change.key_id:
                self.drop(change.key_id)
            elif not change.name:
                self.drop_tenant(change.tenant)

    def clear(self) -> None:
        with self._lock:
            self._num_drops += 1
            self._keys.clear()
            self._absent.clear()
