"""Computes the smallest weight that top_k, top_p and min_p keep in each row, without sorting the row.

top_k and top_p both look for the greatest threshold t for which the tokens of weight t or more are enough. For top_k,
their count has to reach top_k. For top_p, their mass has to reach the share top_p of the mass that top_k kept. The
threshold is found by bisection between a value that is enough and one that is not. Counts and sums are integers, so
they are exact in any order. The final t is the weight of some token, and all tokens of equal weight are kept.

The bisection runs over the bit patterns of float32, which sort like the values. Weights lie between 1 and 2**42. That
is 42 powers of two, with equally many bit patterns in each. Weights are exponential in the logits, so a power of two is
an interval of logits, and each pass over the row halves the interval in question. After a few passes, few enough
candidate tokens remain to fit registers. The program copies these candidates side by side and finishes the bisection
with them alone.

One program handles one row, which stays in the GPU's cache: 128,256 weights are 0.5 MB. FlashInfer bisects in the same
way (its sampling.cuh), but in real numbers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slora_kernels.draws import Draws
from slora_kernels.gpu.token_weights import ONE
from slora_kernels.launch import Launch

# Weights that a program reads at once: 16 for each of its 512 threads. That is 32 KB in flight, enough for a memory
# with a latency of 600 cycles to deliver about 64 bytes per cycle.
_BLOCK = 8192
_WARPS = 16
# The most candidate tokens that are copied: two for each thread.
_FEW = 1024


@triton.jit
def _weigh_from(source, least, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The number of tokens in a row whose weight is at least `least`, and their mass. Both are int64."""
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.int64)
    for first in range(0, WIDTH, BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        weights = tl.load(source + tokens, mask=tokens < WIDTH, other=0.0)
        is_in = weights >= least
        count += is_in.to(tl.int32)
        mass += tl.where(is_in, weights, 0.0).to(tl.int64)
    return tl.sum(count, 0).to(tl.int64), tl.sum(mass, 0)


@triton.jit
def _write_down(source, few, least, greatest, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Copies the weights of a row in [least, greatest) to `few`, side by side. The caller makes sure that they fit."""
    written = 0
    for first in range(0, WIDTH, BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        weights = tl.load(source + tokens, mask=tokens < WIDTH, other=0.0)
        is_in = (weights >= least) & (weights < greatest)
        place = written + tl.cumsum(is_in.to(tl.int32), 0) - 1
        tl.store(few + place, weights, mask=is_in)
        written += tl.sum(is_in.to(tl.int32), 0)
    return written


@triton.jit
def _find_cutoff(
    source,
    few,
    wanted,
    low,
    low_count,
    low_mass,
    BY_MASS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    FEW: tl.constexpr,
    PAST: tl.constexpr,
):
    """Finds the greatest threshold whose tokens are enough: `wanted` tokens, or tokens of mass `wanted` if BY_MASS.

    low: bits of a threshold that is enough, with the count and the mass of its tokens.
    Returns the bits of the cutoff, and the count and the mass of the tokens that reach it.
    """
    high = tl.full([], PAST, tl.int32)  # bits of a threshold that is not enough
    high_count = tl.full([], 0, tl.int64)
    high_mass = tl.full([], 0, tl.int64)
    while (high - low > 1) & (low_count - high_count > FEW):
        middle = low + (high - low) // 2
        count, mass = _weigh_from(source, middle.to(tl.float32, bitcast=True), WIDTH, BLOCK)
        amount = mass if BY_MASS else count
        is_enough = amount.to(tl.float64) >= wanted
        low = tl.where(is_enough, middle, low)
        low_count = tl.where(is_enough, count, low_count)
        low_mass = tl.where(is_enough, mass, low_mass)
        high = tl.where(is_enough, high, middle)
        high_count = tl.where(is_enough, high_count, count)
        high_mass = tl.where(is_enough, high_mass, mass)
    if high - low > 1:
        least, greatest = low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)
        written = _write_down(source, few, least, greatest, WIDTH, BLOCK)
        # The first barrier makes the writes of other threads visible. The second one ends all reads before `few` is
        # overwritten.
        tl.debug_barrier()
        places = tl.arange(0, FEW)
        left = tl.load(few + places, mask=places < written, other=-1.0)
        tl.debug_barrier()
        whole = left.to(tl.int64)
        while high - low > 1:
            middle = low + (high - low) // 2
            is_in = left >= middle.to(tl.float32, bitcast=True)
            if BY_MASS:
                amount = high_mass + tl.sum(tl.where(is_in, whole, 0), 0)
            else:
                amount = high_count + tl.sum(is_in.to(tl.int32), 0)
            is_enough = amount.to(tl.float64) >= wanted
            low = tl.where(is_enough, middle, low)
            high = tl.where(is_enough, high, middle)
        is_in = left >= low.to(tl.float32, bitcast=True)
        low_count = high_count + tl.sum(is_in.to(tl.int32), 0)
        low_mass = high_mass + tl.sum(tl.where(is_in, whole, 0), 0)
    return low, low_count, low_mass


@triton.jit
def _token_cutoffs_kernel(
    weights,
    top_k,
    top_p,
    min_p,
    cutoffs,
    candidates,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    FEW: tl.constexpr,
    LEAST: tl.constexpr,
    PAST: tl.constexpr,
    WHOLE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    source, few = weights + row * WIDTH, candidates + row * FEW
    most, share = tl.load(top_k + row), tl.load(top_p + row)
    cutoff = tl.ceil(tl.load(min_p + row) * WHOLE)
    if (most <= WIDTH) | (share < 1):
        low = tl.full([], LEAST, tl.int32)
        count, mass = _weigh_from(source, low.to(tl.float32, bitcast=True), WIDTH, BLOCK)
        # If fewer tokens than top_k have any weight, top_k keeps all of them.
        if most <= count:
            low, count, mass = _find_cutoff(
                source, few, most.to(tl.float64), low, count, mass, False, WIDTH, BLOCK, FEW, PAST
            )
            cutoff = tl.maximum(cutoff, low.to(tl.float32, bitcast=True))
        if share < 1:
            wanted = share.to(tl.float64) * mass.to(tl.float64)
            low, count, mass = _find_cutoff(
                source, few, wanted, low, count, mass, True, WIDTH, BLOCK, FEW, PAST
            )
            cutoff = tl.maximum(cutoff, low.to(tl.float32, bitcast=True))
    tl.store(cutoffs + row, cutoff)


def bind_token_cutoffs(weights: Tensor, draws: Draws) -> tuple[Launch, Tensor]:
    """Binds the kernel to weights float32 [N, width], whole numbers up to ONE.

    Returns the launch and the cutoffs it fills, float32 [N], whole numbers. Tokens below their row's cutoff are
    dropped. A row in which all weights are 0 gets any cutoff.
    """
    width = weights.shape[1]
    cutoffs = torch.empty(len(weights), dtype=torch.float32, device=weights.device)
    candidates = torch.empty(len(weights), _FEW, dtype=torch.float32, device=weights.device)
    return Launch(
        _token_cutoffs_kernel,
        (len(weights),),
        {
            "weights": weights,
            "top_k": draws.top_k,
            "top_p": draws.top_p,
            "min_p": draws.min_p,
            "cutoffs": cutoffs,
            "candidates": candidates,
        },
        {
            "WIDTH": width,
            "BLOCK": min(_BLOCK, triton.next_power_of_2(width)),
            "FEW": _FEW,
            "LEAST": _bits(1.0),
            "PAST": _bits(ONE) + 1,
            "WHOLE": ONE,
        },
        num_warps=_WARPS,
    ), cutoffs


def _bits(number: float) -> int:
    return int(torch.tensor(number, dtype=torch.float32).view(torch.int32))
