"""A page pool for kernel tests. Adapters and contexts are scattered over its pages; every other byte is NaN."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slora_kernels.batch import AdapterTables, AttentionBatch, KVGeometry, LoraTiles
from slora_kernels.layout import SEGMENT_BYTES, Affine, ModelShape, lay_out_adapter
from slora_kernels.ops import Kernels
from slora_kernels.torch.reference import write_kv

# A result is rounded once to its dtype: by half a unit of 2^-7 or 2^-10, or by a whole unit where the interpreter
# has_filters. Sums of some hundred float32 products of size 1 are off by a few 1e-7 (the square root of their number
# times 6e-8).
UNIT = {torch.float32: 4e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def check_close(actual: Tensor, expected: Tensor, *, units: float = 2.0, size: float = 1.0) -> None:
    """Checks that the error is within `units` roundings of the dtype, relative to the value or to `size`, the size
    of its terms."""
    unit = UNIT[actual.dtype] * units
    torch.testing.assert_close(actual.double(), expected.double(), rtol=unit, atol=unit * size)


@dataclass(frozen=True)
class AdapterScene:
    shape: ModelShape
    dtype: torch.dtype
    pages: Tensor
    tables: AdapterTables


def build_adapters(
    shape: ModelShape,
    dtype: torch.dtype,
    ranks: Sequence[Sequence[int]],
    *,
    block_tokens: int = 16,
    device: str = "cpu",
    seed: int = 0,
    unused: int = 0xFF,
    affine: Collection[int] = (),
) -> AdapterScene:
    """Adapters with `ranks[slot][module]` in scattered pages. All other bytes are `unused`, by default NaN.

    affine: the modules with scales and offsets, in all slots but slot 0.
    """
    random = torch.Generator().manual_seed(seed)
    page_bytes = shape.layer_page_bytes(block_tokens) * shape.num_layers
    kinds = dict.fromkeys(affine, Affine(has_magnitude=True, replaces_bias=False))
    layouts = [lay_out_adapter(shape, adapter, kinds if slot else {}) for slot, adapter in enumerate(ranks)]
    needed = [-(-layout.num_bytes // page_bytes) for layout in layouts]
    pages = torch.full((sum(needed) + 3, page_bytes), unused, dtype=torch.uint8)
    order = torch.randperm(len(pages), generator=random).tolist()
    page_table = torch.zeros(len(ranks), max(*needed, 1), dtype=torch.int32)
    for slot, layout in enumerate(layouts):
        ids = [order.pop() for _ in range(needed[slot])]
        page_table[slot, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        string = torch.full((len(ids) * page_bytes,), unused, dtype=torch.uint8)
        for site in shape.sites:
            rank, segment = layout.groups[site.group].tolist()
            _fill_rows(string, segment, rank, site.in_width, dtype, random)
        for module_id, module in enumerate(shape.modules):
            rank, _, segment = layout.modules[module_id].tolist()
            _fill_rows(string, segment, rank, module.out_width, dtype, random)
            is_affine, segment, *_ = layout.affine[module_id].tolist()
            _fill_rows(string, segment, 2 * is_affine, module.out_width, torch.float32, random)
        pages[ids] = string.view(len(ids), page_bytes)
    tables = AdapterTables(
        page_table.to(device),
        torch.from_numpy(np.stack([layout.groups for layout in layouts])).to(device),
        torch.from_numpy(np.stack([layout.modules for layout in layouts])).to(device),
        (torch.rand(len(ranks), shape.num_modules, generator=random) + 0.5).to(device),
        torch.from_numpy(np.stack([layout.affine for layout in layouts])).to(device),
    )
    return AdapterScene(shape, dtype, pages.to(device), tables)


def _fill_rows(
    string: Tensor, segment: int, rows: int, width: int, dtype: torch.dtype, random: torch.Generator
) -> None:
    row_bytes = -(-width * dtype.itemsize // SEGMENT_BYTES) * SEGMENT_BYTES
    start = segment * SEGMENT_BYTES
    area = string[start : start + rows * row_bytes].view(rows, row_bytes)
    values = torch.randn(rows, width, generator=random) / width**0.5
    area[:, : width * dtype.itemsize] = values.to(dtype).view(torch.uint8)


def build_tiles(runs: Sequence[tuple[int, int, int]], tables: AdapterTables) -> LoraTiles:
    """Builds one tile for each (slot, first token, tokens), with its own weight."""
    device = tables.groups.device
    slots = [slot for slot, _, _ in runs]
    return LoraTiles(
        torch.tensor(runs, dtype=torch.int32, device=device).view(-1, 3),
        torch.linspace(0.5, 1.5, len(runs), device=device),
        int(tables.groups[slots, :, 0].max()) if runs else 0,
        max((tokens for _, _, tokens in runs), default=0),
    )


@dataclass(frozen=True)
class AttentionScene:
    geometry: KVGeometry
    pages: Tensor
    batch: AttentionBatch
    q: Tensor
    layer: int = 1


def build_attention(
    geometry: KVGeometry,
    chunks: Sequence[tuple[int, int]],
    *,
    window: int | None = None,
    device: str = "cpu",
    seed: int = 0,
    unused: int = 0xFF,
) -> AttentionScene:
    """Sequences of (query tokens, context) over scattered pages. KV that no token of a chunk attends to is NaN.

    Blocks that lie wholly behind the window of a chunk's first token are freed. Their block table entries name a page
    of NaN. unused: the byte of what is NaN by default.
    """
    random = torch.Generator().manual_seed(seed)
    needed = [-(-context // geometry.block_tokens) for _, context in chunks]
    num_pages = sum(needed) + 3
    page_bytes = geometry.num_layers * geometry.layout.num_bytes
    pages = torch.full((num_pages, page_bytes), unused, dtype=torch.uint8)
    order = torch.randperm(num_pages, generator=random).tolist()
    block_tables = torch.full((len(chunks), max(needed) + 2), order[0], dtype=torch.int32)
    slots: list[Tensor] = []
    for b, (tokens, context) in enumerate(chunks):
        ids = [order.pop() for _ in range(needed[b])]
        behind = 0 if window is None else max(0, context - tokens + 1 - window)
        gone = behind // geometry.block_tokens
        block_tables[b, gone : len(ids)] = torch.tensor(ids[gone:], dtype=torch.int32)
        places = torch.arange(context)
        own_slots = torch.tensor(ids)[places // geometry.block_tokens] * geometry.block_tokens
        own_slots += places % geometry.block_tokens
        slots.append(own_slots[context - tokens :])
        for layer in range(geometry.num_layers):
            numbers = (2, context - behind, geometry.num_kv_heads, geometry.head_dim)
            k, v = torch.randn(numbers, generator=random).to(geometry.dtype).double()
            write_kv(pages, geometry, layer, own_slots[behind:], k, v)
    starts = np.cumsum([0, *(tokens for tokens, _ in chunks)])
    batch = AttentionBatch(
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.tensor([context for _, context in chunks], dtype=torch.int32, device=device),
        block_tables.to(device),
        torch.cat([torch.arange(context - tokens, context) for tokens, context in chunks]).to(device),
        torch.cat(slots).to(device),
        max(tokens for tokens, _ in chunks),
        max(context for _, context in chunks),
    )
    q = torch.randn(int(starts[-1]), geometry.num_heads, geometry.head_dim, generator=random)
    return AttentionScene(geometry, pages.to(device), batch, q.to(geometry.dtype).to(device))


def write(kernels: Kernels, scene: AttentionScene, k: Tensor, v: Tensor) -> Tensor:
    """Writes k and v [T, Hk, D] of the batch's tokens, without rotation, into a copy of the pages."""
    pages, geometry = scene.pages.clone(), scene.geometry
    q = torch.zeros(len(k), geometry.num_heads, geometry.head_dim, dtype=k.dtype, device=k.device)
    qkv = torch.cat((q, k, v)[: 1 + geometry.num_sides], dim=1).flatten(1)
    step = kernels.prepare_attention(scene.batch)
    kernels.rotate_and_write_kv(qkv, None, pages, geometry, scene.layer, step)
    return pages
