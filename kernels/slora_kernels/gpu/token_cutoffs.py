"""The least weight that top_k, top_p and min_p leave of each row, found without sorting it.

Both filters ask for the greatest number t of which something is enough: as many tokens as top_k weigh t or more, or
those that do weigh top_p of all that top_k left. It is found by halving the stretch in which it lies, between a number
that is enough and one that is not. Counts and sums are of whole numbers, so no order rounds them, and t is what some
token weighs: its equals are left with it.

Halved is the stretch of float32's bit patterns, whose order is the numbers' own: a stretch of 42 powers of two, each as
wide as the next. A logit's weight falls exponentially, so each pass over the row leaves out half of the powers; after a
few of them, as few tokens are in question as fit registers. These are written down side by side, and the rest is done
with them alone.

One program a row, which stays in the GPU's cache: 128,256 weights are 0.5 MB. FlashInfer halves likewise (its
sampling.cuh), but in real numbers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slora_kernels.draws import Draws
from slora_kernels.gpu.token_weights import ONE
from slora_kernels.launch import Launch

# Weights that a program reads at once: 16 for each of its 512 threads, 32 KB in flight, which a memory 600 cycles away
# takes to deliver 64 bytes a cycle.
_BLOCK = 8192
_WARPS = 16
# Tokens in question that are written down: two for each thread.
_FEW = 1024


@triton.jit
def _weigh_from(source, least, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Of a row: how many tokens weigh `least` or more, int64, and their mass."""
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
    """The weights of a row in [least, greatest) side by side; there are no more than fit."""
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
    """The greatest number that `wanted` tokens (or tokens that weigh as much) weigh or outweigh: its bits, and how many
    do, and their mass.

    low: bits of a number of which that is true, with what weighs it or more.
    """
    high = tl.full([], PAST, tl.int32)  # bits of a number of which it is not true
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
        # What other threads wrote is there behind this, and before any of it is overwritten.
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
        # Of a row that has fewer tokens of any weight than top_k, none goes.
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
    """weights float32 [N, width], whole numbers up to ONE -> the launch and cutoffs float32 [N], whole numbers too.

    What weighs less than its row's cutoff is dropped. A row of no weight at all gets any cutoff.
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
