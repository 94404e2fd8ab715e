"""Computes the weight of each token relative to the most probable token, in whole multiples of 2**-42.

Weights are whole numbers stored as float32, which takes half the bytes of int64. This is exact, because the integral
part of a float32 is itself a float32. Kernels that sum weights convert them to int64, so no sum is rounded. Logits are
read in place, so the sampled rows need not be gathered first.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slora_kernels.gpu.launch import Launch
from slora_kernels.sampling_tensors import SamplingTensors

# The weight of the most probable token. Sums of 2**20 such weights fit 64 bits. A token that is less than 2**-42 times
# as probable gets weight 0 and is never sampled.
WEIGHT_ONE = 2.0**42
# Tokens per block of `gumbel_sample`. Rows are padded to whole blocks.
SAMPLE_BLOCK = 256
# Tokens per program: four 16-byte loads of float32 per thread.
_BLOCK = 2048


@triton.jit(do_not_specialize=["rows", "temperature"])
def _token_weights_kernel(
    logits,
    max_logits,
    rows,
    temperature,
    weights,
    row_stride,
    VOCAB: tl.constexpr,
    WIDTH: tl.constexpr,
    WEIGHT_ONE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + number)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    numbers = tl.load(logits + row * row_stride + tokens, mask=tokens < VOCAB, other=float("-inf"))
    # The maximum is subtracted before the division, so that a tiny temperature does not overflow.
    below = tl.div_rn(numbers.to(tl.float32) - tl.load(max_logits + row), tl.load(temperature + number))
    shares = tl.exp(below) * WEIGHT_ONE
    # NaN gets weight 0. It occurs only in a row whose maximum is not finite.
    whole = tl.where(shares > 0, tl.floor(shares), 0.0)
    tl.store(weights + number * WIDTH + tokens, whole, mask=tokens < WIDTH)


def bind_token_weights(
    logits: Tensor, max_logits: Tensor, sampling: SamplingTensors
) -> tuple[Launch, Tensor]:
    """Binds the kernel to logits [B, V] and max_logits float32 [B]. Returns the launch and weights float32 [N, V].

    N: rows of `sampling`, each of which names a row of the logits. Each row of weights is padded with zeros to whole
    blocks.
    """
    vocab = logits.shape[1]
    width = -(-vocab // SAMPLE_BLOCK) * SAMPLE_BLOCK
    assert logits.stride(1) == 1, f"logits of stride {logits.stride(1)}"
    weights = torch.empty(len(sampling.rows), width, dtype=torch.float32, device=logits.device)
    return Launch(
        _token_weights_kernel,
        (len(sampling.rows), triton.cdiv(width, _BLOCK)),
        {
            "logits": logits,
            "max_logits": max_logits,
            "rows": sampling.rows,
            "temperature": sampling.temperature,
            "weights": weights,
            "row_stride": logits.stride(0),
        },
        {"VOCAB": vocab, "WIDTH": width, "WEIGHT_ONE": WEIGHT_ONE, "BLOCK": _BLOCK},
    ), weights
