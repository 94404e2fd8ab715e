"""What simulated beams expect is a distribution, repeatable, and as peaked as the module says."""

import math

import pytest

from bench.simulation.next_tokens import NextTokens
from slora.scheduler.beam_search import BeamSearch
from tests.support.beam_model import beam_params


def test_proposals_are_sorted_and_cover_most_of_the_probability() -> None:
    first = []
    for thread in range(400):
        proposal = NextTokens(None).propose(thread, [], 8)
        assert proposal.scores == sorted(proposal.scores, reverse=True)
        assert len(set(proposal.token_ids)) == 8
        chances = [math.exp(score) for score in proposal.scores]
        assert 0.9 < sum(chances) < 1 + 1e-9
        first.append(chances[0])
    assert sum(first) / len(first) == pytest.approx(0.624, abs=0.02)  # Golomb's and Dickman's constant


@pytest.mark.parametrize(("memory_tokens", "agree"), [(0, 3), (2, 2), (None, 1)])
def test_beams_with_the_same_last_tokens_get_the_same_proposals(
    memory_tokens: int | None, agree: int
) -> None:
    """Of three, one ends as the first does, and one otherwise."""
    next_tokens = NextTokens(memory_tokens)
    answers = [[5, 6, 7], [1, 6, 7], [5, 6, 8]]
    proposals = [next_tokens.propose(0, answer, 4) for answer in answers]
    assert sum(one == proposals[0] for one in proposals) == agree
    assert next_tokens.propose(0, answers[0], 4) == proposals[0]
    assert next_tokens.propose(1, answers[0], 4) != proposals[0]
    assert next_tokens.propose(0, [6, 7], 4) != proposals[0]  # so that no text goes round in circles


def test_sixteen_beams_find_text_as_likely_as_those_of_gpt_2() -> None:
    """Perplexity 1.48 (Holtzman et al., table 1); ours is that of 8 texts of 100 tokens."""
    next_tokens, params = NextTokens(None), beam_params(16, 1, 100, 1.0, early_stopping=False)
    scores = []
    for thread in range(8):
        search = BeamSearch(params, frozenset())
        answers: dict[int, list[int]] = {0: []}
        while True:
            for beam, answer in answers.items():
                search.propose(beam, next_tokens.propose(thread, answer, 16))
            survivors = search.advance(100)
            if survivors is None:
                break
            forks = {beam: [*answers[parent], token] for parent, beam, token in survivors.forks}
            answers = {beam: [*answers[beam], token] for beam, token in survivors.kept.items()} | forks
        scores.append(search.best(1)[0].score)
    assert math.exp(-sum(scores) / len(scores)) == pytest.approx(1.48, abs=0.05)
