"""Weights laid out once, when they are loaded, in the blocks that a CPU's matmul library (oneDNN) multiplies by.

It takes plain rows as well, but then brings them into blocks in every call. Measured with two AVX-512 cores on the
linears of a 110M model, ms plain and packed: bfloat16 8.9 / 5.6 for one row, 17.2 / 14.5 for 64, 113 / 91 for 512;
float32 18.5 / 8.4, 122 / 28, 456 / 187. In bfloat16 a row is then the same bits alone and among any number.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# For which number of rows the blocks are cut; those for many serve one as well, those for one do not serve many.
_ROWS = 512


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """blocks: of a weight [out, in], opaque; as many bytes as it had."""

    blocks: Tensor

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, in] -> [T, out]: x W^T + b."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.blocks, bias, "none", [], "")
        return out


def pack_weight(weight: Tensor) -> Tensor | PackedWeight:
    """The same weight, packed where that can be; the caller drops the plain one."""
    if not _can_pack(weight):
        return weight
    return PackedWeight(torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS))


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
