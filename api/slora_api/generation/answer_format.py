"""Formats answers as the JSON of the two completion APIs, whole or chunk by chunk.

`CompletionFormat` and `ChatFormat` are the two forms of OpenAI's API. All chunks of an answer have the same id, time
and model; `model` is the name that the client sent. This module knows no engine and no HTTP.
"""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

from slora.request import FinishReason
from slora_api.generation.json_slices import LongList
from slora_api.generation.prompt_echo import ScoredToken, TokenText
from slora_api.generation.text_stream import TextDelta

__all__ = ["Answer", "AnswerFormat", "ChatFormat", "CompletionFormat", "Usage"]

Json = dict[str, Any]


@dataclass(slots=True)
class Answer:
    """One complete answer, collected from its deltas."""

    texts: list[str] = field(default_factory=list)
    tokens: list[TokenText] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    logprob: float = 0.0
    scores: tuple[tuple[ScoredToken, ...] | None, ...] = ()

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, delta: TextDelta) -> None:
        self.texts.append(delta.text)
        self.tokens += delta.tokens
        self.finish_reason = delta.finish_reason
        self.logprob += delta.logprob
        # All choices of a prompt share one tuple, so it is written once.
        self.scores = delta.scores or self.scores


@dataclass(slots=True)
class Usage:
    """The token counts to charge.

    completion_tokens: grows with each delta.
    cached_tokens: tokens of the prompt that were found in the prefix cache.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0

    def add(self, delta: TextDelta) -> None:
        self.completion_tokens += delta.num_tokens
        self.cached_tokens += delta.num_cached

    def to_json(self) -> Json:
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class AnswerFormat(Protocol):
    """The JSON form of one API, for one request."""

    def opening(self) -> list[Json]:
        """Chunks that are sent before any text."""

    def chunk(self, delta: TextDelta) -> list[Json]:
        """Chunks that contain the delta."""

    def usage(self, usage: Usage) -> Json:
        """The chunk that contains only the usage."""

    def whole(self, answers: Sequence[Answer], usage: Usage) -> Json:
        """The body of an answer that is not streamed. Lists that may be long are `LongList`s."""


class _Envelope:
    """Makes the fields that all JSON objects of one answer share."""

    __slots__ = ("_created", "_id", "_include_usage", "_model")

    def __init__(self, prefix: str, model: str, *, include_usage: bool) -> None:
        self._id = f"{prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._include_usage = include_usage

    def chunk(self, kind: str, choices: list[Json]) -> Json:
        made = self.whole(kind, choices)
        # With include_usage every chunk has the field; it is null in all but the last.
        return made | {"usage": None} if self._include_usage else made

    def whole(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }


class CompletionFormat:
    """/v1/completions. logprobs: whether the client asked for log-probabilities."""

    def __init__(self, model: str, *, include_usage: bool, logprobs: bool) -> None:
        self._envelope = _Envelope("cmpl", model, include_usage=include_usage)
        self._logprobs = logprobs
        # Answer index -> character position at which its next token starts.
        self._offsets: dict[int, int] = {}

    def opening(self) -> list[Json]:
        return []

    def chunk(self, delta: TextDelta) -> list[Json]:
        if not delta.text and not delta.tokens and delta.finish_reason is None:
            return []
        choice = self._choice(delta.index, delta.text, delta.tokens, delta.finish_reason)
        return [self._envelope.chunk("text_completion", [choice])]

    def usage(self, usage: Usage) -> Json:
        return self._envelope.whole("text_completion", []) | {"usage": usage.to_json()}

    def whole(self, answers: Sequence[Answer], usage: Usage) -> Json:
        scores = _Scores()
        choices = [
            {
                "index": index,
                "text": answer.text,
                "logprobs": self._whole_logprobs(answer.tokens) if self._logprobs else None,
                "finish_reason": answer.finish_reason,
            }
            | scores.to_json(answer)
            for index, answer in enumerate(answers)
        ]
        return self._envelope.whole("text_completion", choices) | {"usage": usage.to_json()}

    def _whole_logprobs(self, tokens: Sequence[TokenText]) -> Json:
        return {
            "tokens": LongList(lambda: (token.text for token in tokens)),
            "token_logprobs": LongList(lambda: (token.logprob for token in tokens)),
            "top_logprobs": LongList(lambda: map(_top_json, tokens)),
            "text_offset": LongList(lambda: accumulate((token.width for token in tokens[:-1]), initial=0))
            if tokens
            else [],
        }

    def _choice(
        self, index: int, text: str, tokens: Sequence[TokenText], reason: FinishReason | None
    ) -> Json:
        logprobs = self._logprobs_json(index, tokens) if self._logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs_json(self, index: int, tokens: Sequence[TokenText]) -> Json:
        offset, offsets = self._offsets.get(index, 0), []
        for token in tokens:
            offsets.append(offset)
            offset += token.width
        self._offsets[index] = offset
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [_top_json(token) for token in tokens],
            "text_offset": offsets,
        }


class ChatFormat:
    """/v1/chat/completions. logprobs: whether the client asked for log-probabilities."""

    def __init__(self, model: str, *, include_usage: bool, logprobs: bool, num_choices: int = 1) -> None:
        self._envelope = _Envelope("chatcmpl", model, include_usage=include_usage)
        self._logprobs = logprobs
        self._num_choices = num_choices

    def opening(self) -> list[Json]:
        first = {"role": "assistant", "content": ""}
        return [self._delta(index, first, ()) for index in range(self._num_choices)]

    def chunk(self, delta: TextDelta) -> list[Json]:
        chunks = []
        if delta.text or delta.tokens:
            chunks.append(self._delta(delta.index, {"content": delta.text}, delta.tokens))
        if delta.finish_reason is not None:
            chunks.append(self._delta(delta.index, {}, (), delta.finish_reason))
        return chunks

    def usage(self, usage: Usage) -> Json:
        return self._envelope.whole("chat.completion.chunk", []) | {"usage": usage.to_json()}

    def whole(self, answers: Sequence[Answer], usage: Usage) -> Json:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": answer.text, "refusal": None},
                "logprobs": self._whole_logprobs(answer.tokens) if self._logprobs else None,
                "finish_reason": answer.finish_reason,
            }
            for index, answer in enumerate(answers)
        ]
        scores = _Scores().to_json(answers[0])
        return self._envelope.whole("chat.completion", choices) | {"usage": usage.to_json()} | scores

    def _whole_logprobs(self, tokens: Sequence[TokenText]) -> Json:
        return {"content": LongList(lambda: map(_content_json, tokens)), "refusal": None}

    def _delta(
        self, index: int, delta: Json, tokens: Sequence[TokenText], reason: FinishReason | None = None
    ) -> Json:
        logprobs = self._logprobs_json(tokens) if tokens else None
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self._envelope.chunk("chat.completion.chunk", [choice])

    def _logprobs_json(self, tokens: Sequence[TokenText]) -> Json | None:
        if not self._logprobs:
            return None
        content = [_content_json(token) for token in tokens]
        return {"content": content, "refusal": None}


class _Scores:
    """Formats `prompt_logprobs` as vLLM does: for each token of the prompt an object of tokens by id. All choices of a
    prompt share the list.
    """

    def __init__(self) -> None:
        self._lists: dict[int, LongList] = {}

    def to_json(self, answer: Answer) -> Json:
        """Empty if the client did not ask for prompt log-probabilities."""
        places = answer.scores
        if not places:
            return {}
        made = self._lists.setdefault(id(places), LongList(lambda: map(_place_json, places)))
        return {"prompt_logprobs": made}


def _place_json(place: tuple[ScoredToken, ...] | None) -> Json | None:
    if place is None:
        return None
    return {
        str(token.token_id): {"logprob": token.logprob, "rank": token.rank, "decoded_token": token.text}
        for token in place
    }


def _top_json(token: TokenText) -> dict[str, float] | None:
    """The most probable tokens, and always the token itself, even if it is not among them."""
    return None if token.logprob is None else {**dict(token.top), token.text: token.logprob}


def _content_json(token: TokenText) -> Json:
    top = [_token_json(text, logprob) for text, logprob in token.top]
    return _token_json(token.text, token.logprob) | {"top_logprobs": top}


def _token_json(text: str, logprob: float | None) -> Json:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "surrogatepass"))}
