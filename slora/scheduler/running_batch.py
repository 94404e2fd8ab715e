"""The running sequences in order of arrival. Each sequence has its own row of the sampling table."""

from collections.abc import Iterator

from slora.scheduler.sequence import Sequence


class RunningBatch:
    """The batch: at most `capacity` sequences. A sequence that will fork also occupies places for its choices."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._sequences: list[Sequence] = []
        self._free_rows = list(range(capacity))

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterates over a copy, so sequences may join or leave during the iteration."""
        return iter(self._sequences.copy())

    @property
    def free_capacity(self) -> int:
        return self.capacity - sum(sequence.num_places for sequence in self._sequences)

    @property
    def num_pages_needed_soon(self) -> int:
        """Pages that the running sequences still need for their current tokens, plus one page for each sequence."""
        return sum(1 + sequence.blocks.pages_missing(len(sequence.token_ids)) for sequence in self._sequences)

    def runs_alone(self, sequence: Sequence) -> bool:
        """Whether no other sequence runs. Beams of the same search do not count, because they advance only together."""
        return all(
            other is sequence or (other.search is not None and other.search is sequence.search)
            for other in self._sequences
        )

    def assign_row(self, sequence: Sequence) -> None:
        """Assigns a free row of the sampling table."""
        sequence.row = self._free_rows.pop()

    def add(self, sequence: Sequence) -> None:
        """Adds a sequence that already has a row of the sampling table.

        The list stays sorted by arrival; nearly always the sequence is the newest.
        """
        place = len(self._sequences)
        while place > 0 and sequence < self._sequences[place - 1]:
            place -= 1
        self._sequences.insert(place, sequence)
        sequence.is_running = True

    def remove(self, sequence: Sequence) -> None:
        self._sequences.remove(sequence)
        sequence.is_running = False
        self.release_row(sequence)

    def release_row(self, sequence: Sequence) -> None:
        """Frees the sequence's row of the sampling table."""
        self._free_rows.append(sequence.row)

    def check_invariants(self) -> None:
        rows = sorted([*self._free_rows, *(sequence.row for sequence in self._sequences)])
        assert rows == list(range(self.capacity)), "a row of the sampling table has no sequence or two"
        assert self.free_capacity >= 0, "more sequences are running than the limit allows"
