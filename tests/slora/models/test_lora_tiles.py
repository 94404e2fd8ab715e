"""How the rows of a step are cut into tiles: by adapter, and by whether a row is the only row of its sequence.

What a step takes from the arrays of the step before is right.
"""

from collections import deque

import numpy as np
import pytest

from slora.core.request import EngineRequest, single_adapter
from slora.core.sampling_params import SamplingParams
from slora.models.step_batch import StepArrays, Tile, cut_token_tiles
from slora.scheduler.step_plan import SampledToken, StepPlan
from slora_kernels.batch import TileLimits
from tests.support.driving import start_engine
from tests.support.model_kit import Kits, ModelKit


def plan_mixed_step(kit: ModelKit) -> StepPlan:
    """A step in which requests of one adapter and of the base decode. New requests of this adapter and of another
    one prefill."""
    engine, versions = start_engine(kit, 300)
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)

    def ask(names: list[str | None], prefix: str, length: int) -> None:
        for number, name in enumerate(names):
            version = versions[name] if name is not None else None
            prompt = list(range(3, 3 + length + number))
            engine.add(EngineRequest(f"{prefix}{number}", "t", prompt, single_adapter(version), params))

    ask(["rslora", None, "rslora", "rslora", "odd_rank"], "early", 5)
    for _ in range(4):
        engine.step()
    ask(["rslora", "rslora", None, "odd_rank"], "late", 2)
    while True:
        plan = engine.scheduler.schedule()
        kinds = {(c.slots, c.num_tokens > 1) for c in plan.chunks if c.slots}
        if len(kinds) == 4:
            return plan
        sampled = engine.runner.run(plan)
        engine.scheduler.advance(plan)
        engine.scheduler.postprocess(plan, sampled)


def rows_of(tiles: list[Tile]) -> dict[int, int]:
    """Maps each row to its slot."""
    found: dict[int, int] = {}
    for tile in tiles:
        for row in range(tile.first_row, tile.first_row + tile.num_rows):
            assert row not in found, "a row is in two tiles"
            found[row] = tile.slot
    return found


@pytest.mark.parametrize("limits", (TileLimits(4, 2), TileLimits(32, 16), TileLimits(4)))
def test_decode_rows_and_chunks_share_no_tile_if_they_have_separate_limits(
    kits: Kits, limits: TileLimits
) -> None:
    chunks = plan_mixed_step(kits("llama")).chunks
    decodes, others, first = {}, {}, 0
    for chunk in chunks:
        kind = decodes if chunk.num_tokens == 1 and limits.decode_tokens is not None else others
        if chunk.slots:
            kind |= {row: chunk.slots[0].slot for row in range(first, first + chunk.num_tokens)}
        first += chunk.num_tokens
    ((tiles, num_decodes, *_),) = cut_token_tiles(chunks, limits)
    assert rows_of(tiles[:num_decodes]) == decodes and rows_of(tiles[num_decodes:]) == others
    assert all(tile.num_rows <= (limits.decode_tokens or 0) for tile in tiles[:num_decodes])
    assert all(tile.num_rows <= limits.tokens for tile in tiles[num_decodes:])
    # The three decode rows of one adapter are adjacent, although the chunks of its prompts were planned later.
    if limits.decode_tokens == 16:
        assert sorted(tile.num_rows for tile in tiles[:num_decodes]) == [1, 3]


@pytest.mark.parametrize("name, overlap", (("llama", 0), ("mistral_window", 1), ("phi3_longrope", 1)))
def test_arrays_that_reuse_those_of_the_step_before_equal_new_ones(
    kits: Kits, name: str, overlap: int
) -> None:
    kit = kits(name)
    engine, versions = start_engine(kit, 26, max_num_seqs=8, max_num_batched_tokens=24)
    runner, scheduler, kinds = engine.runner, engine.scheduler, [None, *sorted(versions)]
    launched: deque[tuple[StepPlan, list[SampledToken]]] = deque()
    last: StepArrays | None = None
    num_layouts = num_tables = 0
    for step in range(70):
        if step % 9 == 0:
            for number in range(2):
                kind = kinds[(step // 9 + number) % len(kinds)]
                params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, n=1 + number)
                adapters = single_adapter(None if kind is None else versions[kind])
                prompt = list(range(3, 9 + step % 7))
                engine.add(EngineRequest(f"{step}/{number}", "t", prompt, adapters, params))
        if step % 13 == 12:
            engine.abort(f"{step // 9 * 9}/0")
        plan = scheduler.schedule(float(step))
        sampled = runner.run(plan)
        if plan.chunks:
            limits, long_rows = TileLimits(8, 4), kit.spec.max_positions
            new = StepArrays.build(plan, runner.memory, limits, long_rows)
            found = StepArrays.build(plan, runner.memory, limits, long_rows, last)
            assert len(found.arrays) == len(new.arrays)
            for array, expected in zip(found.arrays, new.arrays, strict=True):
                assert array.dtype == expected.dtype
                np.testing.assert_array_equal(array, expected)
            assert found.sampling == new.sampling and found.has_pending == new.has_pending
            assert found.max_context_len == new.max_context_len
            num_layouts += last is not None and found.layout is last.layout
            num_tables += last is not None and found.tables is last.tables
            last = found
        scheduler.advance(plan)
        launched.append((plan, sampled))
        while len(launched) > overlap:
            scheduler.postprocess(*launched.popleft())
    assert scheduler.num_preemptions and num_layouts > num_tables > 0, "the test reuses too little"
