"""The service that tenants receive from other engines, so that all engines together divide their service fairly.

Each engine reports what it charges (`ServiceSpan`), and API processes pass it on to the other engines. An engine adds
it to the tenant's counter as if it had served the tenant itself. So a tenant that uses two engines and a tenant that
uses one get equal service, if the second one needs it.

Two limits keep every tenant served at every engine. What exceeds them is dropped:

- Service elsewhere may raise a counter by `MAX_LEAD_S` of the engine's work at once. So a tenant is not punished for
  what it received while no other tenant waited.
- After that, it counts only as fast as the least counter of the waiting tenants grows, less `MIN_SHARE`. So a tenant
  that always receives more elsewhere still gets about `MIN_SHARE` of what the others get here. Its requests are at this
  engine because their adapters are, and would otherwise never end. The first of them waits until the least counter has
  caught up: while the engine does `MAX_LEAD_S / MIN_SHARE` of work, which is 10 s.

With equal weights, a tenant at one engine gets 1 / (1 + `MIN_SHARE`) of it, 91%, while the others get more elsewhere.

Service elsewhere raises only the counter of its own tenant. So a report that is late, lost or repeated gives no tenant
more than a single engine's fairness would, and delays a tenant by no more than the limits above.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from slora.core.cost_model import CostModel
from slora.core.engine_state import ServiceSpan
from slora.memory.tenant_account import TenantAccount, TenantAccounts
from slora.scheduler.waiting_queues import FairQueue

MAX_LEAD_S = 1.0
MIN_SHARE = 0.1
# The most counters of other engines that are remembered. The oldest are dropped, such as those of engines that have
# ended.
_MAX_COUNTERS = 65_536


class _Allowance(NamedTuple):
    """How much service elsewhere may still be added to one counter. least: the least counter at the last addition."""

    service: float
    least: float


class ServiceElsewhere:
    """Adds the service of other engines to the counters of this engine's tenants."""

    def __init__(self, tenants: TenantAccounts, queue: FairQueue, costs: CostModel) -> None:
        self._tenants = tenants
        self._queue = queue
        self._costs = costs
        # (engine, tenant, is_background) -> the largest end of a span.
        self._counters: OrderedDict[tuple[str, str, bool], float] = OrderedDict()
        self._allowances: dict[TenantAccount, _Allowance] = {}

    def add(self, engine: str, spans: Iterable[ServiceSpan]) -> None:
        """Adds what an engine has charged. Repeated spans, and tenants that this engine does not know, are ignored.

        engine: identifies one start of the engine. Its counters begin at 0.
        """
        marks: dict[int, tuple[float, float]] = {}
        for span in spans:
            num_tokens = self._count_new(engine, span)
            account = self._tenants.find_known(span.tenant, is_background=span.is_background)
            if account is None or num_tokens <= 0:
                continue
            group = account.priority
            if group not in marks:
                marks[group] = self._measure(group)
            self._raise(account, num_tokens / account.weight, *marks[group])

    def _count_new(self, engine: str, span: ServiceSpan) -> float:
        """Returns the tokens of the span that have not been counted."""
        key = engine, span.tenant, span.is_background
        known = self._counters.pop(key, span.start)
        self._counters[key] = max(known, span.end)
        if len(self._counters) > _MAX_COUNTERS:
            self._counters.popitem(last=False)
        return span.end - known

    def _measure(self, priority: int) -> tuple[float, float]:
        """Returns the least counter of a priority class, and the largest lead. Both are tokens per unit of weight."""
        least, weight = self._queue.measure_class(priority)
        # While a tenant waits for its lead, the others receive the lead times their weights.
        return least, self._costs.tokens(MAX_LEAD_S) / max(1.0, weight)

    def _raise(self, account: TenantAccount, service: float, least: float, max_lead: float) -> None:
        allowance = self._allowances.get(account, _Allowance(max_lead, least))
        growth = (1 - MIN_SHARE) * max(0.0, least - allowance.least)
        allowed = min(max_lead, allowance.service + growth)
        added = min(service, allowed)
        account.service += added
        self._allowances[account] = _Allowance(allowed - added, least)
