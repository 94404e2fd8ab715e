"""Counts what ended requests have used, by tenant and by adapter, for the metrics.

The number of names is bounded. The busiest names have counters of their own, and all other names are counted together.
Every few minutes, the busiest of the other names may replace the least busy listed name. The counters of the replaced
name are dropped, and its later requests are counted with the requests of all other names. So the counters of a name
only grow while the name is listed.
"""

from collections import Counter

from slora.core.engine_state import ServedCounts
from slora.core.request import EngineRequest, RequestTiming, RequestUsage

# The name under which all names without a counter of their own are counted.
OTHERS = "other"

_REPLACE_EVERY_S = 180.0
# A name replaces a listed name only if its requests are more than this multiple of the listed name's requests.
_MUCH_BUSIER = 2
# Maximum number of names whose requests are counted between two replacements.
_MAX_CANDIDATES = 1024


class _BusiestNames:
    """Counters of at most `most` names, and one counter of all other names."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._counts: dict[str, ServedCounts] = {}
        self._others = ServedCounts()
        self._num_requests: Counter[str] = Counter()
        self._replaced_at: float | None = None

    def add(self, name: str, counts: ServedCounts, now: float) -> None:
        if name in self._num_requests or len(self._num_requests) < _MAX_CANDIDATES:
            self._num_requests[name] += 1
        if name in self._counts:
            self._counts[name] += counts
        elif name != OTHERS and len(self._counts) < self._most:
            self._counts[name] = counts
        else:
            self._others += counts
        if self._replaced_at is None:
            self._replaced_at = now
        elif now - self._replaced_at >= _REPLACE_EVERY_S:
            self._replaced_at = now
            self._replace()

    def read(self) -> dict[str, ServedCounts]:
        return {**self._counts, OTHERS: self._others}

    def _replace(self) -> None:
        candidates = [name for name in self._num_requests if name not in self._counts and name != OTHERS]
        if candidates and self._counts:
            new = max(candidates, key=self._num_requests.__getitem__)
            old = min(self._counts, key=self._num_requests.__getitem__)
            if self._num_requests[new] > _MUCH_BUSIER * self._num_requests[old]:
                del self._counts[old]
                self._counts[new] = ServedCounts()
        self._num_requests.clear()


class ServedRequests:
    """Counts requests by tenant and by adapter. At most `most` tenants and `most` adapters have their own counters."""

    def __init__(self, most: int) -> None:
        self._tenants = _BusiestNames(most)
        self._adapters = _BusiestNames(most)

    @property
    def tenants(self) -> dict[str, ServedCounts]:
        """The counters by name of the tenant. `OTHERS` counts all tenants without a counter of their own."""
        return self._tenants.read()

    @property
    def adapters(self) -> dict[str, ServedCounts]:
        """The counters by `AdapterVersion.label`. `OTHERS` counts all adapters without a counter of their own.

        A request with several adapters counts once for each adapter. Requests to the base model are not counted here.
        """
        return self._adapters.read()

    def add(self, request: EngineRequest, usage: RequestUsage, timing: RequestTiming) -> None:
        """Counts a request that has ended."""
        counts = ServedCounts(0, usage.prompt_tokens, usage.cached_tokens, usage.generated_tokens)
        if not request.is_background:
            counts += ServedCounts(1, cold_starts=int(timing.is_cold), queue_s=timing.queue_s)
        self._tenants.add(request.tenant, counts, timing.ended_at)
        for version in request.versions:
            self._adapters.add(version.label, counts, timing.ended_at)
