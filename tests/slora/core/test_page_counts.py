"""Counts of pages by owner. `UnifiedPaging.check_invariants` compares them with the pages in every random test."""

from collections.abc import Callable

from slora.core.engine_state import PageCounts
from slora.core.request import EngineRequest, single_adapter
from slora.core.sampling_params import SamplingParams
from slora.engine.engine import Engine
from slora_adapters.version import AdapterVersion
from tests.support.driving import drive, make_engine, make_source
from tests.support.model_kit import ModelKit


def ask(tenant: str, length: int, adapter: AdapterVersion | None = None) -> EngineRequest:
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    return EngineRequest(f"{tenant}{length}", tenant, [7] * length, single_adapter(adapter), params)


def check(engine: Engine, whole: PageCounts, **tenants: PageCounts) -> None:
    engine.check_invariants()
    stats = engine.stats()
    assert stats.pages == whole
    assert stats.tenant_pages == tenants and list(stats.tenant_pages) == list(tenants)


def test_pages_are_counted_by_what_they_hold_and_by_tenant(kits: Callable[[str], ModelKit]) -> None:
    kit = kits("llama")
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
