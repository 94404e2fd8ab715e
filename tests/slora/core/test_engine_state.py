"""The statistics of several engines together, and which engines may serve together."""

from dataclasses import replace

import numpy as np

from slora.core.engine_state import (
    EngineStats,
    Histogram,
    HistogramCounts,
    LoadPaces,
    PageCounts,
    PageMap,
    PageOwner,
)
from slora.core.request import EngineRequest, single_adapter
from slora.core.sampling_params import SamplingParams
from slora.engine.engine import Engine
from slora_adapters.version import AdapterVersion
from tests.support.driving import drive, make_engine, make_source, start_engine
from tests.support.model_kit import ModelKit


def test_merged_states_are_the_sums_over_the_engines(kit: ModelKit) -> None:
    engines = [start_engine(kit, 40)[0] for _ in range(2)]
    for number, engine in enumerate(engines, start=1):
        engine.stats(["t"])
        prompts = [[one, 2, 3] for one in range(number)]
        params = SamplingParams(max_tokens=5, ignore_eos=True, seed=1)
        drive(engine, [[EngineRequest(str(one[0]), "t", one, (), params) for one in prompts]])
    stats = [engine.stats() for engine in engines]
    merged = EngineStats.merge(stats)
    assert merged.generated_tokens == 15 and merged.pages_total == 80 and merged.pages_free == 80
    assert merged.usage == stats[0].usage + stats[1].usage
    assert merged.tenants["t"].requests == 3
    assert sum(merged.step_tokens.counts) == sum(sum(one.step_tokens.counts) for one in stats)
    assert EngineStats.merge(stats[:1]) == stats[0]
    observed = EngineStats.merge([engine.stats(["t"]) for engine in engines])
    assert merged.live is None and observed.live is not None
    assert observed.live.total.pages == merged.pages == observed.pages
    for engine in engines:
        engine.close()


def test_the_pools_are_drawn_one_after_the_other(kit: ModelKit) -> None:
    engine, _ = start_engine(kit, 40)
    stats, (one, two) = engine.stats([]), (PageOwner("kv", "a"), PageOwner("kv", "b"))
    assert stats.live is not None
    maps = [
        PageMap(1, np.array([1, 1, 0, 0], np.uint16).tobytes(), (one,)),
        PageMap(1, np.array([1, 1, 2, 2], np.uint16).tobytes(), (two, one)),
    ]
    live = EngineStats.merge(
        [replace(stats, live=replace(stats.live, page_map=drawn)) for drawn in maps]
    ).live
    assert live is not None
    merged = live.page_map
    assert merged.stride == 2 and merged.owners == (one, two)
    assert np.frombuffer(merged.cells, np.uint16).tolist() == [1, 0, 2, 1]
    engine.close()


def test_an_engine_that_differs_from_the_others_is_named(kit: ModelKit) -> None:
    engine, _ = start_engine(kit, 40)
    info = engine.info
    engine.close()
    assert info.explain_difference(replace(info, num_pages=9)) is None
    assert replace(info, device="cuda:0").explain_difference(replace(info, device="cuda:1")) is None
    assert info.explain_difference(replace(info, dtype="bfloat16")) == (
        "its dtype is bfloat16, but that of the other replicas is float32"
    )
    assert "its device is cuda:0" in str(info.explain_difference(replace(info, device="cuda:0")))


def ask(tenant: str, length: int, adapter: AdapterVersion | None = None) -> EngineRequest:
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    return EngineRequest(f"{tenant}{length}", tenant, [7] * length, single_adapter(adapter), params)


def check(engine: Engine, whole: PageCounts, **tenants: PageCounts) -> None:
    engine.check_invariants()
    stats = engine.stats()
    assert stats.pages == whole
    assert stats.tenant_pages == tenants and list(stats.tenant_pages) == list(tenants)


def test_pages_are_counted_by_what_they_hold_and_by_tenant(kit: ModelKit) -> None:
    source, versions = make_source(kit)
    version = next(iter(versions.values()))
    engine = make_engine(kit, source, 100, metrics_tenants=2)
    check(engine, PageCounts())
    engine.add(ask("local", 16, version))
    for _ in range(5):
        engine.step()
    adapter = engine.stats().adapter_pages
    assert adapter > 0
    running = PageCounts(kv=2, adapters=adapter)
    check(engine, running, local=running)
    drive(engine, [[ask("big", 16 * (adapter + 9))], [ask("tiny", 16)]])
    local = PageCounts(prefixes=1, idle_adapters=adapter)
    big, tiny = PageCounts(prefixes=adapter + 9), PageCounts(prefixes=1)
    # Only two tenants are listed. The third still counts in the whole pool.
    check(engine, local + big + tiny, big=big, local=local)
    assert engine.stats().pooled_adapters == (version.label,)
    engine.remove_adapter(version)
    check(engine, big + tiny, big=big, tiny=tiny)
    assert engine.stats().pooled_adapters == () and version.label in engine.stats().adapters


def test_a_value_counts_in_the_first_bucket_that_reaches_it() -> None:
    histogram = Histogram((1, 2))
    for value, times in ((1.0, 1), (1.5, 2), (2.0, 1), (7.0, 3)):
        histogram.count(value, times)
    counts = histogram.read()
    assert counts == HistogramCounts((1.0, 2.0), (1, 3, 3), 27.0)
    assert counts.cumulate() == [("1.0", 1.0), ("2.0", 4.0), ("+Inf", 7.0)]


def test_the_load_time_follows_from_the_bytes_and_their_store() -> None:
    paces = LoadPaces(1e-10, {"file": 1e-9, "redis": 3e-9})
    assert paces.load_ms(100_000_000, ("redis", "file")) == {"host": 10.0, "redis": 310.0, "file": 110.0}
    assert paces.load_ms(25_000_000, ("file",), num_ranks=4) == {"host": 2.5, "file": 103.0}
    assert paces.load_ms(0, ("file",)) == {"host": 0.0, "file": 0.0}


def test_the_load_time_from_an_unmeasured_store_is_unknown() -> None:
    assert LoadPaces(1e-10, {"file": 1e-9}).load_ms(1_000_000, ("redis",)) == {"host": 0.1, "redis": None}
