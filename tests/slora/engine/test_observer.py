"""What a console sees of the engine: rates, times and events while it watches, and nothing recorded otherwise."""

import time
from array import array
from collections import Counter
from types import SimpleNamespace

import pytest

from slora.core.engine_config import KVFootprint, SchedulerConfig
from slora.core.engine_state import LiveState
from slora.core.messages import Observe, Reply
from slora.core.request import EngineRequest, single_adapter
from slora.core.sampling_params import SamplingParams
from slora.engine import engine as engine_module
from slora.engine.engine import Engine
from slora.engine.observer import MAX_CELLS, PageMapper
from slora.memory.unified_paging import UnifiedPaging
from slora_adapters.version import AdapterVersion
from slora_kernels.layout import LoraTargets
from tests.support.driving import drive, make_engine, make_source
from tests.support.engine_stack import over_the_wire
from tests.support.model_kit import Kits


class Clock:
    """Replaces the clock of the engine, but not `time.monotonic`: with another time, the event loops of servers in this
    process would wait for an hour."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        clock = SimpleNamespace(monotonic=lambda: self.now, perf_counter=time.perf_counter)
        patch.setattr(engine_module, "time", clock)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def ask(name: str, tenant: str, adapter: AdapterVersion | None = None, num_tokens: int = 8) -> EngineRequest:
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    return EngineRequest(name, tenant, [7] * 20, single_adapter(adapter), params)


def observe(engine: Engine, clock: Clock, *tenants: str) -> LiveState:
    clock.now += 1.0
    return watch(engine, *tenants)


def watch(engine: Engine, *tenants: str) -> LiveState:
    live = engine.stats(tenants).live
    assert live is not None
    return live


def make(kits: Kits, num_pages: int = 100) -> tuple[Engine, AdapterVersion]:
    kit = kits("llama")
    source, versions = make_source(kit)
    return make_engine(kit, source, num_pages), next(iter(versions.values()))


def test_tokens_times_and_adapters_are_those_of_the_watched_steps(kits: Kits, clock: Clock) -> None:
    engine, version = make(kits)
    drive(engine, [[ask("before", "early")]])
    observe(engine, clock)
    engine.add(ask("a", version.tenant, version))
    engine.add(ask("b", "plain", num_tokens=4))
    while engine.num_unfinished:
        clock.now += 0.1
        engine.step()
    state = observe(engine, clock, "silent")
    adapted, plain = state.tenants[version.tenant], state.tenants["plain"]
    assert adapted.tokens_per_s == pytest.approx(2 * plain.tokens_per_s)
    assert adapted.first_token is not None and adapted.first_token.num_times == 1
    assert adapted.interval is not None and adapted.interval.num_times == 7
    assert adapted.interval.p50 == pytest.approx(0.1)
    assert state.total.interval is not None and state.total.interval.num_times == 10
    assert [(one.tenant, one.digest) for one in state.adapters] == [
        (version.tenant, version.digest),
        ("plain", ""),
    ]
    assert [one.num_tokens for one in state.adapters] == [27, 23]
    assert state.tenants["silent"].tokens_per_s == 0
    assert "early" in state.tenants and state.tenants["early"].first_token is None


def test_all_computed_tokens_are_counted_however_few_adapters_are_listed(
    kits: Kits, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slora.engine.observer._MAX_ADAPTERS", 1)
    engine, version = make(kits)
    observe(engine, clock)
    drive(engine, [[ask("a", version.tenant, version), ask("b", "plain", num_tokens=4)]])
    state = observe(engine, clock)
    assert [one.num_tokens for one in state.adapters] == [27]
    assert state.work_tokens == 27 + 23


def test_steps_are_not_recorded_while_no_console_watches(kits: Kits, clock: Clock) -> None:
    engine, _ = make(kits)
    observe(engine, clock)
    clock.now += 60
    drive(engine, [[ask("a", "t")]])
    state = observe(engine, clock)
    assert state.step is None and state.total.tokens_per_s == 0 and state.adapters == ()


def test_loads_evictions_and_preemptions_are_events(kits: Kits, clock: Clock) -> None:
    engine, version = make(kits)
    observe(engine, clock)
    drive(engine, [[ask("a", version.tenant, version)]])
    events = observe(engine, clock).events
    assert [(one.kind, one.tenant, one.digest) for one in events] == [
        ("load", version.tenant, version.digest)
    ]
    engine.remove_adapter(version)
    events = observe(engine, clock).events
    assert [one.kind for one in events] == ["load", "eviction"] and events[1].number == events[0].number + 1
    tight, _ = make(kits, num_pages=6)
    observe(tight, clock)
    drive(tight, [[ask(name, name, num_tokens=40) for name in ("x", "y")]])
    found = observe(tight, clock).events
    assert sum(one.num_times for one in found if one.kind == "preemption") == tight.stats().preemptions > 0
    assert (
        sum(one.num_times for one in found if one.kind == "prefix_eviction") == tight.stats().prefix_evictions
    )


def test_consoles_that_ask_at_the_same_time_share_one_observation(kits: Kits, clock: Clock) -> None:
    engine, _ = make(kits)
    first = observe(engine, clock)
    assert watch(engine) is first
    assert "late" in watch(engine, "late").tenants  # not in the first one, so it is made again
    clock.now += 1
    assert watch(engine) is not first


def test_a_state_arrives_unchanged(kits: Kits, clock: Clock) -> None:
    engine, version = make(kits)
    observe(engine, clock)
    engine.add(ask("a", version.tenant, version))
    for _ in range(4):
        clock.now += 0.1
        engine.step()
    clock.now += 1.0
    stats = engine.stats([])
    live = stats.live
    assert (
        live is not None and live.events and live.adapters and live.page_map.owners and live.step is not None
    )
    assert Observe.read_result(over_the_wire(Reply(3, stats)).result) == stats


TARGETS = LoraTargets(16, 4, embedding=False, head=False, kv=False)


def make_paging(num_pages: int) -> UnifiedPaging:
    config = SchedulerConfig(
        num_pages,
        num_slots=8,
        full_page_bytes=1024,
        footprint=KVFootprint(16),
        max_num_seqs=8,
        max_num_batched_tokens=64,
    )
    return UnifiedPaging(config)


def count_cells(paging: UnifiedPaging, mapper: PageMapper) -> Counter[str]:
    """The number of cells by content and tenant; free cells are left out."""
    drawn = mapper.draw()
    owners = [None, *drawn.owners]
    found = Counter(owners[number] for number in array("H", drawn.cells))
    return Counter({f"{one.content} {one.tenant}": count for one, count in found.items() if one is not None})


def test_each_page_shows_its_content_and_its_tenant() -> None:
    paging = make_paging(100)
    mapper = PageMapper(paging)
    assert count_cells(paging, mapper) == {}
    a, b = paging.tenants.find("a"), paging.tenants.find("b")
    resident = paging.residency.allocate(AdapterVersion("a", "d" * 64), a, 10, 10_000, TARGETS)
    paging.kv.allocate(7, b)
    kept = paging.kv.allocate(3, b)
    paging.kv.allocate(2, paging.tenants.find("b", is_background=True))
    assert count_cells(paging, mapper) == {"adapter a": 10, "kv b": 12}
    for at, page in enumerate(kept):
        paging.kv.insert([page], b"key%d" % at, None, ())
    paging.kv.release(kept)
    paging.residency.advance_load(resident, 10)  # the load was its only user
    assert count_cells(paging, mapper) == {"idle_adapter a": 10, "kv b": 9, "prefix b": 3}
    paging.residency.remove(resident.version)
    assert count_cells(paging, mapper) == {"kv b": 9, "prefix b": 3}


def test_a_large_pool_is_sampled_into_a_bounded_number_of_cells() -> None:
    paging = make_paging(100_000)
    mapper = PageMapper(paging)
    tenant = paging.tenants.find("a")
    paging.residency.allocate(AdapterVersion("a", "d" * 64), tenant, 40_000, 10_000, TARGETS)
    paging.kv.allocate(30_000, tenant)
    cells = count_cells(paging, mapper)
    drawn = mapper.draw()
    assert len(drawn.cells) // 2 == -(-100_000 // drawn.stride) <= MAX_CELLS
    assert cells == {"adapter a": 40_000 // drawn.stride, "kv a": 30_000 // drawn.stride}
