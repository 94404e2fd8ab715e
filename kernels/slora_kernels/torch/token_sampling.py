"""Masks, argmax and sampling of logits. Sampling: temperature, then top_k, top_p and min_p, then the random choice.

The order is the same as in transformers (generation/utils.py, _get_logits_processor), because the parity tests compare
with transformers. top_p is a share of the probability mass that top_k left. min_p is compared with the unfiltered
distribution. vLLM applies min_p first, so its top_p is a share of the mass that min_p and top_k left. Nothing else
differs.

After exp(), weights are converted to integers. Their sums are therefore exact in any order of addition, on every device
and in every batch. A filter keeps every token whose weight is at least a cutoff, so tokens of equal weight are kept or
dropped together.

The random choice is the Gumbel-max trick in its exponential form. The sampled token is the argmax of p_i / E_i, where
E_i is exponentially distributed: -log of a uniform number that is hashed from the row's key and i. Token i is sampled
with probability p_i.

The trick is robust against rounding. With the inverse of the cumulative distribution, a rounding error in any logit
shifts the boundaries of all later tokens. With the Gumbel-max trick, a rounding error changes the sample only if the
two greatest scores differ by less than the error. Base GEMMs do round differently in batches of different sizes. With
errors of 1e-4 in 32,000 normally distributed logits, 1 sample in 10,000 changes with the trick, and 1 in 40 with the
inverse.

Scoring each of 32,000 tokens would take 32,000 logarithms. So a block of tokens is sampled first, with the sums of the
blocks as weights, and then a token of that block. The distribution is the same.

This is the torch implementation, with weights in 64-bit integers. On a GPU, `token_weights`, `token_cutoffs` and
`gumbel_sample` compute the same result without sorting.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from slora_kernels.sampling_tensors import SamplingTensors

# The weight of the most probable token. Sums of 2**20 such weights fit 64 bits. A token that is less than 2**-42 times
# as probable gets weight 0 and is never sampled.
_WEIGHT_ONE = 2.0**42
_BLOCK = 256
# A filter first sorts the _FIRST most probable tokens. If the cutoff is not among them, it sorts the _SECOND most
# probable tokens, and if necessary the entire vocabulary. _FIRST nearly always suffices and is much cheaper.
_FIRST, _SECOND = 256, 4096
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64


def sample_tokens(logits: Tensor, max_logits: Tensor, sampling: SamplingTensors) -> Tensor:
    """See `Kernels.sample`."""
    if len(sampling.rows) < len(logits):
        logits, max_logits = logits[sampling.rows], max_logits[sampling.rows]
    weights = compute_weights(logits, max_logits[:, None], sampling.temperature[:, None])
    if sampling.has_filters:
        limits = sampling.top_k, sampling.top_p, sampling.min_p
        some = (
            ((sampling.top_k < logits.shape[1]) | (sampling.top_p < 1) | (sampling.min_p > 0))
            .nonzero()
            .squeeze(1)
        )
        weights[some] = apply_filters(weights[some], *(limit[some, None] for limit in limits))
    # The weights of a row are meaningless if its maximum is not finite. The row's token is discarded later, but must be
    # a valid index.
    return gumbel_sample(weights, sampling.keys).clamp_(max=logits.shape[1] - 1)


def compute_weights(logits: Tensor, max_logits: Tensor, temperature: Tensor) -> Tensor:
    """Returns weights int64 [B, V] of logits float32 [B, V]: exp((l - max_logit) / temperature) in units of 2**-42.

    The maximum is subtracted before the division, so that a tiny temperature does not overflow.
    Each row of the result is padded with zeros to whole blocks.
    """
    width = -(-logits.shape[1] // _BLOCK) * _BLOCK
    weights = torch.zeros((len(logits), width), dtype=torch.int64, device=logits.device)
    weights[:, : logits.shape[1]] = ((logits - max_logits) / temperature).exp_().mul_(_WEIGHT_ONE)
    return weights


def apply_filters(weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Sets to 0 the weights of all tokens that the filters exclude.

    top_k: int64 [B, 1]. top_p, min_p: float32 [B, 1].
    """
    cutoff = torch.maximum(
        _find_top_k_top_p_cutoff(weights, top_k, top_p), (min_p.double() * _WEIGHT_ONE).ceil().long()
    )
    return weights.masked_fill(weights < cutoff, 0)


def gumbel_sample(weights: Tensor, keys: Tensor) -> Tensor:
    """Samples one token for each row of `weights`, with seeds `keys` int64 [B] -> int64 [B]."""
    rows, width = weights.shape
    blocks = weights.view(rows, width // _BLOCK, _BLOCK)
    # The random number of a token is hashed from the token's id, 0 to width - 1. Blocks are numbered from width on.
    number = torch.arange(width, width + blocks.shape[1], device=weights.device)
    block = _sample_index(blocks.sum(dim=-1), keys, number.unsqueeze(0))
    inside = blocks[torch.arange(rows, device=weights.device), block]
    first = block.unsqueeze(1) * _BLOCK
    place = _sample_index(inside, keys, first + torch.arange(_BLOCK, device=weights.device))
    return block * _BLOCK + place


def _sample_index(weights: Tensor, keys: Tensor, numbers: Tensor) -> Tensor:
    """Samples an index in each row by the Gumbel-max trick: int64 [B].

    numbers: int64 [B or 1, N], from which `_uniform` hashes a random number for each entry.
    """
    return (weights / -_uniform(keys.unsqueeze(1), numbers).log()).argmax(dim=-1)


def _uniform(keys: Tensor, numbers: Tensor) -> Tensor:
    """Returns uniform float64 numbers in (0, 1) with 52 random bits, hashed from `keys` and `numbers`.

    The hash of key and n is output n of SplitMix64 (Steele et al., 2014) with that key as seed.
    """
    state = keys + numbers * _GOLDEN
    for shift, factor in ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64)):
        state = (state ^ _shift_right(state, shift)) * factor
    state = state ^ _shift_right(state, 31)
    return (_shift_right(state, 12).double() + 0.5) * 2.0**-52


def _shift_right(state: Tensor, bits: int) -> Tensor:
    """Logical right shift: zeros are shifted in from the left."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def _find_top_k_top_p_cutoff(weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The smallest weight that top_k and top_p keep: int64 [B, 1]."""
    cutoff = torch.zeros_like(top_k)
    rows = torch.arange(len(weights), device=weights.device)
    for size in (_FIRST, _SECOND, weights.shape[1]):
        size = min(size, weights.shape[1])
        found, settled = _find_cutoff_in_top(weights[rows], top_k[rows], top_p[rows], size)
        cutoff[rows] = found
        if size == weights.shape[1]:
            break
        rows = rows[~settled]
        if len(rows) == 0:
            break
    return cutoff


def _find_cutoff_in_top(weights: Tensor, top_k: Tensor, top_p: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Computes the cutoff from the `size` most probable tokens.

    Returns the cutoff, and whether it is final: bool [B].
    """
    ordered = weights.topk(size, dim=-1).values
    limited = top_k <= size
    least = torch.where(limited, ordered.gather(1, top_k.clamp(max=size) - 1), 0)
    left = weights.masked_fill(weights < least, 0).sum(dim=-1, keepdim=True)
    # A token is kept while the mass before it is below the row's top_p share, so the first token is always kept.
    before = ordered.cumsum(dim=-1) - ordered
    inside = (before.double() < top_p.double() * left.double()).sum(dim=-1, keepdim=True)
    nucleus = torch.where(top_p < 1, ordered.gather(1, (inside - 1).clamp(min=0)), 0)
    open_k = (top_k > size) & (top_k < weights.shape[1])
    # The cutoff is final only if the first token outside the nucleus is among the sorted tokens. Otherwise the nucleus
    # may extend further.
    open_p = (top_p < 1) & (inside == size)
    return torch.maximum(least, nucleus), ~(open_k | open_p).squeeze(1)


def find_argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See `Kernels.argmax`.

    On a CPU, the function first finds the block with the maximum, and then the argmax in that block. This takes a fifth
    of the time of `max` over the entire row.
    """
    logits = logits.float()
    whole = logits.shape[1] // _BLOCK * _BLOCK
    if logits.device.type != "cpu" or whole == 0:
        best, token = logits.max(dim=-1)
        return best, token
    blocks = logits[:, :whole].reshape(len(logits), -1, _BLOCK)
    best, block = blocks.amax(dim=-1).max(dim=-1)
    token = block * _BLOCK + blocks[torch.arange(len(logits)), block].argmax(dim=-1)
    if whole < logits.shape[1]:
        rest, place = logits[:, whole:].max(dim=-1)
        is_greater = (rest > best) | (rest.isnan() & ~best.isnan())
        best, token = torch.where(is_greater, rest, best), torch.where(is_greater, place + whole, token)
    return best, token


def mask_logits(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """See `Kernels.mask_logits`.

    A table maps each byte of a mask to eight offsets, 0 or minus infinity, which are added to the logits. On a CPU this
    takes a tenth of the time of `masked_fill_`.
    """
    offsets = F.embedding(masks.view(torch.uint8).int(), _make_offsets(logits.dtype, logits.device))
    offsets = offsets.flatten(1)[:, : logits.shape[1]]
    if len(rows) == len(logits):  # the rows are distinct and ascending, so these are all rows
        logits.add_(offsets)
    else:
        logits[rows] = logits[rows] + offsets


@cache
def _make_offsets(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns [256, 8]: for each byte of a mask, the offsets that are added to the logits of its eight tokens."""
    bits = torch.arange(256)[:, None] >> torch.arange(8)
    return torch.where(bits & 1 == 1, 0.0, -torch.inf).to(device, dtype)
