"""Sets logits to minus infinity for the tokens that a grammar does not allow.

One program masks a block of tokens of one row. It reads one bit for each token and writes only the logits that change.
Masking is therefore much cheaper than the sampling kernels, which read all logits.
"""

import triton
import triton.language as tl
from torch import Tensor

from slora_kernels.gpu.launch import Launch

# Tokens per program: 64 words of the mask.
_BLOCK = 2048


@triton.jit(do_not_specialize=["rows"])
def _mask_logits_kernel(
    logits, rows, masks, row_stride, mask_stride, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    number = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + number)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = tokens < VOCAB
    words = tl.load(masks + number * mask_stride + tokens // 32, mask=exists, other=-1)
    is_banned = ((words >> (tokens % 32)) & 1) == 0
    tl.store(logits + row * row_stride + tokens, float("-inf"), mask=exists & is_banned)


def bind_mask_logits(logits: Tensor, rows: Tensor, masks: Tensor) -> Launch:
    """Binds the kernel to logits [B, V], changed in place, rows int64 [N] and masks int32 [N, ceil(V / 32)]."""
    vocab = logits.shape[1]
    assert logits.stride(1) == masks.stride(1) == 1, f"strides {logits.stride(1)} and {masks.stride(1)}"
    return Launch(
        _mask_logits_kernel,
        (len(rows), triton.cdiv(vocab, _BLOCK)),
        {
            "logits": logits,
            "rows": rows,
            "masks": masks,
            "row_stride": logits.stride(0),
            "mask_stride": masks.stride(0),
        },
        {"VOCAB": vocab, "BLOCK": _BLOCK},
    )
