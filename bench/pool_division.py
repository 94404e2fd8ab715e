"""One pool for KV and adapters beside other ways to divide the same memory: how much runs at once, how much is real.

The production scheduler runs in the simulation; the others in a plain serving loop that knows sizes only. "One pool,
plain loop" is there to show that the loop does what production does when it is given the same memory and the same
rules: first come first served, recompute, an adapter loaded in one step.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from bench.memory_layouts import (
    AdapterShelf,
    Budget,
    ContiguousLayout,
    Layout,
    PagedLayout,
    reserve_max,
    reserve_oracle,
    reserve_pow2,
)
from bench.serving_loop import LoopResult, ServingLoop
from bench.simulation.machine import Machine
from bench.simulation.simulation import Policies, PoolMeter, Setup, Simulation
from bench.simulation.traces import S2, Setting, Trace, merge, slora_trace
from bench.table import Row

WARM_UP_S = 30.0
MAX_NUM_SEQS = 256
MAX_BATCHED_TOKENS = 2048
PLAIN = Policies(scheduling="fcfs", preemption="recompute", prefix_cache="off")


@dataclass(frozen=True, slots=True)
class Division:
    """A machine, a trace, and how large the trace's adapters are there, in tokens of KV."""

    machine: Machine
    setting: Setting
    trace: Trace

    @property
    def pool_tokens(self) -> int:
        return self.machine.num_pages * self.machine.block_tokens

    def real_size(self, adapter: int) -> int:
        rank = self.setting.ranks[adapter % len(self.setting.ranks)]
        return self.machine.adapter_layout(rank).num_bytes // self.machine.token_bytes

    def sizes(self) -> Callable[[int], int]:
        known = [self.real_size(index) for index in range(len(self.setting.ranks))]
        return lambda adapter: known[adapter % len(known)]

    def paged_sizes(self) -> Callable[[int], int]:
        block, real = self.machine.block_tokens, self.sizes()
        return lambda adapter: -(-real(adapter) // block) * block

    def run(self, layout: Layout) -> LoopResult:
        loop = ServingLoop(
            self.machine,
            layout,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
            warm_up_s=WARM_UP_S,
        )
        return loop.run(self.trace)


def shifting_trace(num_adapters: int, rate: float, duration_s: float) -> Trace:
    """S2's requests, but in every other quarter nearly all of them want few adapters: alpha 1 and 0.1 in turn."""
    spread = slora_trace(num_adapters, rate, duration_s)
    narrow = slora_trace(num_adapters, rate, duration_s, alpha=0.1)
    quarter = duration_s / 4
    return merge(
        [request for request in spread if request.arrival_s // quarter % 2 == 0],
        [replace(r, tenant=0) for r in narrow if r.arrival_s // quarter % 2 == 1],
    )


def compare(division: Division, step_tokens: int) -> list[Row]:
    """Every way to divide the memory, each at its best static split of those that are multiples of `step_tokens`."""
    rows = [
        _production("one pool (production)", division, Policies(), None),
        # What the plain loop does, by the production scheduler.
        _production("one pool, fcfs, loads at once", division, PLAIN, division.machine.num_pages),
    ]
    rows += [_row(name, split, division.run(layout)) for name, split, layout in _unsplit(division)]
    for name, candidates in _families(division, step_tokens).items():
        results = [(split, division.run(layout)) for split, layout in candidates]
        split, best = max(results, key=lambda result: result[1].running)
        rows.append(_row(name, split, best))
    ours = rows[0]["running at once"]
    return [{**row, "ours is x": ours / row["running at once"]} for row in rows]


def _production(name: str, division: Division, policies: Policies, load_pages: int | None) -> Row:
    meter = PoolMeter(WARM_UP_S)
    setup = Setup(
        division.machine,
        division.setting.ranks,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_BATCHED_TOKENS,
        load_pages=load_pages,
        policies=policies,
    )
    simulation = Simulation(setup, [meter])
    results, use = simulation.run(division.trace), meter.result()
    return {
        "memory": name,
        "adapter part": None,
        "running at once": use.running,
        "useful of taken %": 100 * use.useful_share,
        "useful of all %": 100 * use.useful_share * use.held_share,
        "requests/s": results.requests_per_s,
        "preemptions": simulation.scheduler.num_preemptions,
    }


def _unsplit(division: Division) -> Iterator[tuple[str, int | None, Layout]]:
    pool = Budget(division.pool_tokens)
    shelf = AdapterShelf(pool, division.paged_sizes(), division.sizes())
    yield (
        "one pool, plain loop",
        None,
        PagedLayout(pool, shelf, division.machine.block_tokens, is_one_pool=True),
    )


def _families(division: Division, step_tokens: int) -> dict[str, list[tuple[int, Layout]]]:
    """By name: for each part that may be set aside for adapters, the layout. Every one holds the largest adapter."""
    real, paged = division.sizes(), division.paged_sizes()
    largest = max(paged(index) for index in range(len(division.setting.ranks)))
    parts = range(-(-largest // step_tokens) * step_tokens, division.pool_tokens // 2, step_tokens)
    by_hand = division.pool_tokens * 5500 // 14500
    slots = range(largest, division.pool_tokens // 2, largest)
    families: dict[str, list[tuple[int, Layout]]] = {
        # What S-LoRA cut by hand for its own comparison: 9,000 of 14,500 tokens are left to KV.
        "S-LoRA's split by hand, exact pages": [(by_hand, _split(division, by_hand, paged))],
        "best static split, exact pages": [(p, _split(division, p, paged)) for p in parts],
        "best slots of the maximum rank": [(p, _split(division, p, lambda adapter: largest)) for p in slots],
    }
    for name, reserve in (("Max", reserve_max), ("Pow2", reserve_pow2), ("Oracle", reserve_oracle)):
        families[f"contiguous, Orca ({name})"] = [
            (p, ContiguousLayout(division.pool_tokens - p, AdapterShelf(Budget(p), paged, real), reserve))
            for p in parts[::2]
        ]
    return families


def _split(division: Division, part: int, size: Callable[[int], int]) -> PagedLayout:
    shelf = AdapterShelf(Budget(part), size, division.sizes())
    return PagedLayout(Budget(division.pool_tokens - part), shelf, division.machine.block_tokens)


def _row(name: str, split: int | None, result: LoopResult) -> Row:
    return {
        "memory": name,
        "adapter part": split,
        "running at once": result.running,
        "useful of taken %": 100 * result.useful_of_taken,
        "useful of all %": 100 * result.useful_of_all,
        "requests/s": result.requests_per_s,
        "preemptions": result.preemptions,
    }


def s2_division(machine: Machine, num_adapters: int, rate: float, duration_s: float) -> Division:
    return Division(machine, S2, slora_trace(num_adapters, rate, duration_s))
