"""Adds the adapters' LoRA outputs to the base model's outputs, site by site.

On a GPU, LoRA kernels run in parallel with the base model's matmuls. They read the same input as the matmul beside
them, and do not write to the matmul's output. A decode linear is bound by reading its weights and leaves
multiprocessors idle at its beginning and end. The LoRA kernels have a latency of a few microseconds each, which the
matmul hides. With prefill chunks, the matmul is bound by arithmetic and LoRA by memory, so they also run well in
parallel.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from slora.memory.device_memory import DeviceMemory
from slora_kernels.batch import LoraStep, LoraTiles, TokenRows
from slora_kernels.host_copies import upload
from slora_kernels.layout import LoraSite
from slora_kernels.ops import Kernels, ShrinkOutput
from slora_kernels.torch.token_rows import replace_embeddings, replace_logits

_Result = TypeVar("_Result")

# A delta of more tokens would take too much memory: of Llama-3.1-8B, 1,536 tokens take 120 MB.
_MAX_APART_TOKENS = 1536


class SideStream:
    """A CUDA stream beside the device's current stream, which runs forked work in parallel with later work.

    Each fork is joined before the next fork. Fork and join are CUDA events, so a CUDA graph can record them.

    Memory that the work allocates is freed before the next fork, and that fork waits for the last reader of this
    memory. So the allocator can reuse the memory safely without `record_stream`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._forked, self._done = torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]

    def fork(self, work: Callable[[], _Result]) -> _Result:
        """Launches work that waits for all earlier work and runs in parallel with later work.

        Until `join`, do not read the result of the work, and do not write to its inputs.
        """
        self._forked.record(torch.cuda.current_stream(self._device))
        self._stream.wait_event(self._forked)
        with torch.cuda.stream(self._stream):
            result = work()
        self._done.record(self._stream)
        return result

    def join(self) -> None:
        """Makes all later work wait for the forked work."""
        torch.cuda.current_stream(self._device).wait_event(self._done)


@dataclass(frozen=True, slots=True)
class OwnLogits:
    """Logits of the tokens in `rows` that replace those of the base model's head, for the hidden states at `places`."""

    places: Tensor  # int64 [n].
    rows: TokenRows
    values: Tensor  # [n, rows.count].

    def replace(self, logits: Tensor) -> None:
        """logits: [N, vocab_size], of all hidden states."""
        replace_logits(logits, self.values, self.places, self.rows)


class LoraDeltas:
    """The LoRA work of one step.

    layers: the rows and their adapters. Each layer adds to the result of the layers before it, so the sum of a row's
    adapters has a fixed order. Empty: no row has an adapter.
    side: the stream that runs LoRA kernels in parallel with the base model's matmuls. None: they run after the matmuls.
    """

    def __init__(
        self,
        layers: Iterable[LoraTiles],
        memory: DeviceMemory,
        kernels: Kernels,
        side: SideStream | None = None,
    ) -> None:
        self._memory, self._pages = memory, memory.pages
        self._kernels = kernels
        self._steps = [kernels.prepare_lora(tiles, memory.tables) for tiles in layers]
        self._side = side
        self._writes_apart = side is not None and len(self._steps) == 1
        self._deltas: dict[int, Tensor] = {}

    def compute(self, base: Callable[[], Tensor], x: Tensor, site: LoraSite) -> Tensor:
        """Runs `base`, which reads x, and adds the adapters' outputs to its result. Returns the sum."""
        steps = self._select(site)
        if not steps or self._side is None:
            out = base()
            self.add(out, x, site)
            return out
        shrunk, out = self._run_beside(
            lambda: [self._kernels.shrink(x, self._pages, site, step) for step in steps], base
        )
        for step, rows in zip(steps, shrunk, strict=True):
            self._expand(out, rows, site, step)
        return out

    def compute_apart(
        self, base: Callable[[], Tensor], x: Tensor, site: LoraSite
    ) -> tuple[Tensor, Tensor | None]:
        """Like `compute`, but may return the output of `base` and the delta [T, sum(site.widths)] that is to be added
        to it. The delta is valid until the next site of the same width is computed.

        The whole LoRA work of the site then runs beside `base`. No kernel of its own adds the delta: the kernel that
        reads the output does.
        """
        steps = self._select(site)
        is_affine = any(step.tiles.has_affine for step in steps)
        if not self._writes_apart or is_affine or len(x) > _MAX_APART_TOKENS or not steps:
            return self.compute(base, x, site), None
        delta, out = self._run_beside(lambda: self._write_delta(x, site), base)
        return out, delta

    def _write_delta(self, x: Tensor, site: LoraSite) -> Tensor:
        width, (step,) = sum(site.widths), self._steps
        if width not in self._deltas:
            # Rows without an adapter stay zero in all layers.
            self._deltas[width] = torch.zeros(len(x), width, dtype=x.dtype, device=x.device)
        delta = self._deltas[width]
        shrunk = self._kernels.shrink(x, self._pages, site, step)
        self._kernels.write_delta(delta, shrunk, self._pages, site, step)
        return delta

    def _run_beside(self, work: Callable[[], _Result], base: Callable[[], Tensor]) -> tuple[_Result, Tensor]:
        assert self._side is not None
        result = self._side.fork(work)
        try:
            out = base()
        finally:
            # Join even if `base` fails: the memory of x must not be reused while the shrink still reads it.
            self._side.join()
        return result, out

    def add(self, out: Tensor, x: Tensor, site: LoraSite) -> None:
        """out [T, sum(site.widths)] += scale * (x A^T) B^T. x [T, site.in_width]: the input of the site's linears.

        The columns of `out` are then multiplied by the adapters' scales, and their offsets are added.
        """
        for step in self._select(site):
            shrunk = self._kernels.shrink(x, self._pages, site, step)
            self._expand(out, shrunk, site, step)

    def _expand(self, out: Tensor, shrunk: ShrinkOutput, site: LoraSite, step: LoraStep) -> None:
        self._kernels.expand(out, shrunk, self._pages, site, step)
        if step.tiles.has_affine:
            self._kernels.apply_affine(out, self._pages, site, step)

    def _select(self, site: LoraSite) -> list[LoraStep]:
        """The steps that may have work at this site."""
        return [step for step in self._steps if site.kind < step.tiles.num_groups]

    def add_embedding(
        self, out: Tensor, token_ids: Tensor, site: LoraSite, factor: float | Tensor = 1.0
    ) -> None:
        """out [T, H] += factor * scale * (columns of A for token_ids [T])^T B^T. Then the columns of `out` are scaled.

        factor: the model's scale of embeddings, if `out` is multiplied by it already.
        """
        for step in self._steps:
            shrunk = self._kernels.shrink_embedding(token_ids, self._pages, site, step, out.dtype)
            if isinstance(factor, Tensor) or factor != 1.0:
                delta = torch.zeros_like(out)
                self._kernels.expand(delta, shrunk, self._pages, site, step)
                out += delta * factor
            else:
                self._kernels.expand(out, shrunk, self._pages, site, step)
            if step.tiles.has_affine:
                self._kernels.apply_affine(out, self._pages, site, step)

    def replace_embeddings(self, out: Tensor, token_ids: Tensor, factor: float | Tensor = 1.0) -> None:
        """Overwrites the rows of out [T, H] whose tokens have rows of their own. factor: as in `add_embedding`."""
        for step in self._steps:
            for slot, first, count in step.tiles.runs:
                rows = self._memory.find_rows(slot, 0)
                if rows is not None:
                    span = slice(first, first + count)
                    replace_embeddings(out[span], token_ids[span], rows, factor)

    def multiply_own_rows(self, hidden: Tensor) -> list[OwnLogits]:
        """Multiplies hidden states [N, H] by the rows that their adapters have in place of rows of the head."""
        places: defaultdict[int, list[int]] = defaultdict(list)
        for step in self._steps:
            for slot, first, count in step.tiles.runs:
                places[slot] += range(first, first + count)
        own = []
        for slot, indexes in places.items():
            rows = self._memory.find_rows(slot, 1)
            if rows is not None:
                at = upload(np.array(indexes), hidden.device)
                own.append(OwnLogits(at, rows, self._kernels.token_logits(hidden[at], rows)))
        return own
