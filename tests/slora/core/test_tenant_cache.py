"""A tenant can neither read the cache entries of another tenant nor remove them."""

from slora.core.tenant_cache import TenantCache


def test_a_tenant_does_not_find_what_another_one_has_stored() -> None:
    cache = TenantCache[str, int](4, 2)
    cache.insert("a", "x", 1)
    assert cache.find("a", "x") == 1 and cache.find("b", "x") is None and cache.find("a", "y") is None


def test_a_tenant_that_exceeds_its_bound_loses_its_least_recently_used_entry() -> None:
    cache = TenantCache[str, int](8, 2)
    for name in "xyx":
        cache.insert("a", name, 1)
    cache.insert("b", "x", 2)
    assert cache.find("a", "x") == 1
    cache.insert("a", "z", 3)
    assert [cache.find("a", name) for name in "xyz"] == [1, None, 3] and cache.find("b", "x") == 2


def test_a_full_cache_takes_from_the_tenant_with_the_most_entries() -> None:
    cache = TenantCache[int, int](6, 4)
    cache.insert("quiet", 0, 0)
    for number in range(100):
        cache.insert("busy", number, number)
    for number in range(3):
        cache.insert("third", number, number)
    assert cache.find("quiet", 0) == 0
    assert [cache.find("busy", number) for number in range(96, 100)] == [None, None, 98, 99]
    assert [cache.find("third", number) for number in range(3)] == [0, 1, 2]


def test_among_tenants_with_one_entry_each_the_least_recently_used_is_removed() -> None:
    cache = TenantCache[str, int](2, 2)
    for tenant in ("a", "b"):
        cache.insert(tenant, "x", 1)
    assert cache.find("a", "x") == 1
    cache.insert("c", "x", 1)
    assert [cache.find(tenant, "x") for tenant in "abc"] == [1, None, 1]
