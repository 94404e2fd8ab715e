"""The running sequences in order of arrival. Each sequence has its own row of the sampling table."""

from collections import Counter
from collections.abc import Iterator

from slora.memory.tenant_account import TenantAccount
from slora.scheduler.sequence import Sequence


class RunningBatch:
    """The batch: at most `capacity` sequences. A sequence that will fork also occupies places for its choices.

    free_capacity: number of free places.
    num_places: number of places that each account with running sequences occupies.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = self.free_capacity = capacity
        self.num_places: Counter[TenantAccount] = Counter()
        self._sequences: list[Sequence] = []
        self._interactive: list[Sequence] = []
        self._free_rows = list(range(capacity))

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterates over a copy, so sequences may join or leave during the iteration."""
        return iter(self._sequences.copy())

    @property
    def interactive(self) -> list[Sequence]:
        """A copy of the list of running interactive sequences, in order of arrival."""
        return self._interactive.copy()

    @property
    def background(self) -> list[Sequence]:
        """The running background sequences, in order of arrival."""
        if len(self._interactive) == len(self._sequences):
            return []
        return [sequence for sequence in self._sequences if sequence.is_background]

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
        """Adds a sequence that already has a row of the sampling table."""
        _insert(self._sequences, sequence)
        if not sequence.is_background:
            _insert(self._interactive, sequence)
        self._occupy(sequence.tenant, sequence.num_places)
        sequence.is_running = True

    def remove(self, sequence: Sequence) -> None:
        self._sequences.remove(sequence)
        if not sequence.is_background:
            self._interactive.remove(sequence)
        self._occupy(sequence.tenant, -sequence.num_places)
        sequence.is_running = False
        self.release_row(sequence)

    def resize(self, sequence: Sequence, num_places: int) -> None:
        """Changes how many places a sequence occupies, or will occupy when it runs."""
        if sequence.is_running:
            self._occupy(sequence.tenant, num_places - sequence.num_places)
        sequence.num_places = num_places

    def _occupy(self, tenant: TenantAccount, num_places: int) -> None:
        self.free_capacity -= num_places
        self.num_places[tenant] += num_places
        if not self.num_places[tenant]:
            del self.num_places[tenant]

    def release_row(self, sequence: Sequence) -> None:
        """Frees the sequence's row of the sampling table."""
        self._free_rows.append(sequence.row)

    def check_invariants(self) -> None:
        rows = sorted([*self._free_rows, *(sequence.row for sequence in self._sequences)])
        assert rows == list(range(self.capacity)), "a row of the sampling table has no sequence or two"
        assert self.free_capacity >= 0, "more sequences are running than the limit allows"
        places = Counter[TenantAccount]()
        for sequence in self._sequences:
            places[sequence.tenant] += sequence.num_places
        assert places == self.num_places and places.total() == self.capacity - self.free_capacity, (
            f"the places {self.num_places} differ from those of the running sequences, {places}"
        )
        interactive = [sequence for sequence in self._sequences if not sequence.is_background]
        assert self._interactive == interactive, "the list of interactive sequences is wrong"


def _insert(sequences: list[Sequence], sequence: Sequence) -> None:
    """Inserts in order of arrival. Nearly always the sequence is the newest."""
    place = len(sequences)
    while place > 0 and sequence < sequences[place - 1]:
        place -= 1
    sequences.insert(place, sequence)
