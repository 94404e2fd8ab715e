"""KV of preempted sequences is swapped to the host if that is cheaper and there is room. A broken step's swaps are
discarded."""

from dataclasses import replace

import pytest

from slora.core.cost_model import CostModel
from slora.memory.evictor import Evictor
from slora.memory.kv_cache import KVCache
from slora.memory.page_pool import PagePool
from slora.memory.swap_space import SwapSpace
from slora.memory.tenant_account import TenantAccounts
from slora.scheduler.sequence import Sequence
from slora.scheduler.step_plan import StepPlan
from slora.scheduler.swapping import Swapping
from tests.support.queueing import make_sequence
from tests.support.scheduler_bench import COSTS


class Setup:
    """A pool of 20 pages, 6 host pages, and sequences with blocks of 4 tokens."""

    def __init__(self, way: str = "swap", costs: CostModel = COSTS) -> None:
        tenants = TenantAccounts(20)
        self.tenant = tenants.find("a")
        pool = PagePool(20)
        self.kv = KVCache(pool, Evictor(pool, tenants))
        self.space = SwapSpace(6)
        self.swapping = Swapping(self.space, self.kv, costs, way)

    def compute(self, num_tokens: int, num_reserved: int = 0) -> Sequence:
        """num_reserved: number of additional pages that the sequence holds."""
        sequence = make_sequence(self.tenant, prompt=40)
        num_pages = sequence.blocks.pages_missing(num_tokens) + num_reserved
        sequence.blocks.allocate(num_pages, self.tenant, self.kv)
        sequence.num_computed = num_tokens
        return sequence

    def give_way(self, sequence: Sequence) -> StepPlan:
        plan = StepPlan()
        self.swapping.swap_out(sequence, plan)
        sequence.blocks.release(self.kv)
        sequence.num_computed = 0
        return plan


@pytest.fixture
def setup() -> Setup:
    return Setup()


def test_computed_pages_are_swapped_out_and_in_in_order(setup: Setup) -> None:
    sequence = setup.compute(10, num_reserved=2)
    pages = sequence.blocks.held_pages
    plan = setup.give_way(sequence)
    assert [page for page, _ in plan.swaps_out] == pages[:3], "what was only reserved is not worth a copy"
    assert (setup.swapping.num_used, setup.swapping.num_pages_out) == (3, 3)
    setup.swapping.finish_step()
    setup.swapping.check_invariants([sequence])
    back = StepPlan()
    setup.swapping.swap_in(sequence, back)
    assert [host for host, _ in back.swaps_in] == [host for _, host in plan.swaps_out]
    assert [page for _, page in back.swaps_in] == sequence.blocks.held_pages
    assert sequence.num_computed == 10 and sequence.swapped is None
    setup.swapping.finish_step()
    setup.swapping.check_invariants([])
    assert (setup.swapping.num_used, setup.swapping.num_pages_in) == (0, 3)


def test_blocks_behind_the_window_are_not_swapped(setup: Setup) -> None:
    sequence = setup.compute(14, num_reserved=1)
    sequence.blocks.free_before(9, setup.kv)
    second_last, last, _ = sequence.blocks.held_pages
    assert [page for page, _ in setup.give_way(sequence).swaps_out] == [second_last, last]
    setup.swapping.swap_in(sequence, StepPlan())
    assert (sequence.blocks.num_freed, sequence.blocks.num_pages) == (2, 4)


@pytest.mark.parametrize("num_tokens", [25, 0])
def test_empty_and_too_large_sequences_are_not_swapped(setup: Setup, num_tokens: int) -> None:
    sequence = setup.compute(num_tokens, num_reserved=1)
    assert not setup.give_way(sequence).swaps_out and sequence.swapped is None
    assert setup.swapping.num_used == 0


def test_a_sequence_that_exactly_fits_the_swap_space_is_swapped(setup: Setup) -> None:
    assert len(setup.give_way(setup.compute(24)).swaps_out) == 6
    assert not setup.give_way(setup.compute(1)).swaps_out


@pytest.mark.parametrize(
    ("way", "page_copy_s", "is_saved"),
    [
        # Recomputing 8 tokens takes 8 ms. Their 2 pages are copied four times.
        ("auto", 0.0019, True),
        ("auto", 0.0021, False),
        ("swap", 100.0, True),
        ("recompute", 0.0, False),
    ],
)
def test_a_sequence_is_swapped_if_copying_is_cheaper_unless_the_setting_decides(
    way: str, page_copy_s: float, is_saved: bool
) -> None:
    setup = Setup(way, replace(COSTS, page_copy_s=page_copy_s))
    assert bool(setup.give_way(setup.compute(8)).swaps_out) == is_saved


def test_host_pages_are_not_reused_before_the_step_that_accesses_them(setup: Setup) -> None:
    sequence = setup.compute(24)
    setup.give_way(sequence)
    setup.swapping.finish_step()
    setup.swapping.swap_in(sequence, StepPlan())
    other = setup.compute(4)
    assert not setup.give_way(other).swaps_out, "its bytes would overwrite what this step brings back"
    setup.swapping.finish_step()
    assert setup.give_way(setup.compute(4)).swaps_out


def test_discarding_a_sequence_during_its_swap_frees_its_pages_after_the_step(setup: Setup) -> None:
    sequence = setup.compute(24)
    setup.give_way(sequence)
    setup.swapping.discard(sequence)
    setup.swapping.discard(sequence)
    setup.swapping.check_invariants([])
    assert setup.space.num_free == 0
    setup.swapping.finish_step()
    assert setup.space.num_free == 6


def test_undoing_a_step_undoes_its_swaps(setup: Setup) -> None:
    before, saved = setup.compute(8), setup.compute(8)
    setup.give_way(before)
    setup.swapping.finish_step()
    setup.give_way(saved)
    setup.swapping.swap_in(before, StepPlan())
    assert setup.swapping.undo_step() == [before]
    assert saved.swapped is None and before.swapped is None
    setup.swapping.finish_step()
    setup.swapping.check_invariants([])
    assert setup.space.num_free == 6 and setup.swapping.undo_step() == []
