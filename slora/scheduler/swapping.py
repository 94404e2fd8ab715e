"""Swaps the KV of preempted sequences to the host where this costs less than recomputing it.

This module chooses the pages; the runner copies them. A planned copy takes effect only after its step has run.
"""

from slora.core.cost_model import CostModel
from slora.memory.kv_cache import KVCache
from slora.memory.swap_space import SwapSpace
from slora.scheduler.sequence import Sequence, SwappedBlocks
from slora.scheduler.step_plan import StepPlan


class Swapping:
    """Plans swaps to the host and back.

    way: `auto`, `swap` or `recompute`.
    num_pages_out, num_pages_in: pages swapped since the engine started.
    """

    def __init__(self, space: SwapSpace, kv: KVCache, costs: CostModel, way: str) -> None:
        self.num_pages_out = 0
        self.num_pages_in = 0
        self._space = space
        self._kv = kv
        self._costs = costs
        self._mode = way
        self._swapped_out: list[Sequence] = []  # Sequences that this step swaps out.
        self._swapped_in: list[Sequence] = []
        self._pages_to_free: list[int] = []  # Host pages that become free after this step.

    @property
    def num_pages(self) -> int:
        """Total number of host pages for swapping."""
        return self._space.num_pages

    @property
    def num_used(self) -> int:
        return self._space.num_pages - self._space.num_free

    @property
    def free_pages(self) -> list[int]:
        """The host pages that no sequence uses."""
        return self._space.free_pages

    def swap_out(self, sequence: Sequence, plan: StepPlan) -> None:
        """Plans to copy the sequence's computed KV to the host, if that is cheaper than recomputing and the host has
        room. A recurrent state that has passed the next token to compute is not kept.

        The sequence keeps its pages until the caller releases them.
        """
        if sequence.has_overrun:
            return
        blocks = sequence.blocks
        # Skip pages that were allocated for a chunk that was never computed because the adapter was still loading.
        pages = blocks.filled_pages(sequence.num_computed)
        if not pages or len(pages) > self._space.num_free or not self._is_cheaper(sequence, len(pages)):
            return
        host_pages = self._space.allocate(len(pages))
        plan.swaps_out.extend(zip(pages, host_pages, strict=True))
        sequence.swapped = SwappedBlocks(host_pages, blocks.num_freed, sequence.num_computed)
        self._swapped_out.append(sequence)
        self.num_pages_out += len(pages)

    def swap_in(self, sequence: Sequence, plan: StepPlan) -> None:
        """Plans to copy the KV back into new pages. The caller has made room."""
        swapped, sequence.swapped = sequence.swapped, None
        assert swapped is not None, "the sequence has no KV on the host"
        pages = self._kv.allocate(len(swapped.host_pages), sequence.tenant)
        plan.swaps_in.extend(zip(swapped.host_pages, pages, strict=True))
        sequence.blocks.adopt(swapped.num_freed, pages, self._kv)
        sequence.num_computed = swapped.num_computed
        self._pages_to_free.extend(swapped.host_pages)
        self._swapped_in.append(sequence)
        self.num_pages_in += len(pages)

    def discard(self, sequence: Sequence) -> None:
        """Drops the sequence's KV on the host, if it has any."""
        if sequence.swapped is not None:
            # Freed only after this step, which may still write to these pages.
            self._pages_to_free.extend(sequence.swapped.host_pages)
            sequence.swapped = None

    def finish_step(self) -> None:
        """Ends the step's copies, whether the step ran or was undone, and frees the host pages that are no longer
        needed.
        """
        self._space.release(self._pages_to_free)
        self._swapped_out, self._swapped_in, self._pages_to_free = [], [], []

    def undo_step(self) -> list[Sequence]:
        """Discards the copies of a failed step. Returns the sequences whose KV the step was to copy back.

        Sequences whose KV the step was to swap out must recompute it.
        """
        for sequence in self._swapped_out:
            self.discard(sequence)
        return list(self._swapped_in)

    def check_invariants(self, waiting: list[Sequence]) -> None:
        swapped = [sequence.swapped for sequence in waiting if sequence.swapped is not None]
        self._space.check_invariants(
            [*self._pages_to_free, *(page for sequence in swapped for page in sequence.host_pages)]
        )

    def _is_cheaper(self, sequence: Sequence, num_pages: int) -> bool:
        if self._mode == "auto":
            return self._costs.swap_s(num_pages) < self._costs.prefill_s(sequence.num_computed)
        return self._mode == "swap"
