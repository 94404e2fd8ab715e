import pytest

from slora_adapters.errors import StoreUnavailable
from slora_adapters.peft.adapter import AdapterExtras
from slora_adapters.registry.cache import NameCache
from slora_adapters.registry.record import AdapterDetails, AdapterRecord, ExtrasSummary
from slora_adapters.version import AdapterVersion

DETAILS = AdapterDetails(8, ("q_proj",), 4096)


def _record() -> AdapterRecord:
    return AdapterRecord(
        "a", 1, AdapterVersion("t1", "1" * 64), DETAILS, ExtrasSummary.of(AdapterExtras()), 1.0, 1.0
    )


def test_a_value_read_before_a_change_is_not_cached() -> None:
    cache, key = NameCache(), ("t1", "a")

    def find() -> AdapterRecord:
        cache.drop(key)  # the entry changes while its value is being read
        return _record()

    assert cache.look_up(key, 1, find) == _record()
    assert cache.get(key, 1) is None
    assert cache.look_up(key, 1, lambda: _record()) == cache.get(key, 1)
    cache.clear()
    assert cache.get(key, 1) is None


def test_missing_names_and_failed_lookups_are_not_cached() -> None:
    cache = NameCache()

    def fail() -> None:
        raise StoreUnavailable("down")

    for number in range(100):
        assert cache.look_up(("t1", f"n{number}"), "latest", lambda: None) is None
        with pytest.raises(StoreUnavailable):
            cache.look_up(("t1", f"n{number}"), "latest", fail)
    assert not any(cache.get(("t1", f"n{number}"), "latest") for number in range(100))


def test_the_least_recently_used_names_are_evicted() -> None:
    cache = NameCache(max_bytes=40_000)
    for number in range(1000):
        name = f"n{number}"
        cache.look_up(("t1", name), 1, lambda: AdapterExtras("x" * 8000))
        cache.get(("t1", "n0"), 1)
    held = [number for number in range(1000) if cache.get(("t1", f"n{number}"), 1)]
    assert held == [0, 997, 998, 999]
    for number in held:
        cache.drop(("t1", f"n{number}"))
    assert not any(cache.get(("t1", f"n{number}"), 1) for number in held)
    for number in range(3):
        cache.look_up(("t1", f"m{number}"), 1, lambda: AdapterExtras("x" * 8000))
    assert all(cache.get(("t1", f"m{number}"), 1) for number in range(3)), "dropped entries take no room"
