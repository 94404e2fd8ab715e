"""Draws one token a row from logits: temperature, then top_k, top_p and min_p, then chance.

The order is that of transformers (generation/utils.py, _get_logits_processor): top_p is a share of what top_k left,
and min_p is measured on the whole distribution, which filters leave as it is. vLLM applies min_p before top_k and
top_p; the two differ only where a nucleus is measured, and transformers is what our parity tests compare with.

Everything after exp() is done in whole numbers, so no sum depends on the order, the device or the batch that it is
taken in. A filter keeps the tokens as likely as a cutoff or likelier: equals stay or go together.

The draw is a race (the Gumbel-max trick, in its exponential form): token i finishes at E_i / p_i, E_i being -log of a
uniform number hashed from the row's key and i; the first one wins, with probability p_i. Unlike the inverse of the
cumulative distribution, where a rounding in any logit moves the borders of all tokens behind it, a race changes its
winner only if the first two were within that rounding of each other. Base GEMMs do round differently in batches of
different sizes: of 32,000 normal logits off by 1e-4, this changes 1 draw in 10,000 and the inverse 1 in 40.

To race 32,000 tokens takes as many logarithms, so blocks of tokens race first, by their sums, and then the tokens of
the winning block: the same distribution.

This is where no kernel of ours draws. Weights lie in 64-bit integers here; on a GPU `token_weights`, `token_cutoffs`
and `token_race` do the same without a sort.
"""

import torch
from torch import Tensor

from slora_kernels.draws import Draws

# A weight of 1, the likeliest token's. Sums of 2**20 such weights fit; what is below 2**-42 of it is never drawn.
_ONE = 2.0**42
_BLOCK = 256
# The candidates that a filter looks at first: enough, nearly always, and much cheaper than to sort a vocabulary.
_FIRST, _SECOND = 256, 4096
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64


def draw_tokens(logits: Tensor, peaks: Tensor, draws: Draws) -> Tensor:
    """See `Kernels.draw`."""
    if len(draws.rows) < len(logits):
        logits, peaks = logits[draws.rows], peaks[draws.rows]
    weights = weigh(logits, peaks[:, None], draws.temperature[:, None])
    if draws.truncates:
        limits = draws.top_k, draws.top_p, draws.min_p
        some = ((draws.top_k < logits.shape[1]) | (draws.top_p < 1) | (draws.min_p > 0)).nonzero().squeeze(1)
        weights[some] = truncate(weights[some], *(limit[some, None] for limit in limits))
    # A row that is not sound has no sound weights either; its token is thrown away, but must be one.
    return race(weights, draws.keys).clamp_(max=logits.shape[1] - 1)


def weigh(logits: Tensor, peaks: Tensor, temperature: Tensor) -> Tensor:
    """int64 [B, V] of logits float32 [B, V]: exp((l - peak) / temperature) in units of 2**-42.

    From the peak down: a tiny temperature must not carry logits to infinity. V is padded to whole blocks, with 0.
    """
    width = -(-logits.shape[1] // _BLOCK) * _BLOCK
    weights = torch.zeros((len(logits), width), dtype=torch.int64, device=logits.device)
    weights[:, : logits.shape[1]] = ((logits - peaks) / temperature).exp_().mul_(_ONE)
    return weights


def truncate(weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """`weights` with 0 for the tokens that the filters drop; top_k int64, top_p and min_p float32, each [B, 1]."""
    cutoff = torch.maximum(_top_cutoff(weights, top_k, top_p), (min_p.double() * _ONE).ceil().long())
    return weights.masked_fill(weights < cutoff, 0)


def race(weights: Tensor, keys: Tensor) -> Tensor:
    """int64 [B]: a token of each row of `weights`, drawn by `keys` int64 [B]."""
    rows, width = weights.shape
    blocks = weights.view(rows, width // _BLOCK, _BLOCK)
    # Numbers 0 to width - 1 are the tokens' own; those of blocks come behind them.
    number = torch.arange(width, width + blocks.shape[1], device=weights.device)
    block = _winner(blocks.sum(dim=-1), keys, number.unsqueeze(0))
    inside = blocks[torch.arange(rows, device=weights.device), block]
    first = block.unsqueeze(1) * _BLOCK
    place = _winner(inside, keys, first + torch.arange(_BLOCK, device=weights.device))
    return block * _BLOCK + place


def _winner(weights: Tensor, keys: Tensor, numbers: Tensor) -> Tensor:
    """The first one home in each row: int64 [B]. numbers: who races, int64 [B or 1, N]."""
    return (weights / -_uniform(keys.unsqueeze(1), numbers).log()).argmax(dim=-1)


def _uniform(keys: Tensor, numbers: Tensor) -> Tensor:
    """float64 in (0, 1), 52 bits: the outputs `numbers` of a SplitMix64 (Steele et al., 2014) seeded with `keys`."""
    state = keys + numbers * _GOLDEN
    for shift, factor in ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64)):
        state = (state ^ _shifted(state, shift)) * factor
    state = state ^ _shifted(state, 31)
    return (_shifted(state, 12).double() + 0.5) * 2.0**-52


def _shifted(state: Tensor, bits: int) -> Tensor:
    """To the right, with zeros from the left."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def _top_cutoff(weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """int64 [B, 1]: the least weight that top_k and top_p leave."""
    cutoff = torch.zeros_like(top_k)
    rows = torch.arange(len(weights), device=weights.device)
    for size in (_FIRST, _SECOND, weights.shape[1]):
        size = min(size, weights.shape[1])
        found, settled = _cutoff_among(weights[rows], top_k[rows], top_p[rows], size)
        cutoff[rows] = found
        if size == weights.shape[1]:
            break
        rows = rows[~settled]
        if len(rows) == 0:
            break
    return cutoff


def _cutoff_among(weights: Tensor, top_k: Tensor, top_p: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The cutoff as far as the `size` likeliest tokens tell, and whether that is the end of it: bool [B]."""
    ordered = weights.topk(size, dim=-1).values
    limited = top_k <= size
    least = torch.where(limited, ordered.gather(1, top_k.clamp(max=size) - 1), 0)
    left = weights.masked_fill(weights < least, 0).sum(dim=-1, keepdim=True)
    # A token stays while the mass before it is below its share, so the first one always does.
    before = ordered.cumsum(dim=-1) - ordered
    inside = (before.double() < top_p.double() * left.double()).sum(dim=-1, keepdim=True)
    nucleus = torch.where(top_p < 1, ordered.gather(1, (inside - 1).clamp(min=0)), 0)
    open_k = (top_k > size) & (top_k < weights.shape[1])
    # The likeliest of all that the nucleus leaves out must be in sight, or its border may lie further down.
    open_p = (top_p < 1) & (inside == size)
    return torch.maximum(least, nucleus), ~(open_k | open_p).squeeze(1)
