"""How the rows of a step are cut into tiles: by adapter, and by whether a row is the only row of its sequence."""

import pytest

from slora.core.request import EngineRequest, single_adapter
from slora.core.sampling_params import SamplingParams
from slora.models.step_batch import Tile, cut_token_tiles
from slora.scheduler.step_plan import StepPlan
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
