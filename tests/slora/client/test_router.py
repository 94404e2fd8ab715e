"""The router keeps requests where their adapters are, as far as the load allows."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slora.client.router import Penalties, ReplicaState, RoutedWork, Router, TrafficShare
from slora_adapters.version import AdapterVersion

PENALTIES = Penalties()


def version(index: int, tenant: str = "acme") -> AdapterVersion:
    return AdapterVersion(tenant, f"{index:064x}")


def work(*adapters: int, prefix: bytes | None = None, tokens: int = 500) -> RoutedWork:
    return RoutedWork("acme", tuple(version(index) for index in adapters), prefix, tokens)


def fleet(count: int, *, load: float = 0.0) -> list[ReplicaState]:
    return [ReplicaState(f"replica-{i}", frozenset(), frozenset(), 0, 0, load) for i in range(count)]


def alter(replicas: Sequence[ReplicaState], name: str, **fields: object) -> list[ReplicaState]:
    return [replace(one, **fields) if one.name == name else one for one in replicas]  # type: ignore[arg-type]


def find_home(replicas: Sequence[ReplicaState], index: int) -> str:
    return Router().choose(work(index), replicas)[0]


@st.composite
def fleets(draw: st.DrawFn) -> list[ReplicaState]:
    adapters = st.frozensets(st.integers(0, 5).map(version), max_size=4)
    count = draw(st.integers(0, 40))
    return [
        ReplicaState(
            f"replica-{i}",
            draw(adapters),
            draw(adapters),
            draw(st.integers(0, 5)),
            draw(st.integers(0, 50)),
            draw(st.floats(0, 20)),
            draw(st.booleans()),
        )
        for i in range(count)
    ]


works = st.builds(
    work, *[st.integers(0, 5)] * 2, prefix=st.none() | st.binary(max_size=4), tokens=st.integers(0, 9000)
)


@given(fleets(), st.lists(works, min_size=1, max_size=5))
def test_only_serving_replicas_are_returned_and_each_once(
    replicas: list[ReplicaState], requests: list[RoutedWork]
) -> None:
    router = Router(token_s=0.001)
    serving = {one.name for one in replicas if one.is_serving}
    for request in requests:
        names = router.choose(request, tuple(replicas))
        assert len(names) == len(set(names)) and set(names) <= serving
        assert bool(names) == bool(serving)
        if len(serving) <= 16:
            assert set(names) == serving


@given(fleets(), works)
def test_no_replica_is_chosen_whose_load_is_far_above_the_least(
    replicas: list[ReplicaState], request: RoutedWork
) -> None:
    loads = {one.name: one.load for one in replicas if one.is_serving}
    for name in Router().choose(request, replicas)[:1]:
        assert loads[name] <= min(loads.values()) + PENALTIES.stranger_s + PENALTIES.prefix_s


@given(fleets(), st.lists(works, max_size=8))
def test_equal_calls_give_equal_choices(replicas: list[ReplicaState], requests: list[RoutedWork]) -> None:
    first, second = Router(token_s=0.001), Router(token_s=0.001)
    assert [first.choose(one, replicas) for one in requests] == [
        second.choose(one, replicas) for one in requests
    ]


@pytest.mark.parametrize("count", [5, 200])
def test_resident_beats_host_beats_home_beats_other_replicas(count: int) -> None:
    replicas = fleet(count)
    home, *others = Router().choose(work(1), replicas)
    host, resident = others[0], others[1]
    replicas = alter(replicas, host, on_host={version(1)})
    replicas = alter(replicas, resident, resident={version(1)})
    assert Router().choose(work(1), replicas)[:3] == [resident, host, home]


def test_a_resident_replica_is_skipped_when_its_load_costs_more_than_a_cold_load_at_home() -> None:
    replicas = fleet(8)
    home, resident = Router().choose(work(1), replicas)[:2]
    for excess, best in ((-0.01, resident), (0.01, home)):
        replicas = alter(replicas, resident, resident={version(1)}, load=PENALTIES.home_s + excess)
        assert Router().choose(work(1), replicas)[0] == best


def test_all_adapters_that_a_request_combines_have_to_be_resident() -> None:
    replicas = alter(fleet(8), "replica-3", resident={version(1)})
    replicas = alter(replicas, "replica-5", resident={version(1), version(2)})
    assert Router().choose(work(1, 2), replicas)[0] == "replica-5"


def test_replicas_that_leave_move_only_the_adapters_whose_home_they_were() -> None:
    replicas = fleet(100)
    homes = {index: find_home(replicas, index) for index in range(300)}
    lost = {f"replica-{i}" for i in range(10)}
    left = [replace(one, is_serving=one.name not in lost) for one in replicas]
    moved = {index for index in homes if find_home(left, index) != homes[index]}
    assert moved == {index for index, home in homes.items() if home in lost}


def test_homes_of_cold_adapters_are_spread_evenly() -> None:
    router, replicas = Router(), tuple(fleet(20))
    homes = Counter(router.choose(work(index), replicas)[0] for index in range(4000))
    # 200 each on average; the standard deviation is 14.
    assert len(homes) == 20 and min(homes.values()) > 130 and max(homes.values()) < 270


def test_a_hot_adapter_gets_more_homes_and_gives_them_up_when_it_cools() -> None:
    router, replicas = Router(), tuple(fleet(100, load=1.0))
    hot = {router.choose(work(7), replicas)[0] for _ in range(200)}
    assert len(hot) > 20
    for index in range(30_000):
        router.choose(work(100 + index % 500), replicas)
    assert {router.choose(work(7), replicas)[0] for _ in range(3)} == {find_home(replicas, 7)}


def test_requests_with_one_prefix_share_a_home_and_others_use_the_rest() -> None:
    router, replicas = Router(), fleet(12)
    for _ in range(50):
        router.choose(work(7), replicas)
    replicas = [replace(one, resident={version(7)}) for one in replicas]
    homes = {router.choose(work(7, prefix=b"chat"), replicas)[0] for _ in range(20)}
    assert len(homes) == 1
    assert len({router.choose(work(7, prefix=b"%d" % i), replicas)[0] for i in range(50)}) > 3


def test_base_requests_with_one_prefix_share_a_replica_and_others_go_to_the_least_loaded() -> None:
    replicas = alter(fleet(50, load=1.0), "replica-9", load=0.0)
    router = Router()
    assert router.choose(work(), replicas)[0] == "replica-9"
    even = fleet(50)
    assert len({router.choose(work(prefix=b"chat"), even)[0] for _ in range(10)}) == 1


def test_work_placed_since_the_last_report_counts_until_the_replica_reports_again() -> None:
    router, stale = Router(token_s=0.01), fleet(4)
    homes = [router.choose(work(1, tokens=1000), stale)[0] for _ in range(8)]
    assert len(set(homes)) > 1
    home = find_home(stale, 1)
    fresh = alter(stale, home, load=0.0, num_running=1)
    router.choose(work(2), fresh)
    assert router.choose(work(1), alter(stale, home, num_running=2))[0] == home


def test_a_list_that_changes_in_place_is_read_again() -> None:
    router, replicas = Router(), fleet(4)
    home = router.choose(work(1), replicas)[0]
    replicas[int(home[-1])] = replace(replicas[int(home[-1])], is_serving=False)
    assert home not in router.choose(work(1), replicas)


HOT, COLD = AdapterVersion("acme", "0" * 64), AdapterVersion("acme", "1" * 64)


def test_the_older_window_counts_by_the_part_that_is_recent() -> None:
    share = TrafficShare(100)
    for turn in range(150):
        share.add(HOT if 60 <= turn < 110 else COLD, 1)
    assert share.share(HOT) == (10 + 40 * 0.5) / (50 + 100 * 0.5)


def test_adapters_without_traffic_are_forgotten() -> None:
    share = TrafficShare(10)
    for turn in range(1000):
        share.add(AdapterVersion("acme", f"{turn:064x}"), 5)
    assert len(share) <= 20
    assert share.share(HOT) == 0
