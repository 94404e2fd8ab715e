"""The merged statistics and the merged live state of several engines."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from slora.client.merged_states import explain_difference, merge_live_states, merge_stats
from slora.core.engine_state import PageMap, PageOwner
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
        engine.observe(["t"])
        prompts = [[one, 2, 3] for one in range(number)]
        params = SamplingParams(max_tokens=5, ignore_eos=True, seed=1)
        drive(engine, [[EngineRequest(str(one[0]), "t", one, (), params) for one in prompts]])
    stats = [engine.stats() for engine in engines]
    merged = merge_stats(stats)
    assert merged.generated_tokens == 15 and merged.pages_total == 80 and merged.pages_free == 80
    assert merged.usage == stats[0].usage + stats[1].usage
    assert merged.tenants["t"].requests == 3
    assert sum(merged.step_tokens.counts) == sum(sum(one.step_tokens.counts) for one in stats)
    assert merge_stats(stats[:1]) == stats[0]
    live = merge_live_states([engine.observe(["t"]) for engine in engines])
    assert live.num_pages == 80 and live.total.pages == merged.pages
    for engine in engines:
        engine.close()


def test_the_pools_are_drawn_one_after_the_other(kit: ModelKit) -> None:
    engine = make_engine(kit, make_source(kit)[0], 40)
    state, (one, two) = engine.observe([]), (PageOwner("kv", "a"), PageOwner("kv", "b"))
    maps = [
        PageMap(1, np.array([1, 1, 0, 0], np.uint16).tobytes(), (one,)),
        PageMap(1, np.array([1, 1, 2, 2], np.uint16).tobytes(), (two, one)),
    ]
    merged = merge_live_states([replace(state, page_map=drawn) for drawn in maps]).page_map
    assert merged.stride == 2 and merged.owners == (one, two)
    assert np.frombuffer(merged.cells, np.uint16).tolist() == [1, 0, 2, 1]
    engine.close()


def test_an_engine_that_differs_from_the_others_is_named(kit: ModelKit) -> None:
    engine = make_engine(kit, make_source(kit)[0], 40)
    info = engine.info
    engine.close()
    assert explain_difference(info, replace(info, num_pages=9)) is None
    assert explain_difference(replace(info, device="cuda:0"), replace(info, device="cuda:1")) is None
    assert explain_difference(info, replace(info, dtype="bfloat16")) == (
        "its dtype is bfloat16, but that of the other replicas is float32"
    )
    assert "its device is cuda:0" in str(explain_difference(info, replace(info, device="cuda:0")))
