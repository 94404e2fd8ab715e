"""How often drafted tokens were accepted, for each sequence and for the adapters of each tenant.

A sequence starts with the rates of earlier sequences of the same tenant and adapter. A tenant's rates do not depend on
other tenants, so no tenant can slow another one down with drafts that are never accepted.
"""

from collections import OrderedDict

from slora.scheduler.drafting.ngram_index import NGRAM_SIZES
from slora_adapters.version import AdapterVersion

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
    """The acceptance rates of the most recently used pairs of a tenant and its adapters."""

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
