"""Draws the next token of every sequence of a step at once. Each row depends on nothing but itself.

A draw is the inverse of the cumulative distribution at one uniform number a row. That number is a hash of the
request's seed and the token's position, so the same request gives the same tokens alone, in any batch, and after a
preemption; no generator state has to follow a request around.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slora.request import TokenLogprobs
from slora.sequence import Sequence
from slora.step_plan import Sampled

_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """One row for each sequence that samples. logprobs: the most alternatives that any row wants, None if none does."""

    temperature: Tensor  # float32 [B, 1], 0 replaced by 1 in greedy rows
    greedy: Tensor  # bool [B]
    top_p: Tensor  # float32 [B, 1]
    top_k: Tensor  # int64 [B, 1], vocab_size where off
    uniform: Tensor  # float32 [B, 1] in [0, 1)
    all_greedy: bool
    filtered: bool
    logprobs: int | None

    @staticmethod
    def build(sequences: list[Sequence], vocab_size: int, device: torch.device) -> "SamplingBatch":
        params = [sequence.request.sampling for sequence in sequences]
        temperature = np.array([p.temperature for p in params], np.float32)
        greedy = temperature == 0
        top_k = np.array([min(p.top_k, vocab_size) or vocab_size for p in params], np.int64)
        top_p = np.array([p.top_p for p in params], np.float32)
        uniform = np.array([_uniform(s.seed, len(s.token_ids)) for s in sequences], np.float32)
        wanted = [p.logprobs for p in params if p.logprobs is not None]

        def column(values: npt.NDArray[Any]) -> Tensor:
            return torch.from_numpy(values).to(device).unsqueeze(1)

        return SamplingBatch(
            temperature=column(np.where(greedy, np.float32(1), temperature)),
            greedy=torch.from_numpy(greedy).to(device),
            top_p=column(top_p),
            top_k=column(top_k),
            uniform=column(uniform),
            all_greedy=bool(greedy.all()),
            filtered=bool((~greedy & ((top_k < vocab_size) | (top_p < 1))).any()),
            logprobs=max(wanted) if wanted else None,
        )


def sample(logits: Tensor, sequences: list[Sequence]) -> list[Sampled]:
    """Draws a token from each row of `logits` [B, vocab_size].

    A row whose greatest logit is not finite gets no token: the caller must fail that request.
    """
    batch = SamplingBatch.build(sequences, logits.shape[1], logits.device)
    logits = logits.float()
    best, choice = logits.max(dim=-1)
    if not batch.all_greedy:
        choice = torch.where(batch.greedy, choice, _draw(logits, batch))
    # One transfer to the host: the tokens and whether each row was sound.
    sound = torch.isfinite(best)
    tokens, finite = torch.stack((choice, sound.long())).tolist()
    logprobs = _logprobs(logits, choice, batch.logprobs, sequences) if batch.logprobs is not None else None
    return [
        Sampled(
            token if ok else None,
            logprobs[row] if logprobs is not None else None,
        )
        for row, (token, ok) in enumerate(zip(tokens, finite, strict=True))
    ]


def _draw(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """int64 [B]: inverse-transform sampling over the distribution that temperature, top-k and top-p leave.

    Always in the order of token ids: a row must not depend on whether another one asked for top-k or top-p.
    """
    # From the greatest one down: a tiny temperature must not carry logits to infinity.
    peaks = logits.amax(dim=-1, keepdim=True)
    probabilities = torch.softmax((logits - peaks) / batch.temperature, dim=-1)
    if batch.filtered:
        probabilities = probabilities * _kept(probabilities, batch)
    return _invert(probabilities, batch.uniform)


def _kept(probabilities: Tensor, batch: SamplingBatch) -> Tensor:
    """bool [B, V]: the tokens that top-k leaves, and of those the nucleus: top_p is a share of what top-k left."""
    ordered, tokens = probabilities.sort(dim=-1, descending=True, stable=True)
    among_top = torch.arange(ordered.shape[1], device=ordered.device) < batch.top_k
    left = ordered * among_top
    # A token stays while the mass before it is below top_p, so the first one always does. Rounding may carry the
    # sum to 1 before the last token: a top_p of 1 is no filter.
    before = left.cumsum(dim=-1) - left
    nucleus = (before < batch.top_p * left.sum(dim=-1, keepdim=True)) | (batch.top_p >= 1)
    return torch.zeros_like(nucleus).scatter_(1, tokens, among_top & nucleus)


def _invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """The first index at which the running sum of `weights` [B, V] exceeds uniform * total."""
    sums = weights.double().cumsum(dim=-1)
    target = uniform.double() * sums[:, -1:]
    index = torch.searchsorted(sums, target, right=True).squeeze(1)
    return index.clamp_(max=weights.shape[1] - 1)


def _logprobs(
    logits: Tensor, choice: Tensor, num_top: int | None, sequences: list[Sequence]
) -> list[TokenLogprobs | None]:
    """From the untouched distribution, as OpenAI reports them: temperature and filters leave it alone."""
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, choice.unsqueeze(1)).squeeze(1).tolist()
    values, tokens = (t.tolist() for t in logprobs.topk(max(num_top or 0, 1), dim=-1))
    rows: list[TokenLogprobs | None] = []
    for row, sequence in enumerate(sequences):
        count = sequence.request.sampling.logprobs
        if count is None:
            rows.append(None)
            continue
        top = tuple(zip(tokens[row][:count], values[row][:count], strict=True))
        rows.append(TokenLogprobs(chosen[row], top))
    return rows


def _uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from SplitMix64 (Steele et al., 2014) over seed and position; 24 bits, exact in float32."""
    state = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xD1342543DE82EF95) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((state ^ (state >> 31)) >> 40) / 2**24
