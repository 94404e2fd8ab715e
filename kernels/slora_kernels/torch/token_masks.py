"""Applies bit masks of tokens to logits in plain torch, for implementations without a kernel of their own."""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor


def mask_logits(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """See `Kernels.mask_logits`.

    A table maps each byte of a mask to eight offsets, 0 or minus infinity, which are added to the logits. On a CPU this
    takes a tenth of the time of `masked_fill_`.
    """
    offsets = F.embedding(masks.view(torch.uint8).int(), _make_offsets(logits.dtype, logits.device))
    offsets = offsets.flatten(1)[:, : logits.shape[1]]
    if len(rows) == len(logits):  # the rows are distinct and ascending, so these are all rows
        logits.add_(offsets)
    else:
        logits[rows] = logits[rows] + offsets


@cache
def _make_offsets(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns [256, 8]: for each byte of a mask, the offsets that are added to the logits of its eight tokens."""
    bits = torch.arange(256)[:, None] >> torch.arange(8)
    return torch.where(bits & 1 == 1, 0.0, -torch.inf).to(device, dtype)
