import math

import pytest

from slora.core.errors import ConfigError
from slora.core.request import TenantShare
from slora.memory.tenant_account import TenantAccount, TenantAccounts


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(
            ({"weight": value}, "weight is .*; it must be above 0 and finite")
            for value in (0, -1.0, math.inf, math.nan)
        ),
        *(
            ({name: value}, f"{name} is {value!r}; it must be from 0 to 1")
            for name in ("min_share", "max_share")
            for value in (-0.1, 1.5, math.nan)
        ),
        ({"min_share": 0.5, "max_share": 0.4}, r"min_share is 0\.5, more than its max_share 0\.4"),
    ],
)
def test_a_share_out_of_range_is_refused(fields: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TenantShare(**fields)


def test_fractions_of_the_pool_become_whole_pages_that_add_up() -> None:
    tenants = TenantAccounts(100)
    tenants.set_share("a", TenantShare(min_share=0.29, max_share=0.57))
    assert (tenants.find("a").min_pages, tenants.find("a").max_pages) == (29, 57)
    for name in "bcd":
        tenants.set_share(name, TenantShare(min_share=1 / 3))
    assert sum(tenants.find(name).min_pages for name in "bcd") == 99


def test_tenants_with_a_floor_or_a_ceiling_are_bounded_as_long_as_they_have_one() -> None:
    tenants = TenantAccounts(100)
    assert tenants.bounded == []
    tenants.set_share("floor", TenantShare(min_share=0.1))
    tenants.set_share("ceiling", TenantShare(max_share=0.5))
    tenants.set_share("weight", TenantShare(weight=3))
    assert [tenant.name for tenant in tenants.bounded] == ["floor", "ceiling"]
    before = tenants.bounded
    tenants.set_share("floor", TenantShare(min_share=0.2))
    assert tenants.bounded is before, "nobody became bounded or unbounded"
    tenants.set_share("floor", TenantShare())
    assert [tenant.name for tenant in tenants.bounded] == ["ceiling"]
    assert len(before) == 2, "a list that others hold was changed"


def test_a_ceiling_counts_owned_and_requested_pages() -> None:
    tenants = TenantAccounts(100)
    tenant = tenants.find("a")
    tenant.num_pages = 8
    assert tenant.pages_over_ceiling(90) == 0
    tenants.set_share("a", TenantShare(max_share=0.1))
    assert [tenant.pages_over_ceiling(num_more) for num_more in (0, 2, 3, 12)] == [0, 0, 1, 10]


def _active(
    tenants: TenantAccounts, name: str, weight: float, num_pages: int, num_waiting: int = 0
) -> TenantAccount:
    tenants.set_share(name, TenantShare(weight=weight))
    tenant = tenants.find(name)
    tenant.num_pages, tenant.num_waiting = num_pages, num_waiting
    return tenant


def test_a_share_of_the_pool_goes_by_weight_among_tenants_that_own_pages_or_wait() -> None:
    tenants = TenantAccounts(400)
    tenant = _active(tenants, "a", weight=1, num_pages=101)
    _active(tenants, "asleep", weight=50, num_pages=0)
    assert not tenants.is_over_share(tenant), "alone, all of the pool is its share"
    _active(tenants, "waits", weight=2, num_pages=0, num_waiting=1)
    assert not tenants.is_over_share(tenant), "a third of it is 133 pages"
    _active(tenants, "owns", weight=1, num_pages=1)
    assert tenants.is_over_share(tenant), "a quarter of it is 100 pages"
    tenant.num_pages = 100
    assert not tenants.is_over_share(tenant), "it has just its share"
