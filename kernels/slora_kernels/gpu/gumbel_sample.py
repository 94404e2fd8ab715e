"""Samples one token of each row by its weights with the Gumbel-max trick, as `token_sampling` describes it.

One program handles one row. It first samples a block of tokens, with the sums of the blocks as weights, and then a
token of that block. Weights are integers, so a block's sum is exact in any order of addition. The result therefore
depends neither on the batch nor on `_BLOCKS` and `_WARPS`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slora_kernels.gpu.launch import Launch
from slora_kernels.gpu.token_weights import SAMPLE_BLOCK
from slora_kernels.sampling_tensors import SamplingTensors

# Number of blocks that a program reads at once. Together they are 32 KB, as in `token_cutoffs`.
_BLOCKS = 32
_WARPS = 16


@triton.jit
def _gumbel_scores(weights, key, numbers):
    """weight / E of each entry, float64. E is -log(u), with u as in `token_sampling._uniform`."""
    state = key + numbers.to(tl.uint64) * 0x9E3779B97F4A7C15
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    state = state ^ (state >> 31)
    uniform = ((state >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return weights.to(tl.float64) / -tl.log(uniform)


@triton.jit(do_not_specialize=["keys"])
def _gumbel_sample_kernel(
    weights,
    cutoffs,
    keys,
    tokens,
    HAS_CUTOFFS: tl.constexpr,
    VOCAB: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    source = weights + row * WIDTH
    key = tl.load(keys + row).to(tl.uint64, bitcast=True)
    least = 0.0
    if HAS_CUTOFFS:
        least = tl.load(cutoffs + row)
    places = tl.arange(0, BLOCK)
    best = tl.full([], -1.0, tl.float64)
    winner = 0
    for first in range(0, WIDTH // BLOCK, NUM):
        blocks = first + tl.arange(0, NUM)
        inside = blocks < WIDTH // BLOCK
        ids = blocks[:, None] * BLOCK + places[None, :]
        kept = tl.load(source + ids, mask=inside[:, None], other=0.0)
        sums = tl.sum(tl.where(kept >= least, kept, 0.0).to(tl.int64), 1)
        # The random number of a token is hashed from the token's id, 0 to WIDTH - 1. Blocks are numbered from WIDTH on.
        scores = tl.where(inside, _gumbel_scores(sums, key, WIDTH + blocks), -1.0)
        score, place = tl.max(scores, 0, return_indices=True)
        winner = tl.where(score > best, first + place, winner)
        best = tl.maximum(best, score)
    start = winner * BLOCK
    block = source + start
    kept = tl.load(block + places)
    place = tl.argmax(_gumbel_scores(tl.where(kept >= least, kept, 0.0), key, start + places), 0)
    # The token must be a valid index even in a row whose maximum is not finite.
    tl.store(tokens + row, tl.minimum(start + place, VOCAB - 1).to(tl.int64))


def bind_gumbel_sample(
    weights: Tensor, cutoffs: Tensor | None, sampling: SamplingTensors, vocab_size: int
) -> tuple[Launch, Tensor]:
    """Binds the kernel to weights float32 [N, width], whole numbers.

    cutoffs: float32 [N], or None if no row is filtered.
    Returns the launch and the tokens it fills, int64 [N].
    """
    width = weights.shape[1]
    tokens = torch.empty(len(weights), dtype=torch.int64, device=weights.device)
    return Launch(
        _gumbel_sample_kernel,
        (len(weights),),
        {
            "weights": weights,
            "cutoffs": weights if cutoffs is None else cutoffs,
            "keys": sampling.keys,
            "tokens": tokens,
        },
        {
            "HAS_CUTOFFS": cutoffs is not None,
            "VOCAB": vocab_size,
            "WIDTH": width,
            "NUM": _BLOCKS,
            "BLOCK": SAMPLE_BLOCK,
        },
        num_warps=_WARPS,
    ), tokens
