"""The traces are what they say: S-LoRA's generator number by number, lengths with the paper's means."""

import itertools
from collections import Counter

import numpy as np
import pytest

from bench.simulation.lengths import ALPACA, MAX_TOKENS, SHAREGPT, LengthPair
from bench.simulation.traces import (
    chat_trace,
    offered_tokens_per_s,
    slora_trace,
)


@pytest.mark.parametrize(("alpha", "percent"), [(1.0, 1.3), (0.6, 4.8), (0.3, 22.5), (0.1, 57.0)])
def test_slora_popularity_is_that_of_its_generator(alpha: float, percent: float) -> None:
    trace = slora_trace(200, 2, 300, alpha=alpha)
    assert len(trace) == 600
    most = Counter(request.adapter for request in trace).most_common(1)[0][1]
    assert round(100 * most / len(trace), 1) == percent


def test_slora_traces_offer_the_load_of_the_paper() -> None:
    assert round(offered_tokens_per_s(slora_trace(200, 10, 120))) == 5045
    assert round(offered_tokens_per_s(slora_trace(200, 2, 300))) == 1026
    assert round(slora_trace(200, 2, 300, cv=8)[-1].arrival_s) == 433


@pytest.mark.parametrize("pair", [SHAREGPT, ALPACA])
def test_lengths_have_the_means_of_the_paper_and_a_tail(pair: LengthPair) -> None:
    prompts, outputs = pair.draw(2000, np.random.default_rng(0))
    for lengths, mean in ((prompts, pair.prompt_mean), (outputs, pair.output_mean)):
        assert np.mean(lengths) == pytest.approx(mean, abs=0.05)
        assert np.median(lengths) < 0.75 * mean
        assert 10 * mean < max(lengths) <= MAX_TOKENS or max(lengths) == MAX_TOKENS
        assert min(lengths) >= 1


def test_a_chat_turn_begins_with_all_earlier_turns() -> None:
    trace = chat_trace(3, 2, 60, turns=3, shared_tokens=8)
    turns = [request for request in trace if request.thread == 0]
    assert len(turns) == 3
    for before, after in itertools.pairwise(turns):
        said = before.prompt() + [before.thread_token] * before.output_tokens
        assert after.prompt()[: len(said)] == said
        assert after.adapter == before.adapter


def test_chats_share_their_adapters_system_prompt_and_no_more() -> None:
    trace = chat_trace(2, 4, 60, turns=1, shared_tokens=8)
    first = trace[0]
    same = next(r for r in trace[1:] if r.adapter == first.adapter)
    other = next(r for r in trace[1:] if r.adapter != first.adapter)
    assert same.prompt()[:8] == first.prompt()[:8] and same.prompt()[8] != first.prompt()[8]
    assert other.prompt()[0] != first.prompt()[0]
