"""The unfinished requests and their sequences. A request has one sequence, or one per choice after the fork."""

from collections.abc import Iterator

from slora.scheduler.sequence import Sequence
from slora_adapters.version import AdapterVersion


class UnfinishedRequests:
    """Sequences by request. A deleted adapter is remembered until the last request that names it has ended."""

    def __init__(self) -> None:
        self._sequences: dict[str, list[Sequence]] = {}
        self._num_sequences = 0
        self._deleted: set[AdapterVersion] = set()

    def __len__(self) -> int:
        return self._num_sequences

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for group in self._sequences.values() for sequence in group)

    def find(self, request_id: str) -> list[Sequence]:
        return list(self._sequences.get(request_id, ()))

    def add(self, sequence: Sequence) -> None:
        self._sequences.setdefault(sequence.request.request_id, []).append(sequence)
        self._num_sequences += 1

    def remove(self, sequence: Sequence) -> None:
        request_id = sequence.request.request_id
        self._sequences[request_id].remove(sequence)
        if not self._sequences[request_id]:
            del self._sequences[request_id]
        self._num_sequences -= 1

    def mark_deleted(self, version: AdapterVersion) -> None:
        self._deleted.add(version)

    def pop_unused(self, version: AdapterVersion) -> bool:
        """Returns True once, after the adapter was deleted and the last unfinished request that names it has ended."""
        if version not in self._deleted:
            return False
        if any(version in group[0].request.versions for group in self._sequences.values()):
            return False
        self._deleted.remove(version)
        return True
