"""Draws one token of each row by its weights: see `token_draw` for the race, of which this is the GPU's.

One program a row: blocks of tokens race by their sums, and then the tokens of the block that won. A score is a whole
number over a float64, so neither the batch nor the sizes below decide anything.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slora_kernels.draws import Draws
from slora_kernels.gpu.token_weights import RACE_BLOCK
from slora_kernels.launch import Launch

# Blocks that a program reads at once: 32 KB, as `token_cutoffs` does.
_BLOCKS = 32
_WARPS = 16


@triton.jit
def _finish(weights, key, numbers):
    """float64: the inverse of when each comes home; `token_draw._uniform` says how its chance is made."""
    state = key + numbers.to(tl.uint64) * 0x9E3779B97F4A7C15
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    state = state ^ (state >> 31)
    uniform = ((state >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return weights.to(tl.float64) / -tl.log(uniform)


@triton.jit
def _token_race_kernel(
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
        # Numbers 0 to WIDTH - 1 are the tokens' own; those of blocks come behind them.
        scores = tl.where(inside, _finish(sums, key, WIDTH + blocks), -1.0)
        score, place = tl.max(scores, 0, return_indices=True)
        winner = tl.where(score > best, first + place, winner)
        best = tl.maximum(best, score)
    start = winner * BLOCK
    block = source + start
    kept = tl.load(block + places)
    place = tl.argmax(_finish(tl.where(kept >= least, kept, 0.0), key, start + places), 0)
    # A row that is not sound gets a token, too.
    tl.store(tokens + row, tl.minimum(start + place, VOCAB - 1).to(tl.int64))


def bind_token_race(
    weights: Tensor, cutoffs: Tensor | None, draws: Draws, vocab_size: int
) -> tuple[Launch, Tensor]:
    """weights float32 [N, width], whole numbers; cutoffs float32 [N], None for none -> the launch and int64 [N]."""
    width = weights.shape[1]
    tokens = torch.empty(len(weights), dtype=torch.int64, device=weights.device)
    return Launch(
        _token_race_kernel,
        (len(weights),),
        {
            "weights": weights,
            "cutoffs": weights if cutoffs is None else cutoffs,
            "keys": draws.keys,
            "tokens": tokens,
        },
        {
            "HAS_CUTOFFS": cutoffs is not None,
            "VOCAB": vocab_size,
            "WIDTH": width,
            "NUM": _BLOCKS,
            "BLOCK": RACE_BLOCK,
        },
        num_warps=_WARPS,
    ), tokens
