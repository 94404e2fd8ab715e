"""What prompt lookup knows of a sequence: its n-grams, and how often drafted tokens were accepted.

The index keeps where each n-gram occurred last, to find the tokens that may come next. An n-gram is a run of n
consecutive tokens. The index keeps the hash of an n-gram, not its tokens. If two n-grams have the same hash, the
result is a wrong draft, which costs time but never changes an answer.
"""

from collections import OrderedDict

from slora_adapters.version import AdapterVersion

# The longest n-gram that occurred earlier is used. Longer n-grams predict better, shorter ones are found more often.
NGRAM_SIZES = (4, 2)


class NgramIndex:
    """For each n-gram of a sequence, the position after its last occurrence.

    Takes about 200 bytes per token. The n-gram at the end of the sequence is indexed only when another token follows.
    """

    __slots__ = ("_next", "_num_indexed")

    def __init__(self) -> None:
        self._next: tuple[dict[int, int], ...] = tuple({} for _ in NGRAM_SIZES)
        self._num_indexed = 0

    def extend(self, token_ids: list[int], limit: int) -> int:
        """Indexes the n-grams that end in the next `limit` tokens, or fewer. Returns how many tokens it indexed."""
        start = self._num_indexed
        end = min(len(token_ids) - 1, start + limit)
        if end <= start:
            return 0
        for size, following in zip(NGRAM_SIZES, self._next, strict=True):
            for after in range(max(start + 1, size), end + 1):
                following[hash(tuple(token_ids[after - size : after]))] = after
        self._num_indexed = end
        return end - start

    def find(self, token_ids: list[int]) -> tuple[int, int] | None:
        """Finds the longest n-gram at the end of the sequence that occurred earlier.

        Returns the index of the n-gram's size in `NGRAM_SIZES`, and the position after its last earlier occurrence.
        Returns None if no n-gram occurred earlier.
        """
        for rank, (size, following) in enumerate(zip(NGRAM_SIZES, self._next, strict=True)):
            position = following.get(hash(tuple(token_ids[-size:])))
            if position is not None:
                return rank, position
        return None


def copy_from(token_ids: list[int], position: int, count: int) -> list[int]:
    """Copies `count` tokens from `position` on. A copy that reaches the end continues with what it has copied.

    Worked example: of the tokens 5, 6, 7, four tokens from position 1 on are 6, 7, 6, 7.
    """
    known = token_ids[position : position + count]
    if len(known) < count:
        known = (known * -(-count // len(known)))[:count]
    return known


# The acceptance rate that is assumed before the first draft, and its weight as a number of drafted tokens.
_FIRST_RATE, _FIRST_WEIGHT = 0.5, 2.0
# Each new draft multiplies the weight of older drafts by this factor. A sequence forgets old drafts sooner than an
# adapter does, because its text may change quickly between copied and new passages.
_SEQUENCE_DECAY, _ADAPTER_DECAY = 0.85, 0.98
# Maximum number of pairs of a tenant and its adapters whose rates are kept.
_MAX_ADAPTERS = 1024


class AcceptanceRate:
    """The share of accepted tokens among the drafted tokens whose predecessors in the draft were all accepted.

    Recent drafts weigh more. start: the rate that is assumed before the first draft.
    """

    __slots__ = ("_accepted", "_decay", "_tried")

    def __init__(self, start: float, decay: float) -> None:
        self._accepted, self._tried = start * _FIRST_WEIGHT, _FIRST_WEIGHT
        self._decay = decay

    @property
    def value(self) -> float:
        return self._accepted / self._tried

    def count(self, accepted: int, tried: int) -> None:
        """Counts one draft. tried: the number of accepted tokens, plus 1 if a token was rejected."""
        self._accepted = self._accepted * self._decay + accepted
        self._tried = self._tried * self._decay + tried


# One rate for each of NGRAM_SIZES.
Rates = tuple[AcceptanceRate, ...]


class AcceptanceHistory:
    """The acceptance rates of the most recently used pairs of a tenant and its adapters.

    A sequence starts with the rates of earlier sequences of the same tenant and adapter. A tenant's rates do not depend
    on other tenants, so no tenant can slow another one down with drafts that are never accepted.
    """

    def __init__(self) -> None:
        self._rates: OrderedDict[tuple[str, tuple[AdapterVersion, ...]], Rates] = OrderedDict()

    def find(self, tenant: str, adapters: tuple[AdapterVersion, ...]) -> Rates:
        """Returns the tenant's rates with these adapters. For the base model, `adapters` is empty."""
        key = tenant, adapters
        rates = self._rates.get(key)
        if rates is None:
            rates = tuple(AcceptanceRate(_FIRST_RATE, _ADAPTER_DECAY) for _ in NGRAM_SIZES)
            self._rates[key] = rates
            if len(self._rates) > _MAX_ADAPTERS:
                self._rates.popitem(last=False)
        self._rates.move_to_end(key)
        return rates


def start_rates(history: Rates) -> Rates:
    """Returns the rates with which a new sequence starts."""
    return tuple(AcceptanceRate(rate.value, _SEQUENCE_DECAY) for rate in history)


# While drafts are not expected to save time, one token is drafted after this many matches, to see if it is accepted.
# Each draft without an accepted token doubles this number, up to the maximum.
_FIRST_PATIENCE, _MAX_PATIENCE = 8, 128


class DraftState:
    """The state of drafting for one sequence: its n-grams, and how often its drafts were accepted. rates: its own
    acceptance rates. Its drafts also count in the rates of its adapters (`history`).
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
