"""Filters against transformers' own warpers; what a draw may depend on, and what it may not."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from slora.token_draw import race, truncate, weigh

OFF = 2**62


def column(value: float, rows: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((rows, 1), value, dtype=dtype)


def kept(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """bool, like `logits` [B, V]."""
    rows = len(logits)
    weights = weigh(logits, logits.amax(-1, keepdim=True), column(temperature, rows))
    limits = column(top_k or OFF, rows, torch.int64), column(top_p, rows), column(min_p, rows)
    return truncate(weights, *limits)[:, : logits.shape[1]] > 0


def kept_by_transformers(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p > 0:
        warpers.append(MinPLogitsWarper(min_p))
    return warpers(torch.zeros(len(logits), 1, dtype=torch.long), logits.double()) > float("-inf")


@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.0])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (1, 1.0, 0.0),
        (7, 1.0, 0.0),
        (300, 1.0, 0.0),
        (5000, 1.0, 0.0),
        (0, 0.01, 0.0),
        (0, 0.5, 0.0),
        (0, 0.9, 0.0),
        (0, 0.999, 0.0),
        (0, 1.0, 0.02),
        (0, 1.0, 1.0),
        (40, 0.9, 0.0),
        (700, 0.7, 0.001),
        (40, 0.95, 0.05),
    ],
)
@pytest.mark.parametrize("vocab_size", [100, 6007])
def test_filters_keep_what_transformers_keeps(
    vocab_size: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.randn(12, vocab_size, generator=torch.Generator().manual_seed(3)) * 2
    mine = kept(logits, temperature, top_k, top_p, min_p)
    theirs = kept_by_transformers(logits, temperature, top_k, top_p, min_p)
    # Close to 2**-42 of the likeliest, whole numbers are too coarse to tell all tokens apart.
    likelihoods = ((logits - logits.amax(-1, keepdim=True)) / temperature).double().exp()
    assert not (mine != theirs)[likelihoods > 2.0**-26].any()


def test_equals_stay_or_go_together() -> None:
    """No order among equals is made up: 16-bit logits have many, and ids say nothing about tokens."""
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    for top_k, top_p in ((2, 1.0), (3, 1.0), (0, 0.6), (3, 0.7)):
        assert kept(logits, 1.0, top_k, top_p, 0.0).tolist() == [[True, True, True, True, False]]


@given(st.integers(0, 1 << 30), st.integers(1, 9), st.integers(1, 2000), st.booleans())
def test_filters_and_draw_of_a_row_are_the_same_bits_in_any_batch(
    seed: int, rows: int, vocab_size: int, coarse: bool
) -> None:
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab_size, generator=random) * 3
    if coarse:
        logits = logits.bfloat16().float()
    peaks, temperature = logits.amax(-1, keepdim=True), torch.rand(rows, 1, generator=random) + 0.1
    top_k = torch.randint(1, 2 * vocab_size, (rows, 1), generator=random)
    top_p, min_p = torch.rand(2, rows, 1, generator=random) ** 2
    keys = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=random)
    weights = truncate(weigh(logits, peaks, temperature), top_k, 1 - top_p, min_p / 10)
    tokens = race(weights, keys)
    assert (tokens < vocab_size).all() and (weights.gather(1, tokens[:, None]) > 0).all()
    for n in torch.randperm(rows, generator=random).tolist():
        one = slice(n, n + 1)
        alone = truncate(
            weigh(logits[one].clone(), peaks[one], temperature[one]),
            top_k[one],
            1 - top_p[one],
            min_p[one] / 10,
        )
        assert torch.equal(alone, weights[one])
        assert torch.equal(race(alone, keys[one]), tokens[one])


def test_a_rounding_in_the_logits_changes_as_few_draws_as_can_be(soak: bool) -> None:
    """Of n logits that are off by d, the share of draws that change is about d, however many tokens there are.

    The borders of a cumulative distribution shift all together: its inverse changes 200 times as many draws.
    """
    rounds, rows, vocab_size, off = (400 if soak else 20), 500, 32_000, 1e-4
    random = torch.Generator().manual_seed(0)
    changed = 0
    for _ in range(rounds):
        logits = torch.randn(1, vocab_size, generator=random) * 2
        noise = torch.randn(1, vocab_size, generator=random) * off
        keys = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=random)
        one = column(1.0)
        before, after = (
            race(weigh(x, logits.amax(-1, keepdim=True), one).expand(rows, -1), keys)
            for x in (logits, logits + noise)
        )
        changed += int((before != after).sum())
    assert changed <= 10 * off * rounds * rows
