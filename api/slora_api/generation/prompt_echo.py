"""The text of a prompt that an answer repeats (`echo`), and the log-probabilities of the prompt's tokens.

This module knows no HTTP and no JSON.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from slora.request import TokenLogprobs
from slora.text.tokenizer import Tokenizer

__all__ = ["PromptEcho", "ScoredToken", "TokenText", "echo_tokens", "score_tokens"]


@dataclass(frozen=True, slots=True)
class TokenText:
    """One token as log-probabilities show it.

    logprob: None for the first token of a prompt.
    top: (text, logprob) of the most probable tokens, the most probable first.
    width: number of characters that the token contributes to the text.
    """

    text: str
    logprob: float | None
    top: tuple[tuple[str, float], ...]
    width: int


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """One candidate token at a position of the prompt.

    rank: 1 for the most probable token; None if the rank is larger than the number of requested tokens.
    """

    token_id: int
    text: str
    logprob: float
    rank: int | None


@dataclass(frozen=True, slots=True)
class PromptEcho:
    """What the request wants to know about its prompt.

    text: the prompt's text, to be repeated before the answer; None if it is not repeated.
    logprobs: number of most probable tokens for each token of the repeated prompt; None without log-probabilities.
    scores: the value of `prompt_logprobs`; None if it was not sent.
    alone: whether no answer follows (max_tokens 0).
    """

    text: str | None = None
    logprobs: int | None = None
    scores: int | None = None
    alone: bool = False

    @property
    def most_logprobs(self) -> int | None:
        """The value of `prompt_logprobs` in the request to the engine."""
        asked = [count for count in (self.logprobs, self.scores) if count is not None]
        return max(asked, default=None)


def echo_tokens(
    tokenizer: Tokenizer, token_ids: Sequence[int], scores: Sequence[TokenLogprobs | None], count: int
) -> tuple[TokenText, ...]:
    """Returns each token of a prompt with its part of the text, as `Tokenizer.measure` divides it."""
    tokens = []
    for token_id, width, score in zip(token_ids, tokenizer.measure(token_ids), scores, strict=True):
        text = tokenizer.token_text(token_id)
        if score is None:
            tokens.append(TokenText(text, None, (), width))
            continue
        top = tuple((tokenizer.token_text(other), logprob) for other, logprob in score.top[:count])
        tokens.append(TokenText(text, score.logprob, top, width))
    return tuple(tokens)


def score_tokens(
    tokenizer: Tokenizer, token_ids: Sequence[int], scores: Sequence[TokenLogprobs | None], count: int
) -> tuple[tuple[ScoredToken, ...] | None, ...]:
    """Returns for each position of a prompt the `count` most probable tokens, and the actual token if it is not among
    them.
    """
    places: list[tuple[ScoredToken, ...] | None] = []
    for token_id, score in zip(token_ids, scores, strict=True):
        if score is None:
            places.append(None)
            continue
        ranks: dict[int, int | None] = {other: rank for rank, (other, _) in enumerate(score.top, 1)}
        shown = {**dict(score.top[:count]), token_id: score.logprob}
        places.append(
            tuple(
                ScoredToken(other, tokenizer.token_text(other), logprob, ranks.get(other))
                for other, logprob in shown.items()
            )
        )
    return tuple(places)
