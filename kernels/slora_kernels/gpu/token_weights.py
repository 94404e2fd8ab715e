"""How likely each token is beside the likeliest, in whole numbers of 2**-42, which nothing rounds any more.

They are kept as float32, in half the bytes of 64-bit integers: the whole part of a float32 is one, too. Whoever sums
turns them into integers. A row's logits are read where they lie, so that rows which draw need not be gathered.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slora_kernels.draws import Draws
from slora_kernels.launch import Launch

# A weight of 1, the likeliest token's. Sums of 2**20 such weights fit 64 bits; what is below 2**-42 is never drawn.
ONE = 2.0**42
# Tokens whose weights race together first (`token_race`): rows are padded to whole blocks.
RACE_BLOCK = 256
# Tokens of a program: four 16-byte loads a thread of float32.
_BLOCK = 2048


@triton.jit
def _token_weights_kernel(
    logits,
    peaks,
    rows,
    temperature,
    weights,
    row_stride,
    VOCAB: tl.constexpr,
    WIDTH: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + number)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    numbers = tl.load(logits + row * row_stride + tokens, mask=tokens < VOCAB, other=float("-inf"))
    # From the peak down: a tiny temperature must not carry logits to infinity.
    below = tl.div_rn(numbers.to(tl.float32) - tl.load(peaks + row), tl.load(temperature + number))
    shares = tl.exp(below) * WHOLE
    # Of a row that is not sound, what is no number weighs nothing.
    whole = tl.where(shares > 0, tl.floor(shares), 0.0)
    tl.store(weights + number * WIDTH + tokens, whole, mask=tokens < WIDTH)


def bind_token_weights(logits: Tensor, peaks: Tensor, draws: Draws) -> tuple[Launch, Tensor]:
    """logits [B, V], peaks float32 [B] -> the launch and weights float32 [N, V padded to whole blocks, with 0]."""
    vocab = logits.shape[1]
    width = -(-vocab // RACE_BLOCK) * RACE_BLOCK
    assert logits.stride(1) == 1, f"logits of stride {logits.stride(1)}"
    weights = torch.empty(len(draws.rows), width, dtype=torch.float32, device=logits.device)
    return Launch(
        _token_weights_kernel,
        (len(draws.rows), triton.cdiv(width, _BLOCK)),
        {
            "logits": logits,
            "peaks": peaks,
            "rows": draws.rows,
            "temperature": draws.temperature,
            "weights": weights,
            "row_stride": logits.stride(0),
        },
        {"VOCAB": vocab, "WIDTH": width, "WHOLE": ONE, "BLOCK": _BLOCK},
    ), weights
