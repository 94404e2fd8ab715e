from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slora_adapters.loader.loader import LoadQueue
from slora_adapters.version import AdapterVersion


def _v(tenant: str, number: int = 0) -> AdapterVersion:
    return AdapterVersion(tenant, f"{number:064x}")


def _take_all(queue: LoadQueue) -> list[str]:
    taken = []
    while (version := queue.pop()) is not None:
        taken.append(version.tenant)
    return taken


def test_a_single_tenant_uses_all_places_but_one() -> None:
    queue = LoadQueue(max_running=4, share=2, max_alone=9)
    for number in range(9):
        queue.add(_v("a", number))
    assert _take_all(queue) == ["a", "a", "a"]
    queue.add(_v("b"))
    assert _take_all(queue) == ["b"], "at once"


def test_a_single_tenant_runs_at_most_max_alone_loads() -> None:
    queue = LoadQueue(max_running=9, share=2, max_alone=3)
    for number in range(9):
        queue.add(_v("a", number))
    assert _take_all(queue) == ["a", "a", "a"]


def test_a_tenant_beside_others_gets_at_most_its_share() -> None:
    queue = LoadQueue(max_running=6, share=2, max_alone=9)
    for number in range(9):
        queue.add(_v("a", number))
        queue.add(_v("b", number))
    assert Counter(_take_all(queue)) == {"a": 3, "b": 2}, "the last place is kept free"
    queue.finish(_v("a"))
    queue.add(_v("c"))
    assert _take_all(queue) == ["c"], "before those who have their share"


def test_tenants_take_turns_and_each_is_served_in_order() -> None:
    queue = LoadQueue(max_running=1, share=1, max_alone=1)
    for tenant, number in (("a", 1), ("a", 2), ("a", 3), ("b", 4), ("b", 5)):
        queue.add(_v(tenant, number))
    order = []
    while (version := queue.pop()) is not None:
        order.append(int(version.digest, 16))
        queue.finish(version)
    assert order == [1, 4, 2, 5, 3]


@given(
    places=st.integers(1, 6),
    share=st.integers(1, 3),
    alone=st.integers(0, 5),
    events=st.lists(st.one_of(st.sampled_from("abc"), st.integers(0, 5)), max_size=60),
)
def test_no_slot_is_lost_and_no_load_waits_beside_a_free_slot(
    places: int, share: int, alone: int, events: list[str | int]
) -> None:
    queue, running, waiting = LoadQueue(places, share, alone), [], Counter()
    for number, event in enumerate(events):
        if isinstance(event, str):
            queue.add(_v(event, number))
            waiting[event] += 1
        elif running:
            queue.finish(running.pop(event % len(running)))
        while (version := queue.pop()) is not None:
            running.append(version)
            waiting[version.tenant] -= 1
        loads = Counter(version.tenant for version in running)
        assert len(running) <= places
        if len(running) < places:
            assert all(loads[tenant] >= share for tenant in +waiting), "one below its share waits"
        if len(running) < places - 1:
            assert all(loads[tenant] >= alone for tenant in +waiting)


def test_finishing_a_load_that_does_not_run_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        LoadQueue(1, 1, 1).finish(_v("a"))
