"""A tenant that has used up its CPU budget waits until the budget is refilled. Other tenants do not wait."""

import weakref

import pytest

from slora_api.core.cpu_budget import CpuBudget
from slora_api.core.errors import TenantBusy
from tests.support.clock import Clock


class NamedTenant(str):
    """A name that a weak reference can follow."""


def test_a_tenant_over_its_cpu_budget_is_refused_until_the_budget_refills() -> None:
    clock = Clock()
    budget = CpuBudget(10.0, 0.5, "things", clock)
    budget.check("hostile")
    budget.charge("hostile", 9.0)
    budget.check("hostile")
    budget.charge("hostile", 3.0)
    with pytest.raises(
        TenantBusy, match=r"CPU time for things is used up \(10 s, .* try again in 5 s"
    ) as refused:
        budget.check("hostile")
    budget.check("honest")
    clock.now += refused.value.retry_after_s
    budget.check("hostile")


def test_a_balance_is_never_more_than_full() -> None:
    clock = Clock()
    budget = CpuBudget(10.0, 0.5, "things", clock)
    budget.charge("acme", 1.0)
    clock.now += 1_000
    budget.charge("acme", 10.0)
    with pytest.raises(TenantBusy):
        budget.check("acme")


def test_full_balances_take_no_memory() -> None:
    clock = Clock()
    budget = CpuBudget(10.0, 0.5, "things", clock)
    budget.charge("debtor", 1_000.0)
    names = []
    for number in range(100):
        tenant = NamedTenant(f"tenant {number}")
        names.append(weakref.ref(tenant))
        budget.charge(tenant, 1.0)
        clock.now += 3.0
    del tenant
    assert sum(name() is not None for name in names) < 5 and budget.wait_s("debtor") > 0
