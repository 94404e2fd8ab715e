"""The service of other engines counts once, only against its own tenant, and never ends a tenant's service here."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slora.core.engine_state import ServiceSpan
from slora.core.request import TenantShare
from slora.memory.tenant_account import TenantAccount, TenantAccounts
from slora.scheduler.service_elsewhere import MAX_LEAD_S, MIN_SHARE, ServiceElsewhere
from slora.scheduler.waiting_queues import FairQueue
from tests.support.driving import COSTS
from tests.support.queueing import make_sequence

LEAD = COSTS.tokens(MAX_LEAD_S)


class Engine:
    """The fair queue of an engine at which tenants wait all the time. served: the tokens that each tenant received."""

    def __init__(self, *names: str) -> None:
        self.tenants, self.queue = TenantAccounts(100), FairQueue()
        self.elsewhere = ServiceElsewhere(self.tenants, self.queue, COSTS)
        self.served = dict.fromkeys(names, 0.0)
        for name in names:
            self.wait(name)

    def wait(self, name: str) -> TenantAccount:
        account = self.tenants.find(name)
        self.queue.push(make_sequence(account))
        self.served.setdefault(name, 0.0)
        return account

    def serve(self, num_tokens: float) -> str:
        sequence = self.queue.peek()
        assert sequence is not None
        account = sequence.tenant
        self.queue.push(make_sequence(account))
        self.queue.remove(sequence)
        account.charge(num_tokens)
        self.served[account.name] += num_tokens
        return account.name

    def hear(self, tenant: str, start: float, end: float, engine: str = "other") -> None:
        self.elsewhere.add(engine, [ServiceSpan(tenant, False, start, end)])

    def service(self, name: str) -> float:
        return self.tenants.find(name).service


def test_a_repeated_or_late_span_counts_once() -> None:
    engine = Engine("a", "b")
    for start, end in ((0, 10), (0, 10), (10, 30), (0, 10), (10, 30)):
        engine.hear("a", start, end)
    assert engine.service("a") == 30
    engine.hear("a", 0, 20)  # A part of what has been counted.
    engine.hear("a", 50, 60)  # The span from 30 to 50 was lost, and this one includes it.
    assert engine.service("a") == 60 and engine.service("b") == 0


def test_history_before_the_first_span_does_not_count() -> None:
    engine = Engine("a", "b")
    engine.hear("a", 1e9, 1e9 + 5)
    assert engine.service("a") == 5


def test_each_start_of_an_engine_counts_apart() -> None:
    engine = Engine("a", "b")
    engine.hear("a", 0, 50, "first start")
    engine.hear("a", 0, 20, "second start")
    assert engine.service("a") == 70


def test_a_tenant_that_this_engine_does_not_know_gets_no_account() -> None:
    engine = Engine("a")
    engine.hear("stranger", 0, 50)
    assert engine.tenants.find_known("stranger", is_background=False) is None


def test_service_elsewhere_counts_by_weight() -> None:
    engine = Engine("a", "b")
    engine.tenants.set_share("a", TenantShare(weight=4))
    engine.hear("a", 0, 100)
    assert engine.service("a") == 25


def test_service_while_nobody_else_waited_delays_a_tenant_by_the_largest_lead_at_most() -> None:
    engine = Engine()
    engine.tenants.find("a")
    for turn in range(100):
        engine.hear("a", turn * LEAD, (turn + 1) * LEAD)
    engine.wait("b"), engine.wait("a")
    while engine.serve(10.0) == "b":
        assert engine.served["b"] <= LEAD + 20


def test_a_tenant_with_endless_service_elsewhere_still_gets_its_least_share_here() -> None:
    engine = Engine("a", "b")
    for turn in range(2_000):
        engine.hear("a", turn * 100, (turn + 1) * 100)
        engine.serve(10.0)
        if engine.served["a"] == 0:  # It waits for the lead, and while the others catch up.
            assert engine.served["b"] <= LEAD / MIN_SHARE + 20
        if turn == 1_000:
            before = engine.served.copy()
    share = (engine.served["a"] - before["a"]) / (engine.served["b"] - before["b"])
    assert share == pytest.approx(MIN_SHARE, rel=0.1)


def test_two_tenants_with_equal_service_in_all_get_what_the_other_misses() -> None:
    """Tenant a receives half as much elsewhere as this engine serves. So it gets a quarter of this engine."""
    engine, elsewhere = Engine("a", "b"), 0.0
    for _ in range(1_000):
        engine.serve(10.0)
        engine.hear("a", elsewhere, elsewhere + 5.0)
        elsewhere += 5.0
    assert engine.served["a"] + elsewhere == pytest.approx(engine.served["b"], rel=0.02)


def test_a_new_tenant_is_lifted_above_what_others_received_elsewhere() -> None:
    engine = Engine("a", "b")
    engine.hear("a", 0, 70), engine.hear("b", 0, 50)
    assert engine.wait("new").service == 50


spans = st.tuples(st.sampled_from("ab"), st.integers(0, 3), st.integers(0, 3), st.sampled_from(["x", "y"]))


@given(st.lists(st.one_of(spans, st.just(None)), max_size=40))
def test_no_order_of_spans_lowers_a_counter_or_raises_one_beyond_the_lead(operations: list) -> None:
    engine = Engine("a", "b")
    for operation in operations:
        before = {name: engine.service(name) for name in "ab"}
        if operation is None:
            engine.serve(LEAD / 10)
            continue
        name, start, length, other = operation
        engine.hear(name, start * LEAD, (start + length) * LEAD, other)
        changed = [one for one in "ab" if engine.service(one) != before[one]]
        assert changed in ([], [name])
        assert before[name] <= engine.service(name) <= before[name] + LEAD
