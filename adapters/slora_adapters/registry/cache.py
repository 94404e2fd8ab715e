"""A cache of registry lookups in one process. It also answers lookups while the database is unavailable.

A cached result stays until the cache is full, or until the result's name is dropped because it changed. If a name is
dropped during a lookup, the result of that lookup is not cached, because it may be outdated.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

from slora_adapters.peft.adapter import AdapterExtras
from slora_adapters.registry.record import AdapterRecord, Rollout
from slora_adapters.registry.table import NameKey


@dataclass(frozen=True, slots=True)
class ExtrasOf:
    """The cache key for the `AdapterExtras` of version `number`."""

    number: int


# Target: the alias, the version number or the extras that a lookup asks for. Answer: the result of the lookup.
Answer = AdapterRecord | Rollout | AdapterExtras
Target = str | int | ExtrasOf

_MAX_BYTES = 64 << 20
# Estimated memory of a cached record, including overhead. Cached extras take the same, plus the length of their texts.
_RECORD_BYTES = 1500


class NameCache:
    """A thread-safe LRU cache.

    max_bytes: approximate memory of all cached answers.
    is_behind: returns whether cached answers may miss a change by another process. While it returns True, `get` returns
    None.
    """

    def __init__(self, max_bytes: int = _MAX_BYTES, is_behind: Callable[[], bool] = lambda: False) -> None:
        self._is_behind = is_behind
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._names: OrderedDict[NameKey, dict[Target, Answer]] = OrderedDict()
        self._lock = Lock()

    def get(self, key: NameKey, target: Target) -> Answer | None:
        if self._is_behind():
            return None
        with self._lock:
            answers = self._names.get(key)
            if answers is None:
                return None
            self._names.move_to_end(key)
            return answers.get(target)

    def look_up(self, key: NameKey, target: Target, find: Callable[[], Answer | None]) -> Answer | None:
        """Returns and caches the result of `find`. None is not cached, because clients may ask for arbitrary names."""
        with self._lock:
            answers = self._names.setdefault(key, {})
        found = None
        try:
            found = find()
        finally:
            with self._lock:
                # Do not cache the answer if the name was dropped during `find`.
                if self._names.get(key) is answers:
                    self._keep(key, answers, target, found)
        return found

    def drop(self, key: NameKey) -> None:
        with self._lock:
            self._num_bytes -= _size(self._names.pop(key, {}))

    def drop_tenant(self, tenant: str) -> None:
        with self._lock:
            keys = [key for key in self._names if key[0] == tenant]
        for key in keys:
            self.drop(key)

    def clear(self) -> None:
        with self._lock:
            self._names.clear()
            self._num_bytes = 0

    def _keep(
        self, key: NameKey, answers: dict[Target, Answer], target: Target, found: Answer | None
    ) -> None:
        if found is not None:
            self._num_bytes -= _size(answers)
            answers[target] = found
            self._num_bytes += _size(answers)
            self._names.move_to_end(key)
        elif not answers:
            del self._names[key]
        while self._num_bytes > self._max_bytes:
            _, oldest = self._names.popitem(last=False)
            self._num_bytes -= _size(oldest)


def _size(answers: dict[Target, Answer]) -> int:
    return sum(map(_answer_size, answers.values()))


def _answer_size(answer: Answer) -> int:
    if isinstance(answer, Rollout):
        return _RECORD_BYTES * len(answer.records)
    if isinstance(answer, AdapterRecord):
        return _RECORD_BYTES
    return _RECORD_BYTES + len(answer.chat_template or "") + len(answer.generation_config or "")
