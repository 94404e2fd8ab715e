"""Beam search alone, compared with a plain search that ranks every continuation, and with all possible answers."""

import itertools
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slora.core.request import FinishReason
from slora.core.sampling_params import SamplingParams
from slora.scheduler.beam_search import BeamSearch, Hypothesis, Proposal
from tests.support.beam_model import Model, beam_params, propose, random_model, search_plainly


def run(model: Model, params: SamplingParams, stop_ids: frozenset[int], vocab_size: int) -> list[Hypothesis]:
    """Runs the search as the engine does: each beam keeps its own tokens and applies the search's decisions."""
    search = BeamSearch(params, stop_ids)
    beams: dict[int, tuple[int, ...]] = {0: ()}
    assert params.max_tokens is not None
    for _ in range(params.max_tokens):
        assert sorted(search.beams) == sorted(beams)
        for beam in Random(len(beams[min(beams)])).sample(list(beams), len(beams)):
            assert not search.is_ready and not search.has_proposed(beam)
            count = min(vocab_size, params.width + len(stop_ids))
            search.propose(beam, propose(model, beams[beam], count, top=params.logprobs))
        survivors = search.advance(params.max_tokens)
        if survivors is None:
            return search.best(params.n)
        forks = {beam: (*beams[parent], token) for parent, beam, token in survivors.forks}
        assert {fork.parent for fork in survivors.forks} <= set(survivors.kept)
        kept = {beam: (*beams[beam], token) for beam, token in survivors.kept.items()}
        assert set(survivors.dropped) == set(beams) - set(kept) and not set(kept) & set(forks)
        beams = kept | forks
        assert len(beams) <= params.width and set(beams) <= set(range(params.width))
    raise AssertionError("the search went on beyond the greatest length")


@given(
    seed=st.integers(0, 10**6),
    vocab_size=st.integers(2, 9),
    width=st.integers(1, 5),
    n=st.integers(1, 5),
    stops=st.sets(st.integers(0, 8), max_size=3),
    barred=st.sets(st.integers(0, 8), max_size=1),
    max_tokens=st.integers(1, 7),
    length_penalty=st.sampled_from([0.0, 0.5, 1.0, 2.0, -1.0]),
    early_stopping=st.booleans(),
)
def test_a_search_agrees_with_ranking_every_continuation(
    seed: int,
    vocab_size: int,
    width: int,
    n: int,
    stops: set[int],
    barred: set[int],
    max_tokens: int,
    length_penalty: float,
    early_stopping: bool,
) -> None:
    params = beam_params(max(width, n), n, max_tokens, length_penalty, early_stopping=early_stopping)
    model, stop_ids = random_model(vocab_size, seed, barred=frozenset(barred)), frozenset(stops)
    found = run(model, params, stop_ids, vocab_size)
    expected = search_plainly(model, params, stop_ids, max_tokens)
    assert [one.token_ids for one in found] == [one.tokens for one in expected]
    assert [one.score for one in found] == pytest.approx([one.score for one in expected])
    for one in found:
        ended = one.token_ids[-1] in stop_ids
        assert one.finish_reason == (FinishReason.STOP if ended else FinishReason.LENGTH)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
def test_a_search_as_wide_as_there_are_answers_finds_the_best_of_all(
    seed: int, length_penalty: float
) -> None:
    """Three tokens, one of which ends the answer, and at most four tokens: 1 + 2 + 4 + 8 * 3 answers."""
    model, stop_ids = random_model(3, seed), frozenset([0])
    answers = [
        (*tokens, last)
        for length in range(1, 5)
        for tokens in itertools.product([1, 2], repeat=length - 1)
        for last in ([0, 1, 2] if length == 4 else [0])
    ]
    assert len(answers) == 31

    def score(tokens: tuple[int, ...]) -> float:
        total = sum(model(tokens[:place])[token] for place, token in enumerate(tokens))
        return total / len(tokens) ** length_penalty

    best = sorted(answers, key=score, reverse=True)
    found = run(model, beam_params(31, 10, 4, length_penalty, early_stopping=False), stop_ids, 3)
    assert [one.token_ids for one in found] == best[:10]
    assert [one.score for one in found] == pytest.approx([score(tokens) for tokens in best[:10]])


# END and STOP end a hypothesis. The other four tokens do not.
END, STOP, A, B, C, D = range(6)


def start(width: int, *, length_penalty: float = 0.0, early_stopping: bool = False) -> BeamSearch:
    params = beam_params(width, width, 9, length_penalty, early_stopping=early_stopping)
    return BeamSearch(params, frozenset([END, STOP]))


def say(search: BeamSearch, beam: int, **chances: float) -> None:
    """Proposes tokens by name, the most probable first."""
    ids = {"end": END, "stop": STOP, "a": A, "b": B, "c": C, "d": D}
    scores = list(chances.values())
    search.propose(beam, Proposal([ids[name] for name in chances], scores, scores))


def test_only_endings_among_the_best_proposals_become_hypotheses() -> None:
    """With a width of 2, an ending token counts only among the first two continuations.

    If the third one counted, there would be two hypotheses and the search would end.
    """
    search = start(2, early_stopping=True)
    say(search, 0, end=-0.1, a=-0.5, stop=-0.6, b=-0.7)
    assert search.advance(9) is not None
    assert [one.token_ids for one in search.best(2)] == [(END,)]


def test_a_search_ends_when_its_best_beam_can_at_most_tie() -> None:
    search = start(1)
    say(search, 0, end=-1.0, a=-1.0)
    assert search.advance(9) is None


@pytest.mark.parametrize("best", [-1.5, -1.15])
def test_only_the_best_hypotheses_decide_when_a_search_ends(best: float) -> None:
    """Three hypotheses have ended, and the worst, -3, is dropped. An open beam must beat -1.2."""
    search = start(2)
    say(search, 0, a=-0.1, stop=-3.0, b=-4.0)
    assert search.advance(9) is not None
    say(search, 0, end=-0.2, c=-1.0, d=-1.02)
    say(search, 1, end=-8.0, a=-9.0, b=-9.0)
    assert search.advance(9) is not None and search.beams == [0, 1]
    say(search, 0, end=-0.1, a=-0.9, b=-8.0)
    say(search, 1, a=best + 1.12, b=-8.0, c=-8.0)
    assert (search.advance(9) is None) == (best < -1.2)
    assert [one.token_ids for one in search.best(9)] == [(A, END), (A, C, END)]


def test_equal_scores_keep_their_order() -> None:
    """Ties keep their order: hypotheses by the time they ended, continuations by beam, proposals by position."""
    search = start(3)
    say(search, 0, a=-1.0, end=-1.0, stop=-1.0, c=-1.0, b=-1.0)
    survivors = search.advance(9)
    assert survivors is not None and survivors.kept == {0: A}
    assert [(fork.beam, fork.token_id) for fork in survivors.forks] == [(1, C), (2, B)]
    for beam in search.beams:
        say(search, beam, d=-0.5, a=-0.5, b=-2.0)
    survivors = search.advance(9)
    assert survivors is not None and survivors.kept == {0: D, 1: D} and search.beams == [0, 2, 1]
    assert survivors.forks == [(0, 2, A)] and survivors.dropped == [2]
    assert [one.token_ids for one in search.best(3)] == [(END,), (STOP,)]


def test_hypotheses_report_model_logprobs_without_the_requests_biases() -> None:
    """The second token has a bias of 2. The bias counts in the ranking, but not in the reported log-probability."""
    search = start(1)
    search.propose(0, Proposal([A, END], [1.0, -0.4], [-1.0, -0.4], ((END, -0.4),)))
    assert search.advance(9) is not None
    search.propose(0, Proposal([END, A], [-0.1, -2.0], [-0.1, -2.0], ((END, -0.1),)))
    assert search.advance(9) is None
    (best,) = search.best(1)
    assert best.score == pytest.approx(0.9) and best.logprobs is not None
    assert [entry.logprob for entry in best.logprobs] == [-1.0, -0.1]
