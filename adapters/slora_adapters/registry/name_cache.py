"""A process's cache of what it has looked up of names, which also serves while the storage does not answer.

An answer stays until its name is dropped, because the name has changed, or until the cache is full. An answer that is
being looked up while its name is dropped is not kept, because it may be outdated.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

from slora_adapters.peft.adapter import AdapterExtras
from slora_adapters.registry.adapter_record import AdapterRecord, Rollout
from slora_adapters.registry.registry_storage import NameKey

__all__ = ["Answer", "ExtrasOf", "NameCache", "Target"]


@dataclass(frozen=True, slots=True)
class ExtrasOf:
    """Asks for the texts of a version of a name."""

    number: int


# What is asked of a name, by alias, by number or for a version's texts; and what is answered.
Answer = AdapterRecord | Rollout | AdapterExtras
Target = str | int | ExtrasOf

_MAX_BYTES = 64 << 20
# Of a record or a version's texts without their characters, with its share of everything around it.
_RECORD_BYTES = 1500


class NameCache:
    """May be used from several threads. max_bytes: of answers, about."""

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._names: OrderedDict[NameKey, dict[Target, Answer]] = OrderedDict()
        self._lock = Lock()

    def get(self, key: NameKey, target: Target) -> Answer | None:
        """None if it is not known here."""
        with self._lock:
            answers = self._names.get(key)
            if answers is None:
                return None
            self._names.move_to_end(key)
            return answers.get(target)

    def look_up(self, key: NameKey, target: Target, find: Callable[[], Answer | None]) -> Answer | None:
        """What `find` finds, and keeps it. What is not there is not kept: clients may ask for any name."""
        with self._lock:
            answers = self._names.setdefault(key, {})
        found = None
        try:
            found = find()
        finally:
            with self._lock:
                # Else the name was dropped meanwhile.
                if self._names.get(key) is answers:
                    self._keep(key, answers, target, found)
        return found

    def drop(self, key: NameKey) -> None:
        with self._lock:
            self._num_bytes -= _size(self._names.pop(key, {}))

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
