"""Weights packed at load time into the blocks of the CPU's matmul library (oneDNN).

oneDNN also accepts plain rows, but then it packs them in every call. Measured with two AVX-512 cores on the linears of
a 110M model, in ms, plain / packed:

    rows              1             64          512
    bfloat16     8.9 / 5.6    17.2 / 14.5    113 / 91
    float32     18.5 / 8.4     122 / 28      456 / 187

In bfloat16, a row of the output also has the same bits in all batches of at least 2 rows if the weight is packed. In a
batch of one row, the bits may differ if the row has more than 1,024 elements.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# The number of rows of x that the blocks are optimized for. Blocks for many rows also suit one row, but not vice versa.
_ROWS = 512


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A packed weight [out, in]. blocks: its packed form, which is opaque and has as many bytes as the weight."""

    blocks: Tensor

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, in] -> [T, out]: x W^T + b."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.blocks, bias, "none", [], "")
        return out


def pack_weight(weight: Tensor) -> Tensor | PackedWeight:
    """Packs a weight if this machine supports that; otherwise returns it unchanged. The caller drops `weight`."""
    if not _can_pack(weight):
        return weight
    return PackedWeight(torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS))


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
