"""Adds the adapters' LoRA outputs to the base model's outputs, site by site.

On a GPU, LoRA kernels run in parallel with the base model's matmuls. They read the same input as the matmul beside
them, and do not write to the matmul's output. A decode linear is bound by reading its weights and leaves
multiprocessors idle at its beginning and end. The LoRA kernels have a latency of a few microseconds each, which the
matmul hides. With prefill chunks, the matmul is bound by arithmetic and LoRA by memory, so they also run well in
parallel.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from slora.memory.device_memory import DeviceMemory
from slora_kernels.batch import AdapterTables, LoraStep, LoraTiles, TokenRows
from slora_kernels.host_copies import upload
from slora_kernels.layout import MAX_ADDED_ROWS, SEGMENT_BYTES, LoraSite
from slora_kernels.ops import Kernels, ShrinkOutput
from slora_kernels.torch.lora_matmuls import HostLoraTile, plan_tiles
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
        """logits: as `widen_logits` returns them, of all hidden states."""
        replace_logits(logits, self.values, self.places, self.rows)


def widen_logits(logits: Tensor, own: Sequence[OwnLogits]) -> Tensor:
    """Returns logits [N, vocab_size] with MAX_ADDED_ROWS more columns, if an adapter has added tokens."""
    has_added = any(part.rows.num_added for part in own)
    return F.pad(logits, (0, MAX_ADDED_ROWS)) if has_added else logits


def hide_absent(logits: Tensor, own: Sequence[OwnLogits]) -> None:
    """Sets the logits of added tokens to minus infinity in the rows whose adapter does not have them.

    logits: as `widen_logits` returns them, after all scales and softcaps.
    """
    added = [part for part in own if part.rows.num_added]
    if not added:
        return
    is_absent = torch.ones(len(logits), MAX_ADDED_ROWS, dtype=torch.bool, device=logits.device)
    for part in added:
        is_absent[part.places, : part.rows.num_added] = False
    logits[:, -MAX_ADDED_ROWS:].masked_fill_(is_absent, -torch.inf)


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
        self.kernels = kernels
        self._steps = [kernels.prepare_lora(tiles, memory.tables) for tiles in layers]
        self._side = side
        self._writes_apart = side is not None and len(self._steps) == 1
        self._deltas: dict[int, Tensor] = {}
        # For each layer of `_steps`, the tile of each token. Only experts need it.
        self._tile_of_token: dict[int, Tensor] = {}
        # For each layer of `_steps`, the modules that its adapters change, and its tiles. Only `find_tiles` needs them.
        self._changed: dict[int, set[int]] = {}
        self._host_tiles: dict[int, list[HostLoraTile]] = {}
        # The rows of adapters that have norms of their own, as (slot, rows).
        self.norm_runs = [
            (slot, slice(first, first + count))
            for step in self._steps
            for slot, first, count in step.tiles.runs
            if memory.has_norms(slot)
        ]

    @property
    def pages(self) -> Tensor:
        """The pool, which holds the adapters of `find_tiles`."""
        return self._pages

    @property
    def has_layers(self) -> bool:
        return bool(self._steps)

    def route(
        self, starts: Tensor, token_of_row: Tensor, num_tokens: int, sites: Sequence[LoraSite]
    ) -> "ExpertDeltas":
        """The LoRA work at the experts of a layer.

        Expert e computes the rows from `starts[e]` to `starts[e + 1]`. Each row is for one of the step's tokens
        (`token_of_row`), which are in ascending order for each expert. sites: those of the experts' linears.
        """
        memory, kernels = self._memory, self.kernels
        routed = []
        for index, step in enumerate(self._steps):
            used = [site for site in sites if site.kind < step.tiles.num_groups]
            if used:
                if index not in self._tile_of_token:
                    self._tile_of_token[index] = _find_tile_of_token(step.tiles, num_tokens)
                tile_of_row = self._tile_of_token[index][token_of_row]
                expert_tiles = _split_by_expert(step.tiles, tile_of_row, starts)
                element_bytes = memory.geometry.dtype.itemsize
                tables = expert_tiles.point(step.tables, used, element_bytes, memory.full_page_bytes)
                routed += [
                    (site.kind, kernels.prepare_lora(expert_tiles.tiles, table))
                    for site, table in zip(used, tables, strict=True)
                ]
        return ExpertDeltas(routed, memory, kernels)

    def find_tiles(self, site: LoraSite) -> list[list[HostLoraTile]]:
        """For each layer of the work, the tiles whose adapters change the output of the site's linears, if any do."""
        found = []
        for index, step in enumerate(self._steps):
            if index not in self._changed:
                slots, tables = step.tiles.tiles[:, 0].long(), step.tables
                is_changed = tables.modules[slots, :, 0] | tables.affine[slots, :, 0]
                self._changed[index] = set(is_changed.any(0).nonzero()[:, 0].tolist())
            if not self._changed[index].isdisjoint(site.module_ids):
                if index not in self._host_tiles:
                    self._host_tiles[index] = plan_tiles(step.tiles, step.tables)
                found.append(self._host_tiles[index])
        return found

    def compute(self, base: Callable[[], Tensor], x: Tensor, site: LoraSite) -> Tensor:
        """Runs `base`, which reads x, and adds the adapters' outputs to its result. Returns the sum."""
        steps = self._select(site)
        if not steps or self._side is None:
            out = base()
            self.add(out, x, site)
            return out
        shrunk, out = self._run_beside(
            lambda: [self.kernels.shrink(x, self._pages, site, step) for step in steps], base
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
        shrunk = self.kernels.shrink(x, self._pages, site, step)
        self.kernels.write_delta(delta, shrunk, self._pages, site, step)
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
            shrunk = self.kernels.shrink(x, self._pages, site, step)
            self._expand(out, shrunk, site, step)

    def _expand(self, out: Tensor, shrunk: ShrinkOutput, site: LoraSite, step: LoraStep) -> None:
        self.kernels.expand(out, shrunk, self._pages, site, step)
        if step.tiles.has_affine:
            self.kernels.apply_affine(out, self._pages, site, step)

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
            shrunk = self.kernels.shrink_embedding(token_ids, self._pages, site, step, out.dtype)
            if isinstance(factor, Tensor) or factor != 1.0:
                delta = torch.zeros_like(out)
                self.kernels.expand(delta, shrunk, self._pages, site, step)
                out += delta * factor
            else:
                self.kernels.expand(out, shrunk, self._pages, site, step)
            if step.tiles.has_affine:
                self.kernels.apply_affine(out, self._pages, site, step)

    def replace_embeddings(self, out: Tensor, token_ids: Tensor, factor: float | Tensor = 1.0) -> None:
        """Overwrites the rows of out [T, H] whose tokens have rows of their own. factor: as in `add_embedding`."""
        for step in self._steps:
            for slot, first, count in step.tiles.runs:
                rows = self._memory.find_rows(slot, 0)
                if rows is not None:
                    span = slice(first, first + count)
                    replace_embeddings(out[span], token_ids[span], rows, factor)

    def find_norms(
        self, norm_id: int, width: int, *, has_bias: bool = False
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yields the rows of the step that have a weight of their own for a norm, and the weight; see
        `DeviceMemory.find_norm`.
        """
        for slot, rows in self.norm_runs:
            weight = self._memory.find_norm(slot, norm_id, width, has_bias=has_bias)
            if weight is not None:
                yield rows, weight

    def replace_norm(self, out: Tensor, x: Tensor, norm_id: int, eps: float) -> None:
        """Overwrites the rows of out [T, H], the RMS norm of x [T, H], that have a weight of their own."""
        for rows, weight in self.find_norms(norm_id, x.shape[1]):
            out[rows] = self.kernels.rms_norm(x[rows], weight[0], eps)

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
                own.append(OwnLogits(at, rows, self.kernels.token_logits(hidden[at], rows)))
        return own


class ExpertDeltas:
    """The LoRA work of one step at the two linears of one layer's experts.

    Each expert has its own factors. An adapter at an expert is therefore like another adapter, whose few pages are a
    part of the adapter's. So the kernels need to know nothing of experts.
    """

    def __init__(self, steps: list[tuple[int, LoraStep]], memory: DeviceMemory, kernels: Kernels) -> None:
        """steps: for each of them, the kind of the site (`LoraSite.kind`), and tiles with tables of one module."""
        self._steps = steps
        self._pages = memory.pages
        self._kernels = kernels

    def add(self, out: Tensor, x: Tensor, site: LoraSite) -> None:
        """out [S, out width] += scale * (x A^T) B^T, with the factors of each row's expert. x: [S, site.in_width]."""
        alone = LoraSite(0, site.kind, 0, site.in_width, site.widths)
        for kind, step in self._steps:
            if kind == site.kind:
                shrunk = self._kernels.shrink(x, self._pages, alone, step)
                self._kernels.expand(out, shrunk, self._pages, alone, step)


@dataclass(frozen=True, slots=True)
class _ExpertTiles:
    """Rows of experts that one tile's adapter changes: for each tile, its rows at each expert that has some of them.

    tiles: tile i has the slot i, which stands for the adapter in `slots` of the expert in `experts` (int64).
    """

    tiles: LoraTiles
    slots: Tensor
    experts: Tensor

    def point(
        self, tables: AdapterTables, sites: Sequence[LoraSite], element_bytes: int, page_bytes: int
    ) -> list[AdapterTables]:
        """Returns tables with one module for each site, in which a slot has the pages of an adapter at an expert.

        sites: linears of the same experts, one after the other in the tables.
        """
        count, group, module = len(sites), sites[0].group, sites[0].first_module
        widths = [(site.in_width, *site.widths) for site in sites]
        row_segments = [[-(-width * element_bytes // SEGMENT_BYTES) for width in pair] for pair in widths]
        page_segments = page_bytes // SEGMENT_BYTES
        ranks, first_a = tables.groups[self.slots, group : group + count].unbind(2)
        modules = tables.modules[self.slots, module : module + count]
        # For each site, A and transposed B: int32 [tiles, sites, 2].
        first = torch.stack((first_a, modules[:, :, 2]), dim=2)
        rows_before = self.experts.to(first.dtype)[:, None] * ranks
        for index, segments in enumerate(row_segments):
            for factor, number in enumerate(segments):
                first[:, index, factor] += rows_before[:, index] * number
        # An adapter may end before the last of these pages, and then no row lies there.
        num_pages = -(-self.tiles.max_group_rank * max(map(max, row_segments)) // page_segments) + 1
        indexes = (first // page_segments)[..., None] + torch.arange(num_pages, device=first.device)
        most = tables.page_table.shape[1] - 1
        page_ids = tables.page_table[self.slots[:, None, None, None], indexes.clamp_(max=most)].flatten(2)
        first %= page_segments
        first[:, :, 1] += num_pages * page_segments
        scales, zeros = tables.scales[self.slots, module : module + count], torch.zeros_like(ranks)
        new_groups = torch.stack((ranks, first[:, :, 0]), dim=2)
        new_modules = torch.stack((ranks, zeros, first[:, :, 1]), dim=2)
        affine = ranks.new_zeros(len(ranks), 1, 4)
        return [
            AdapterTables(
                page_ids[:, index].contiguous(),
                new_groups[:, index, None].contiguous(),
                new_modules[:, index, None].contiguous(),
                scales[:, index, None].contiguous(),
                affine,
            )
            for index in range(len(sites))
        ]


def _find_tile_of_token(tiles: LoraTiles, num_tokens: int) -> Tensor:
    """The index of each token's tile, int64 [num_tokens]; -1 if it is in no tile."""
    first, count = tiles.tiles[:, 1, None], tiles.tiles[:, 2, None]
    tokens = torch.arange(num_tokens, device=first.device)
    is_inside = (tokens >= first) & (tokens < first + count)
    # The greatest index of a tile that contains the token, because empty tiles contain none.
    numbers = torch.arange(1, len(tiles.tiles) + 1, device=first.device)[:, None]
    return (is_inside * numbers).amax(0) - 1


def _split_by_expert(tiles: LoraTiles, tile_of_row: Tensor, starts: Tensor) -> _ExpertTiles:
    """Cuts the rows of all experts into tiles, of one expert and one tile of tokens each.

    On a GPU nothing is read by the host, so the number of tiles is an upper bound, and the last ones are empty. Tiles
    of decode rows come first.
    """
    device, num_rows, num_experts = tile_of_row.device, len(tile_of_row), len(starts) - 1
    rows = torch.arange(num_rows, device=device)
    expert_of_row = torch.searchsorted(starts[1:], rows, right=True)
    # The rows of an expert are in the order of the tokens, and the tokens of a tile follow one another.
    differs = (expert_of_row.diff() != 0) | (tile_of_row.diff() != 0)
    begins = torch.cat((differs.new_ones(1), differs)) & (tile_of_row >= 0)
    num_decodes, num_tiles = tiles.num_decodes, len(tiles.tiles)
    most_decodes = min(num_rows, num_decodes * num_experts)
    most = most_decodes + min(num_rows, (num_tiles - num_decodes) * num_experts)
    is_decode = tile_of_row < num_decodes
    if device.type == "cpu" and not num_decodes:
        most = int(begins.sum())
    place = torch.where(
        is_decode,
        (begins & is_decode).cumsum(0) - 1,
        most_decodes + (begins & ~is_decode).cumsum(0) - 1,
    )
    # The rows of no adapter count in one more place, which is dropped.
    first_place = torch.where(begins, place, most)
    found = torch.zeros(4, most + 1, dtype=torch.int64, device=device)
    found.scatter_(1, first_place.expand(3, -1), torch.stack((rows, tile_of_row, expert_of_row)))
    found[3].scatter_add_(0, torch.where(tile_of_row >= 0, place, most), torch.ones_like(rows))
    first, tile, experts, count = found[:, :most]
    numbers = torch.arange(most, device=device)
    routed = LoraTiles(
        torch.stack((numbers, first, count), dim=1).int(),
        tiles.weights[tile],
        tiles.max_group_rank,
        tiles.max_tokens,
        most_decodes,
    )
    return _ExpertTiles(routed, tiles.tiles[tile, 0].long(), experts)
