"""Which of the things that nobody uses leaves the pool first. Plain numbers; knows no pool and no page.

A policy ranks a thing once, when it falls idle; the lowest rank leaves first. So it costs the same however many things
are idle, and what is used again is ranked anew.
"""

from collections.abc import Callable
from enum import Enum
from typing import Protocol

from slora.cost_model import Costs
from slora.errors import ConfigError
from slora.pool.reuse_share import ReuseShare
from slora.pool.tenant import Tenant


class Content(Enum):
    ADAPTER = "adapter"
    PREFIX = "prefix"


class Evictable(Protocol):
    """An idle adapter, or the idle end of a cached prefix."""

    ticket: int  # of its place in the evictor's heap; 0: not there

    @property
    def content(self) -> Content: ...

    @property
    def is_pinned(self) -> bool:
        """Changes only while it is not offered."""
        ...

    @property
    def pages(self) -> list[int]:
        """What its leaving frees."""
        ...

    @property
    def tenant(self) -> Tenant:
        """Who owns the pages."""
        ...

    def reload_s(self, costs: Costs) -> float:
        """Seconds to bring the content back."""
        ...


class EvictionPolicy(Protocol):
    """name: as it is called in the configuration."""

    @property
    def name(self) -> str: ...

    def rank(self, item: Evictable, tick: int, age: float) -> float:
        """tick: grows with each thing that falls idle. age: the highest rank that has left so far."""
        ...

    def learn(self, item: Evictable, *, was_used: bool) -> None:
        """Something that was ranked is used again, or leaves because its pages are wanted."""
        ...


class LeastRecentlyUsed:
    """What fell idle first leaves first, whatever it costs to bring back."""

    name = "lru"

    def rank(self, item: Evictable, tick: int, age: float) -> float:
        return tick

    def learn(self, item: Evictable, *, was_used: bool) -> None:
        """Nothing to learn."""


class ExpectedCost:
    """GreedyDual-Size (Cao and Irani, 1997) with expected costs: the seconds to bring a thing back, times the share of
    its kind that is used again at all, for each page that it frees, on top of the age.

    The age is what things idle for long lose against new ones. The share keeps a kind that nobody comes back for, say
    the prefixes of prompts that are all different, from pushing out the other kind.

    Worked example: an adapter of 40 pages that loads in 20 ms ranks 0.0005 above the age if all adapters are used
    again, a block of a prefix that takes 2 ms to compute 0.0002 if one block in ten is.
    """

    name = "cost"

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._shares = {content: ReuseShare() for content in Content}

    def rank(self, item: Evictable, tick: int, age: float) -> float:
        expected_s = self._shares[item.content].value * item.reload_s(self._costs)
        return age + expected_s / max(1, len(item.pages))

    def learn(self, item: Evictable, *, was_used: bool) -> None:
        self._shares[item.content].count(was_used=was_used)


class SizeAware:
    """GreedyDual-Size with equal costs: the fewer pages a thing takes, the longer it stays."""

    name = "size"

    def rank(self, item: Evictable, tick: int, age: float) -> float:
        return age + 1 / max(1, len(item.pages))

    def learn(self, item: Evictable, *, was_used: bool) -> None:
        """Nothing to learn."""


def make_policy(name: str, costs: Costs) -> EvictionPolicy:
    """Raises ConfigError for a name that there is none of."""
    policies: dict[str, Callable[[], EvictionPolicy]] = {
        LeastRecentlyUsed.name: LeastRecentlyUsed,
        ExpectedCost.name: lambda: ExpectedCost(costs),
        SizeAware.name: SizeAware,
    }
    if name not in policies:
        raise ConfigError(f"eviction is {name!r}; it must be one of {', '.join(policies)}")
    return policies[name]()
