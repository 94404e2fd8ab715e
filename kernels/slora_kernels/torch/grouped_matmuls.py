"""Groups of rows times a weight for each group, in torch: one matmul for each group that has rows.

The host reads the bounds of the groups, so on a GPU this waits for the device.
"""

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from slora_kernels.torch.quantized_matmuls import quantized_linear
from slora_kernels.torch.row_blocks import multiply_rows


def grouped_linear(x: Tensor, weight: Tensor, scales: Tensor | None, starts: Tensor) -> Tensor:
    """x [S, K], weight [E, N, K], scales float32 [E, N] or None, starts int32 [E + 1] -> [S, N] of x's dtype."""

    def multiply(group: int, rows: Tensor) -> Tensor:
        if scales is None:
            if x.device.type == "cpu":
                return multiply_rows(rows, weight[group])
            return F.linear(rows, weight[group])
        return quantized_linear(rows, weight[group], scales[group], None)

    return multiply_groups(x, starts, multiply)


def multiply_groups(x: Tensor, starts: Tensor, multiply: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Calls `multiply(group, rows)` for each group that has rows, and returns the results below each other."""
    bounds = itertools.pairwise(starts.tolist())
    groups = [(group, x[start:end]) for group, (start, end) in enumerate(bounds) if start < end]
    # A step without tokens calls `multiply` once, for an output of the right width.
    return torch.cat([multiply(group, rows) for group, rows in groups or [(0, x)]])
