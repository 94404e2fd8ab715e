"""KV of preempted sequences is swapped to the host if that is cheaper and there is room. A broken step's swaps are
discarded."""

from dataclasses import replace

import pytest

from slora.cost_model import CostModel
from slora.pool.eviction_policy import LeastRecentlyUsed
from slora.pool.evictor import Evictor
from slora.pool.kv_cache import KVCache
from slora.pool.page_pool import PagePool
from slora.pool.swap_space import SwapSpace
from slora.pool.tenant import Tenants
from slora.scheduler.sequence import Sequence
from slora.scheduler.step_plan import StepPlan
from slora.scheduler.swapping import Swapping
from tests.support.queueing import BLOCK_TOKENS, make_sequence
from tests.support.scheduler_bench import COSTS


class House:
    """A pool of 20 pages, 6 host pages, and sequences with blocks of 4 tokens."""

    def __init__(self, way: str = "swap", costs: CostModel = COSTS) -> None:
        tenants = Tenants(20)
        self.tenant = tenants.find("a")
        pool = PagePool(20)
        self.kv = KVCache(pool, Evictor(pool, tenants, LeastRecentlyUsed()), BLOCK_TOKENS)
        self.space = SwapSpace(6)
        self.swapping = Swapping(self.space, self.kv, costs, way)

    def compute(self, num_tokens: int, num_reserved: int = 0) -> Sequence:
        """num_reserved: number of additional pages that the sequence holds."""
        sequence = make_sequence(self.tenant, prompt=40)
        num_pages = sequence.blocks.pages_missing(num_tokens) + num_reserved
        sequence.blocks.extend(self.kv.allocate(num_pages, self.tenant))
        sequence.num_computed = num_tokens
        return sequence

    def give_way(self, sequence: Sequence) -> StepPlan:
        plan = StepPlan()
        self.swapping.save(sequence, plan)
        sequence.blocks.release(self.kv)
        sequence.num_computed = 0
        return plan


@pytest.fixture
def house() -> House:
    return House()


def test_what_is_computed_goes_to_the_host_and_comes_back_in_order(house: House) -> None:
    sequence = house.compute(10, num_reserved=2)
    pages = sequence.blocks.held
    plan = house.give_way(sequence)
    assert [page for page, _ in plan.swaps_out] == pages[:3], "what was only reserved is not worth a copy"
    assert (house.swapping.num_used, house.swapping.num_pages_out) == (3, 3)
    house.swapping.settle()
    house.swapping.check([sequence])
    back = StepPlan()
    house.swapping.restore(sequence, back)
    assert [host for host, _ in back.swaps_in] == [host for _, host in plan.swaps_out]
    assert [page for _, page in back.swaps_in] == sequence.blocks.held
    assert sequence.num_computed == 10 and sequence.swapped is None
    house.swapping.settle()
    house.swapping.check([])
    assert (house.swapping.num_used, house.swapping.num_pages_in) == (0, 3)


def test_blocks_behind_a_window_stay_behind(house: House) -> None:
    sequence = house.compute(14, num_reserved=1)
    sequence.blocks.free_before(9, house.kv)
    second_last, last, _ = sequence.blocks.held
    assert [page for page, _ in house.give_way(sequence).swaps_out] == [second_last, last]
    house.swapping.restore(sequence, StepPlan())
    assert (sequence.blocks.num_freed, sequence.blocks.num_pages) == (2, 4)


@pytest.mark.parametrize("num_tokens", [25, 0])
def test_what_has_no_room_on_the_host_or_is_nothing_stays_off_it(house: House, num_tokens: int) -> None:
    sequence = house.compute(num_tokens, num_reserved=1)
    assert not house.give_way(sequence).swaps_out and sequence.swapped is None
    assert house.swapping.num_used == 0


def test_exactly_as_much_as_has_room_goes_there(house: House) -> None:
    assert len(house.give_way(house.compute(24)).swaps_out) == 6
    assert not house.give_way(house.compute(1)).swaps_out


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
def test_it_pays_if_four_copies_cost_less_than_computing_again_unless_one_way_is_forced(
    way: str, page_copy_s: float, is_saved: bool
) -> None:
    house = House(way, replace(COSTS, page_copy_s=page_copy_s))
    assert bool(house.give_way(house.compute(8)).swaps_out) == is_saved


def test_pages_of_the_host_are_not_given_out_again_before_the_step_that_reads_or_writes_them(
    house: House,
) -> None:
    sequence = house.compute(24)
    house.give_way(sequence)
    house.swapping.settle()
    house.swapping.restore(sequence, StepPlan())
    other = house.compute(4)
    assert not house.give_way(other).swaps_out, "its bytes would overwrite what this step brings back"
    house.swapping.settle()
    assert house.give_way(house.compute(4)).swaps_out


def test_who_ends_in_the_step_that_saves_it_frees_its_pages_when_that_has_run(house: House) -> None:
    sequence = house.compute(24)
    house.give_way(sequence)
    house.swapping.drop(sequence)
    house.swapping.drop(sequence)
    house.swapping.check([])
    assert house.space.num_free == 0
    house.swapping.settle()
    assert house.space.num_free == 6


def test_a_step_that_broke_has_saved_and_brought_back_nothing(house: House) -> None:
    before, saved = house.compute(8), house.compute(8)
    house.give_way(before)
    house.swapping.settle()
    house.give_way(saved)
    house.swapping.restore(before, StepPlan())
    assert house.swapping.distrust() == [before]
    assert saved.swapped is None and before.swapped is None
    house.swapping.settle()
    house.swapping.check([])
    assert house.space.num_free == 6 and house.swapping.distrust() == []
