"""Beam search without an engine: a model that is a table of log-probabilities, and an exhaustive reference search."""

import math
from collections.abc import Callable
from functools import cache
from random import Random
from typing import NamedTuple

from slora.core.sampling_params import SamplingParams
from slora.scheduler.beam_search import Proposal

Model = Callable[[tuple[int, ...]], list[float]]


def random_model(vocab_size: int, seed: int, *, barred: frozenset[int] = frozenset()) -> Model:
    """Log-probabilities of the next token for each prefix. Tokens in `barred` have minus infinity."""

    @cache
    def logprobs(tokens: tuple[int, ...]) -> list[float]:
        random = Random(f"{seed}{tokens}")
        weights = [random.random() ** 3 + 1e-3 for _ in range(vocab_size)]
        values = [math.log(weight / sum(weights)) for weight in weights]
        return [-math.inf if token in barred else value for token, value in enumerate(values)]

    return logprobs


def propose(model: Model, tokens: tuple[int, ...], count: int, *, top: int | None = None) -> Proposal:
    scores = model(tokens)
    best = sorted(range(len(scores)), key=lambda token: -scores[token])
    ranked = [scores[token] for token in best[:count]]
    told = None if top is None else tuple(zip(best[:top], ranked, strict=False))
    return Proposal(best[:count], ranked, ranked, told)


class Plain(NamedTuple):
    score: float
    tokens: tuple[int, ...]


def search_plainly(
    model: Model, params: SamplingParams, stop_ids: frozenset[int], max_tokens: int
) -> list[Plain]:
    """Follows the loop of transformers' beam search, and sorts all continuations in each step."""
    width, finished = params.width, list[Plain]()
    running = [Plain(0.0, ())]
    for length in range(1, max_tokens + 1):
        ranked = sorted(
            (
                Plain(beam.score + score, (*beam.tokens, token))
                for beam in running
                for token, score in enumerate(model(beam.tokens))
                if score > -math.inf
            ),
            key=lambda one: -one.score,
        )
        ends = [one.tokens[-1] in stop_ids or length == max_tokens for one in ranked]
        finished += [
            Plain(one.score / length**params.length_penalty, one.tokens)
            for one, end in zip(ranked[:width], ends, strict=False)
            if end
        ]
        finished = sorted(finished, key=lambda one: -one.score)[:width]
        running = [one for one, end in zip(ranked, ends, strict=True) if not end][:width]
        if not running or (len(finished) == width and params.early_stopping):
            break
        if len(finished) == width and running[0].score / length**params.length_penalty <= finished[-1].score:
            break
    return finished[: params.n]


def beam_params(
    width: int,
    n: int,
    max_tokens: int | None,
    length_penalty: float,
    *,
    early_stopping: bool,
    logprobs: int | None = None,
) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0,
        n=n,
        best_of=width,
        use_beam_search=True,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        logprobs=logprobs,
    )
