"""What an answer says of its own prompt: the text before it (`echo`), and how likely each token of it was.

Knows no HTTP and no JSON.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from slora.request import TokenLogprobs
from slora.text.tokenizer import Tokenizer

__all__ = ["PromptEcho", "ScoredToken", "TokenText", "echo_tokens", "score_tokens"]


@dataclass(frozen=True, slots=True)
class TokenText:
    """One token as logprobs show it. top: (text, logprob) of the likeliest tokens, most likely first.

    logprob: None for the first token of a prompt. width: the characters of the text that are its own.
    """

    text: str
    logprob: float | None
    top: tuple[tuple[str, float], ...]
    width: int


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token in a place of the prompt. rank: 1 for the likeliest; None beyond those that were asked for."""

    token_id: int
    text: str
    logprob: float
    rank: int | None


@dataclass(frozen=True, slots=True)
class PromptEcho:
    """What is wanted. text: the prompt as it is to stand before the answer, None if it is not.

    logprobs: as many of the likeliest tokens beside each of the prompt's; None if the text is all. alone: no answer
    is to follow (max_tokens 0). scores: as many of the likeliest tokens for `prompt_logprobs`; None if not asked for.
    """

    text: str | None = None
    logprobs: int | None = None
    scores: int | None = None
    alone: bool = False

    @property
    def most_logprobs(self) -> int | None:
        """What the engine is to be asked for."""
        asked = [count for count in (self.logprobs, self.scores) if count is not None]
        return max(asked, default=None)


def echo_tokens(
    tokenizer: Tokenizer, token_ids: Sequence[int], scores: Sequence[TokenLogprobs | None], count: int
) -> tuple[TokenText, ...]:
    """Each token of a prompt with its share of the text, as `Tokenizer.measure` divides it."""
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
    """For each token of a prompt the `count` likeliest in its place, and itself if it is not among them."""
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
