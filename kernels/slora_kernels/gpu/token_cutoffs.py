"""Computes the smallest weight that top_k, top_p and min_p keep in each row, without sorting the row.

top_k and top_p both look for the greatest threshold t for which the tokens of weight t or more are enough. For top_k,
their count has to reach top_k. For top_p, their mass has to reach the share top_p of the mass that top_k kept. The
threshold is found by bisection between a value that is enough and a value that is too high. Counts and sums are
integers, so they are exact in any order. The final t is the weight of some token, and all tokens of equal weight are
kept.

The bisection runs over the bit patterns of float32, which sort like the values. Between 1 and 2**42, each power of two
has equally many bit patterns. Halving a range of bit patterns thus about halves a range of log(weight), that is, of
logits. Each pass over the row halves the range once. After a few passes, the remaining candidate tokens fit registers.
The program copies them side by side and finishes the bisection with them alone.

One program handles one row, which stays in the GPU's cache: 128,256 weights are 0.5 MB. FlashInfer also bisects
(in its sampling.cuh), but over real numbers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slora_kernels.gpu.launch import Launch
from slora_kernels.gpu.token_weights import WEIGHT_ONE
from slora_kernels.sampling_tensors import SamplingTensors

# Weights that a program reads at once: 16 for each of its 512 threads. That is 32 KB in flight, enough for a memory
# with a latency of 600 cycles to deliver about 64 bytes per cycle.
_BLOCK = 8192
_WARPS = 16
# Once at most this many candidate tokens remain, they are copied and kept in registers: two for each of 512 threads.
_MAX_CANDIDATES = 1024


@triton.jit
def _sum_weights_from(source, least, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the number of a row's tokens with weight `least` or more, and their total weight. Both are int64."""
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
def _compact_candidates(source, row_candidates, least, greatest, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Copies the weights of a row that are in [least, greatest) to `row_candidates`, without gaps between them.

    Returns their number. The caller makes sure that they fit.
    """
    written = 0
    for first in range(0, WIDTH, BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        weights = tl.load(source + tokens, mask=tokens < WIDTH, other=0.0)
        is_in = (weights >= least) & (weights < greatest)
        place = written + tl.cumsum(is_in.to(tl.int32), 0) - 1
        tl.store(row_candidates + place, weights, mask=is_in)
        written += tl.sum(is_in.to(tl.int32), 0)
    return written


@triton.jit
def _find_cutoff(
    source,
    row_candidates,
    required,
    low,
    low_count,
    low_mass,
    BY_MASS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr,
    UPPER_BITS: tl.constexpr,
):
    """Finds the greatest threshold that enough tokens of the row reach.

    required: the number of tokens that is enough or, if BY_MASS, the total mass of tokens that is enough.
    low: bits of a threshold that is enough, with the count and the mass of its tokens.
    Returns the bits of the cutoff, and the count and the mass of the tokens that reach it.
    """
    high = tl.full([], UPPER_BITS, tl.int32)  # bits of a threshold that is not enough
    high_count = tl.full([], 0, tl.int64)
    high_mass = tl.full([], 0, tl.int64)
    while (high - low > 1) & (low_count - high_count > MAX_CANDIDATES):
        middle = low + (high - low) // 2
        count, mass = _sum_weights_from(source, middle.to(tl.float32, bitcast=True), WIDTH, BLOCK)
        amount = mass if BY_MASS else count
        is_enough = amount.to(tl.float64) >= required
        low = tl.where(is_enough, middle, low)
        low_count = tl.where(is_enough, count, low_count)
        low_mass = tl.where(is_enough, mass, low_mass)
        high = tl.where(is_enough, high, middle)
        high_count = tl.where(is_enough, high_count, count)
        high_mass = tl.where(is_enough, high_mass, mass)
    if high - low > 1:
        least, greatest = low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)
        written = _compact_candidates(source, row_candidates, least, greatest, WIDTH, BLOCK)
        # The first barrier makes the writes of other threads visible. The second barrier waits for all
        # reads, because `row_candidates` will be overwritten.
        tl.debug_barrier()
        places = tl.arange(0, MAX_CANDIDATES)
        left = tl.load(row_candidates + places, mask=places < written, other=-1.0)
        tl.debug_barrier()
        whole = left.to(tl.int64)
        while high - low > 1:
            middle = low + (high - low) // 2
            is_in = left >= middle.to(tl.float32, bitcast=True)
            if BY_MASS:
                amount = high_mass + tl.sum(tl.where(is_in, whole, 0), 0)
            else:
                amount = high_count + tl.sum(is_in.to(tl.int32), 0)
            is_enough = amount.to(tl.float64) >= required
            low = tl.where(is_enough, middle, low)
            high = tl.where(is_enough, high, middle)
        is_in = left >= low.to(tl.float32, bitcast=True)
        low_count = high_count + tl.sum(is_in.to(tl.int32), 0)
        low_mass = high_mass + tl.sum(tl.where(is_in, whole, 0), 0)
    return low, low_count, low_mass


@triton.jit(do_not_specialize=["top_k", "top_p", "min_p"])
def _token_cutoffs_kernel(
    weights,
    top_k,
    top_p,
    min_p,
    cutoffs,
    candidates,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr,
    LOWEST_BITS: tl.constexpr,
    UPPER_BITS: tl.constexpr,
    WEIGHT_ONE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    source, row_candidates = weights + row * WIDTH, candidates + row * MAX_CANDIDATES
    most, share = tl.load(top_k + row), tl.load(top_p + row)
    cutoff = tl.ceil(tl.load(min_p + row) * WEIGHT_ONE)
    if (most <= WIDTH) | (share < 1):
        low = tl.full([], LOWEST_BITS, tl.int32)
        count, mass = _sum_weights_from(source, low.to(tl.float32, bitcast=True), WIDTH, BLOCK)
        # If fewer tokens than top_k have any weight, top_k keeps all of them.
        if most <= count:
            low, count, mass = _find_cutoff(
                source,
                row_candidates,
                most.to(tl.float64),
                low,
                count,
                mass,
                False,
                WIDTH,
                BLOCK,
                MAX_CANDIDATES,
                UPPER_BITS,
            )
            cutoff = tl.maximum(cutoff, low.to(tl.float32, bitcast=True))
        if share < 1:
            required = share.to(tl.float64) * mass.to(tl.float64)
            low, count, mass = _find_cutoff(
                source,
                row_candidates,
                required,
                low,
                count,
                mass,
                True,
                WIDTH,
                BLOCK,
                MAX_CANDIDATES,
                UPPER_BITS,
            )
            cutoff = tl.maximum(cutoff, low.to(tl.float32, bitcast=True))
    tl.store(cutoffs + row, cutoff)


def bind_token_cutoffs(weights: Tensor, sampling: SamplingTensors) -> tuple[Launch, Tensor]:
    """Binds the kernel to weights float32 [N, width], whole numbers up to WEIGHT_ONE.

    Returns the launch and the cutoffs it fills, float32 [N], whole numbers. Tokens below their row's cutoff are
    dropped. The cutoff of a row in which all weights are 0 is arbitrary.
    """
    width = weights.shape[1]
    cutoffs = torch.empty(len(weights), dtype=torch.float32, device=weights.device)
    candidates = torch.empty(len(weights), _MAX_CANDIDATES, dtype=torch.float32, device=weights.device)
    return Launch(
        _token_cutoffs_kernel,
        (len(weights),),
        {
            "weights": weights,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "cutoffs": cutoffs,
            "candidates": candidates,
        },
        {
            "WIDTH": width,
            "BLOCK": min(_BLOCK, triton.next_power_of_2(width)),
            "MAX_CANDIDATES": _MAX_CANDIDATES,
            "LOWEST_BITS": _bits(1.0),
            "UPPER_BITS": _bits(WEIGHT_ONE) + 1,
            "WEIGHT_ONE": WEIGHT_ONE,
        },
        num_warps=_WARPS,
    ), cutoffs


def _bits(number: float) -> int:
    return int(torch.tensor(number, dtype=torch.float32).view(torch.int32))
