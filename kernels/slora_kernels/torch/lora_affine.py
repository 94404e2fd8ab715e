"""Scales and offsets of output columns in plain torch, tile by tile."""

import torch
from torch import Tensor

from slora_kernels.layout import LoraSite
from slora_kernels.torch.lora_matmuls import HostLoraTile, read_rows


def apply_affine(out: Tensor, pages: Tensor, tiles: list[HostLoraTile], site: LoraSite) -> None:
    """See `Kernels.apply_affine`."""
    for tile in tiles:
        span = slice(tile.first, tile.first + tile.tokens)
        start = 0
        for module, width in zip(site.module_ids, site.widths, strict=True):
            is_affine, segment = tile.affine[module][:2]
            if is_affine:
                scales, offsets = read_rows(pages, tile.pages, segment, 2, width, torch.float32)
                columns = out[span, start : start + width]
                columns.copy_(columns.float() * scales + offsets * tile.weight)
            start += width
