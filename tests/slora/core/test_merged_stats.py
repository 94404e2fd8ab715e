"""The statistics of several engines together, and which engines may serve together."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from slora.core.engine_state import EngineStats, PageMap, PageOwner
from slora.core.request import EngineRequest
from slora.core.sampling_params import SamplingParams
from tests.support.driving import drive, make_engine, make_source
from tests.support.model_kit import ModelKit


@pytest.fixture(scope="module")
def kit(kits: Callable[[str], ModelKit]) -> ModelKit:
    return kits("llama")


def test_merged_states_are_the_sums_over_the_engines(kit: ModelKit) -> None:
    engines = [make_engine(kit, make_source(kit)[0], 40) for _ in range(2)]
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
    engine = make_engine(kit, make_source(kit)[0], 40)
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
    engine = make_engine(kit, make_source(kit)[0], 40)
    info = engine.info
    engine.close()
    assert info.explain_difference(replace(info, num_pages=9)) is None
    assert replace(info, device="cuda:0").explain_difference(replace(info, device="cuda:1")) is None
    assert info.explain_difference(replace(info, dtype="bfloat16")) == (
        "its dtype is bfloat16, but that of the other replicas is float32"
    )
    assert "its device is cuda:0" in str(info.explain_difference(replace(info, device="cuda:0")))
