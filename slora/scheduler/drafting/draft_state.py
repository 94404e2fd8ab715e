"""The drafting state of one sequence: its n-grams, and how often its drafts were accepted."""

from slora.scheduler.drafting.acceptance import Rates
from slora.scheduler.drafting.ngram_index import NgramIndex

# While drafts are not expected to save time, one token is drafted after this many matches, to see if it is accepted.
# Each draft without an accepted token doubles this number, up to the maximum.
_FIRST_PATIENCE, _MAX_PATIENCE = 8, 128


class DraftState:
    """The state of drafting for one sequence. rates: its own acceptance rates. Its drafts also count in the rates of
    its adapters (`history`).
    """

    __slots__ = ("_history", "_num_skipped", "_patience", "_rank", "index", "rates")

    def __init__(self, rates: Rates, history: Rates) -> None:
        self.index = NgramIndex()
        self.rates = rates
        self._history = history
        self._rank = 0
        self._num_skipped = 0
        self._patience = _FIRST_PATIENCE

    def is_probe_due(self) -> bool:
        """Returns whether to draft one token although the match is not expected to save time. Counts such matches."""
        self._num_skipped += 1
        return self._num_skipped >= self._patience

    def start(self, rank: int) -> None:
        """Records that a step has a draft. rank: the index in `NGRAM_SIZES` of the n-gram that the draft follows."""
        self._rank = rank
        self._num_skipped = 0

    def count(self, num_accepted: int, num_drafted: int) -> None:
        """Counts the result of the draft."""
        tried = min(num_accepted + 1, num_drafted)
        for rates in (self.rates, self._history):
            rates[self._rank].count(num_accepted, tried)
        self._patience = _FIRST_PATIENCE if num_accepted else min(2 * self._patience, _MAX_PATIENCE)
