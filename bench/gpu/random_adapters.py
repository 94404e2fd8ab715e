"""Adapters of random numbers in pages, and a step that is divided evenly among them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from slora.models.step_batch import cut_rows, max_rows
from slora_kernels.batch import AdapterTables, LoraTiles, TileLimits
from slora_kernels.layout import AdapterLayout, ModelShape, lay_out_adapter

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class RandomAdapters:
    """Each on all linears, in pages of its own; ranks are given out in turn."""

    pages: Tensor
    tables: AdapterTables
    layouts: list[AdapterLayout]
    max_group_rank: int

    @staticmethod
    def make(
        shape: ModelShape, dtype: torch.dtype, ranks: tuple[int, ...], count: int, device: torch.device
    ) -> "RandomAdapters":
        linears = shape.num_modules - 2
        layouts = [lay_out_adapter(shape, [rank] * linears + [0, 0]) for rank in ranks]
        page_bytes = shape.layer_page_bytes(BLOCK_TOKENS) * shape.num_layers
        most_pages = max(-(-layout.num_bytes // page_bytes) for layout in layouts)
        pages = torch.empty(count * most_pages, page_bytes, dtype=torch.uint8, device=device)
        pages.view(dtype).normal_(std=0.02)
        order = torch.randperm(len(pages), generator=torch.Generator().manual_seed(0))
        mine = [layouts[slot % len(layouts)] for slot in range(count)]
        tables = AdapterTables(
            order.int().view(count, most_pages).to(device),
            torch.stack([torch.from_numpy(layout.groups) for layout in mine]).to(device),
            torch.stack([torch.from_numpy(layout.modules) for layout in mine]).to(device),
            torch.ones(count, shape.num_modules, device=device),
            torch.stack([torch.from_numpy(layout.affine) for layout in mine]).to(device),
        )
        return RandomAdapters(pages, tables, layouts, max(layout.targets.max_group_rank for layout in mine))


def cut_evenly(
    num_tokens: int,
    num_adapters: int,
    limits: TileLimits,
    max_group_rank: int,
    device: torch.device,
    *,
    only_decodes: bool,
) -> LoraTiles:
    """only_decodes: each token is its sequence's only one."""
    decode_tokens = limits.decode_tokens if only_decodes else None
    first, tiles = 0, []
    for slot in range(num_adapters):
        count = len(range(slot, num_tokens, num_adapters))
        cut = cut_rows((slot, 1.0), count, decode_tokens or limits.tokens)
        tiles += [tile._replace(first_row=first + tile.first_row) for tile in cut]
        first += count
    rows = torch.tensor([tile[:3] for tile in tiles], dtype=torch.int32, device=device)
    weights = torch.ones(len(tiles), device=device)
    return LoraTiles(rows, weights, max_group_rank, max_rows(tiles), len(tiles) if decode_tokens else 0)
