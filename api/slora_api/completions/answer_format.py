"""Formats completions as the JSON of the two completion APIs, either as one body or chunk by chunk.

`CompletionFormat` and `ChatFormat` are the two forms of OpenAI's API. All chunks of an answer have the same id, time
and model; `model` is the name that the client sent. Token ids are added in vLLM's form if the request asks for them.
Otherwise, an answer that is not streamed has null in their place.
In a stream, each event is one `data: {json}`, and `data: [DONE]` ends the stream. This module does not depend on the
engine.
"""

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

from slora.core.request import FinishReason, TokenLogprobs
from slora.text.answer import AlignedToken, Completion, CompletionDelta
from slora.text.tokenizer import Tokenizer
from slora_api.chat.answer_reader import ReasoningCounter
from slora_api.chat.chat_parts import ChatParts
from slora_api.completions.answer_objects import TimingObject
from slora_api.completions.schemas import ChatRequest, CompletionRequest, GenerationFields
from slora_api.core.errors import ErrorAnswer
from slora_api.http.json_slices import LongList, encode_ascii
from slora_api.http.sse import KEEP_ALIVE

Json = dict[str, Any]
_DONE = b"data: [DONE]\n\n"
# Makes a list from a function that yields the items. The function is called either immediately or only while the JSON
# is written (`LongList`).
_Lister = Callable[[Callable[[], Iterable[Any]]], Any]


@dataclass(slots=True)
class AnswerUsage:
    """The token counts to charge.

    reasoning: counts the tokens of reasoning; None if the answers have no reasoning.
    completion_tokens, reasoning_tokens: grow with each delta.
    cached_tokens: tokens of the prompt that were found in the prefix cache.
    timing: the timing of the answer, set at its end.
    """

    prompt_tokens: int
    reasoning: ReasoningCounter | None = None
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    timing: TimingObject | None = None

    def add(self, delta: CompletionDelta) -> None:
        self.completion_tokens += len(delta.token_ids)
        self.cached_tokens += delta.num_cached_tokens
        if self.reasoning is not None:
            is_last = delta.finish_reason is not None
            self.reasoning_tokens += self.reasoning.add(
                delta.choice, len(delta.token_ids), delta.text, is_last=is_last
            )

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def to_json(self) -> Json:
        made: Json = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.total_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.reasoning is not None:
            made["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return made


class AnswerFormat(Protocol):
    """Formats the answers to one request in the JSON of one API. The methods for streams return the parts of
    server-sent events. Parts may be made lazily, when the caller takes them.

    keep_alive: what a stream sends while there is nothing else to send.
    reads_text: whether `whole` searches the texts for tool calls and reasoning. This is slow for a long text.
    """

    @property
    def keep_alive(self) -> bytes: ...

    @property
    def reads_text(self) -> bool: ...

    def opening(self, usage: AnswerUsage) -> Iterable[bytes]:
        """Returns the events that come before any text."""

    def events(self, delta: CompletionDelta, usage: AnswerUsage) -> Iterable[bytes]:
        """Returns the events that contain the delta; none if the delta has nothing to show.

        usage: the usage so far, which includes the delta.
        """

    def closing(self, usage: AnswerUsage) -> Iterable[bytes]:
        """Returns the events that end a complete stream."""

    def failure(self, error: ErrorAnswer) -> Iterable[bytes]:
        """Returns the events that end a stream with an error."""

    def whole(self, completions: Sequence[Completion], usage: AnswerUsage) -> Json:
        """Returns the body of an answer that is not streamed. Lists that may be long are `LongList`s."""


class _Envelope:
    """Makes the fields that all JSON objects of one answer share.

    model: the name in the request. fields: the fields of the request. chunk_kind: the value of the field `object` in
        each chunk of a stream.
    """

    __slots__ = (
        "_chunk_start",
        "_includes_timing",
        "_includes_usage",
        "_is_usage_continuous",
        "_shared",
        "_usage_field",
    )

    def __init__(self, prefix: str, model: str, fields: GenerationFields, chunk_kind: str) -> None:
        self._includes_usage = fields.include_usage
        self._is_usage_continuous = fields.continuous_usage
        self._includes_timing = fields.include_timing
        self._shared: Json = {
            "id": f"{prefix}-{fields.request_id or uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }
        # As in OpenAI's API, an answer has the field `service_tier` only if the request has it.
        if fields.service_tier is not None:
            self._shared["service_tier"] = "default"
        # The fields are encoded once, because encoding them for each chunk takes 8 microseconds.
        self._chunk_start = f"data: {encode_ascii(self.whole(chunk_kind, []))[:-2]}"
        # With include_usage, every chunk has the field `usage`. It is null in all chunks but the last.
        self._usage_field = ',"usage":null' if fields.include_usage else ""

    def event(self, choice: str, usage: AnswerUsage, prompt_token_ids: Sequence[int] | None = None) -> bytes:
        """Returns the event of one chunk. choice: the only choice of the chunk, as JSON."""
        usage_field = _encode_usage(usage) if self._is_usage_continuous else self._usage_field
        prompt = "" if prompt_token_ids is None else f',"prompt_token_ids":{encode_ascii(prompt_token_ids)}'
        return f"{self._chunk_start}{choice}]{usage_field}{prompt}}}\n\n".encode("ascii")

    def closing(self, usage: AnswerUsage) -> Iterator[bytes]:
        if self._includes_usage:
            metrics = ""
            if self._includes_timing and usage.timing is not None:
                metrics = f',"metrics":{encode_ascii(usage.timing)}'
            yield f"{self._chunk_start}]{_encode_usage(usage)}{metrics}}}\n\n".encode("ascii")
        yield _DONE

    def failure(self, error: ErrorAnswer) -> Iterator[bytes]:
        yield f"data: {encode_ascii(error.body)}\n\n".encode("ascii")

    def whole(self, kind: str, choices: list[Json]) -> Json:
        return {**self._shared, "object": kind, "choices": choices}


class LogprobsFormat:
    """Formats log-probabilities in OpenAI's two forms, and the field `prompt_logprobs` in vLLM's form.

    num_top: how many of the most probable tokens to list for each token of the answer and of an echo. None: the client
        asked for no log-probabilities.
    num_prompt_top: the same for each token of the prompt; the value of the field `prompt_logprobs`.
    shows_ids: whether to write `token_id:7` instead of the text of token 7.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        num_top: int | None = None,
        num_prompt_top: int | None = None,
        *,
        shows_ids: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._num_prompt_top = num_prompt_top
        self._shows_ids = shows_ids
        # Kept, because looking up a text takes 3 microseconds, and the same tokens are listed again and again.
        self._texts: dict[int, str] = {}
        self._token_bytes: dict[tuple[int, bool], list[int]] = {}

    def _text(self, token_id: int) -> str:
        if (text := self._texts.get(token_id)) is None:
            text = f"token_id:{token_id}" if self._shows_ids else self._tokenizer.token_text(token_id)
            self._texts[token_id] = text
        return text

    def _bytes(self, token_id: int, is_first: bool) -> list[int]:
        if (found := self._token_bytes.get((token_id, is_first))) is None:
            found = [*self._tokenizer.token_bytes(token_id, is_first=is_first)]
            self._token_bytes[token_id, is_first] = found
        return found

    def columns(
        self, tokens: Sequence[AlignedToken], make_list: _Lister, first_offset: int = 0
    ) -> Json | None:
        """Returns the field `logprobs` of /v1/completions. first_offset: character position at which the first token
        starts.
        """
        if self._num_top is None:
            return None
        widths = [token.width for token in tokens]
        return {
            "tokens": make_list(lambda: (self._text(token.token_id) for token in tokens)),
            "token_logprobs": make_list(
                lambda: (token.logprobs.logprob if token.logprobs else None for token in tokens)
            ),
            "top_logprobs": make_list(lambda: map(self._top, tokens)),
            "text_offset": make_list(lambda: accumulate(widths[:-1], initial=first_offset) if widths else ()),
        }

    def content(self, tokens: Sequence[AlignedToken], make_list: _Lister) -> Json | None:
        """Returns the field `logprobs` of /v1/chat/completions."""
        if self._num_top is None:
            return None
        return {"content": make_list(lambda: map(self.content_token, tokens)), "refusal": None}

    def prompt(self, completion: Completion) -> Json:
        """Returns the field `prompt_logprobs`. For each token of the prompt, the field has an object that maps token
        ids to log-probabilities. As in vLLM, the field is null if the client did not ask for it.
        """
        if self._num_prompt_top is None or completion.prompt_logprobs is None:
            return {"prompt_logprobs": None}
        tokens = completion.prompt_token_ids, completion.prompt_logprobs
        return {"prompt_logprobs": LongList(lambda: map(self._prompt_token, *tokens))}

    def _top(self, token: AlignedToken) -> dict[str, float] | None:
        """Returns the log-probabilities of the token and of the most probable tokens. As in vLLM, the token itself
        comes first. A token with the text of an earlier one is named by its id.
        """
        if token.logprobs is None:
            return None
        listed = {token.token_id: token.logprobs.logprob, **dict(token.logprobs.top[: self._num_top])}
        named: dict[str, float] = {}
        for token_id, logprob in listed.items():
            text = self._text(token_id)
            named[f"token_id:{token_id}" if text in named else text] = logprob
        return named

    def content_token(self, token: AlignedToken) -> Json:
        assert token.logprobs is not None, "a chat has no echo, so every token has log-probabilities"
        top = token.logprobs.top[: self._num_top]
        own = self._token_json(token.token_id, token.logprobs.logprob, token.is_first)
        return own | {"top_logprobs": [self._token_json(*other, token.is_first) for other in top]}

    def _token_json(self, token_id: int, logprob: float, is_first: bool) -> Json:
        return {"token": self._text(token_id), "logprob": logprob, "bytes": self._bytes(token_id, is_first)}

    def _prompt_token(self, token_id: int, logprobs: TokenLogprobs | None) -> Json | None:
        """Returns the entry of one token of the prompt. A rank is null if the token is not among the most probable
        tokens that the engine listed.
        """
        if logprobs is None:
            return None
        ranks = {other: rank for rank, (other, _) in enumerate(logprobs.top, 1)}
        listed = {**dict(logprobs.top[: self._num_prompt_top]), token_id: logprobs.logprob}
        return {
            str(other): {"logprob": logprob, "rank": ranks.get(other), "decoded_token": self._text(other)}
            for other, logprob in listed.items()
        }


class CompletionFormat:
    """Formats the answers of /v1/completions.

    model: the name in the request. prompts: the token ids of each prompt.
    num_choices: number of choices for each prompt of a stream.
    """

    keep_alive = KEEP_ALIVE

    def __init__(
        self,
        model: str,
        fields: CompletionRequest,
        logprobs: LogprobsFormat,
        prompts: Sequence[Sequence[int]],
        num_choices: int = 1,
    ) -> None:
        self._envelope = _Envelope("cmpl", model, fields, "text_completion")
        self._has_ids = bool(fields.return_token_ids)
        self._logprobs = logprobs
        self._num_choices = num_choices
        # Choice -> character position at which its next token starts.
        self._offsets: dict[int, int] = {}
        self._prompts = prompts
        # The ids of each prompt as JSON. A prompt may have 131,072 ids, so it is made once for all of its choices.
        self._encoded_prompts: dict[int, str] = {}

    @property
    def reads_text(self) -> bool:
        return False

    def opening(self, usage: AnswerUsage) -> Iterable[bytes]:
        return ()

    def events(self, delta: CompletionDelta, usage: AnswerUsage) -> Iterable[bytes]:
        has_ids = self._has_ids and bool(delta.token_ids)
        if not delta.text and not delta.tokens and delta.finish_reason is None and not has_ids:
            return ()
        index = delta.index * self._num_choices + delta.choice
        is_first = index not in self._offsets
        offset = self._offsets.get(index, 0)
        if delta.tokens or is_first:
            self._offsets[index] = offset + sum(token.width for token in delta.tokens)
        logprobs = self._logprobs.columns(delta.tokens, _list_now, offset)
        rest = _encode_rest(logprobs, delta.finish_reason, delta.token_ids if self._has_ids else None)
        if self._has_ids and is_first:
            if delta.index not in self._encoded_prompts:
                self._encoded_prompts[delta.index] = encode_ascii(self._prompts[delta.index])
            rest += f',"prompt_token_ids":{self._encoded_prompts[delta.index]}'
        choice = f'{{"index":{index},"text":{encode_ascii(delta.text)},{rest}}}'
        return (self._envelope.event(choice, usage),)

    def closing(self, usage: AnswerUsage) -> Iterable[bytes]:
        return self._envelope.closing(usage)

    def failure(self, error: ErrorAnswer) -> Iterable[bytes]:
        return self._envelope.failure(error)

    def whole(self, completions: Sequence[Completion], usage: AnswerUsage) -> Json:
        choices: list[Json] = []
        for completion in completions:
            prompt = self._logprobs.prompt(completion)
            prompt["prompt_token_ids"] = _long_list(completion.prompt_token_ids) if self._has_ids else None
            for choice in completion.choices:
                logprobs = self._logprobs.columns(choice.tokens, LongList)
                made = _text_choice(len(choices), choice.text, logprobs, choice.finish_reason)
                made["token_ids"] = _long_list(choice.token_ids) if self._has_ids else None
                choices.append(made | prompt)
        return self._envelope.whole("text_completion", choices) | {"usage": usage.to_json()}


class ChatFormat:
    """Formats the answers of /v1/chat/completions.

    model: the name in the request. prompt: the token ids of the prompt. num_choices: number of choices in a stream.
    parts: splits answers that have tool calls or reasoning; None if an answer has only content.
    """

    keep_alive = KEEP_ALIVE

    def __init__(
        self,
        model: str,
        fields: ChatRequest,
        logprobs: LogprobsFormat,
        prompt: Sequence[int],
        num_choices: int = 1,
        parts: ChatParts | None = None,
    ) -> None:
        self._parts = parts
        self._envelope = _Envelope("chatcmpl", model, fields, "chat.completion.chunk")
        self._has_ids = bool(fields.return_token_ids)
        self._logprobs = logprobs
        self._prompt = prompt
        self._num_choices = num_choices

    @property
    def reads_text(self) -> bool:
        return self._parts is not None

    def opening(self, usage: AnswerUsage) -> Iterator[bytes]:
        first = encode_ascii({"role": "assistant", "content": "" if self._parts is None else None})
        prompts = [self._prompt if self._has_ids else None] + [None] * (self._num_choices - 1)
        for index, prompt in enumerate(prompts):
            yield self._envelope.event(_encode_delta(index, first, _encode_rest()), usage, prompt)

    def events(self, delta: CompletionDelta, usage: AnswerUsage) -> Iterator[bytes]:
        token_ids = delta.token_ids if self._has_ids else ()
        if self._parts is not None:
            yield from self._part_events(self._parts, delta, token_ids, usage)
            return
        if delta.text or delta.tokens or token_ids:
            content = f'{{"content":{encode_ascii(delta.text)}}}'
            yield self._event(delta.choice, content, usage, delta.tokens, token_ids=token_ids)
        if delta.finish_reason is not None:
            yield self._event(delta.choice, "{}", usage, (), delta.finish_reason)

    def _part_events(
        self, parts: ChatParts, delta: CompletionDelta, token_ids: Sequence[int], usage: AnswerUsage
    ) -> Iterator[bytes]:
        """Yields the events of a delta with tool calls or reasoning. The first event has all tokens of the delta, even
        if their text is held back for later events.
        """
        choice, reason = delta.choice, delta.finish_reason
        fields = parts.deltas(choice, delta.text, is_last=reason is not None)
        if not fields and (delta.tokens or token_ids):
            fields = [{}]
        tokens = delta.tokens
        for part in fields:
            yield self._event(choice, encode_ascii(part), usage, tokens, token_ids=token_ids)
            tokens, token_ids = (), ()
        if reason is not None:
            yield self._event(choice, "{}", usage, (), parts.finish_reason(choice, reason))

    def closing(self, usage: AnswerUsage) -> Iterable[bytes]:
        return self._envelope.closing(usage)

    def failure(self, error: ErrorAnswer) -> Iterable[bytes]:
        return self._envelope.failure(error)

    def whole(self, completions: Sequence[Completion], usage: AnswerUsage) -> Json:
        (completion,) = completions
        choices: list[Json] = []
        for choice in completion.choices:
            index = len(choices)
            reason: str = choice.finish_reason
            if self._parts is None:
                message = {"role": "assistant", "content": choice.text, "refusal": None}
            else:
                message = self._parts.message(index, choice.text)
                reason = self._parts.finish_reason(index, choice.finish_reason)
            made: Json = {
                "index": index,
                "message": message,
                "logprobs": self._logprobs.content(choice.tokens, LongList),
                "finish_reason": reason,
                "token_ids": _long_list(choice.token_ids) if self._has_ids else None,
            }
            choices.append(made)
        about: Json = {"usage": usage.to_json()} | self._logprobs.prompt(completion)
        about["prompt_token_ids"] = _long_list(completion.prompt_token_ids) if self._has_ids else None
        return self._envelope.whole("chat.completion", choices) | about

    def _event(
        self,
        index: int,
        delta: str,
        usage: AnswerUsage,
        tokens: Sequence[AlignedToken] = (),
        reason: str | None = None,
        token_ids: Sequence[int] = (),
    ) -> bytes:
        """Returns the event of one delta. delta: the value of the field `delta`, as JSON."""
        logprobs = self._logprobs.content(tokens, _list_now) if tokens else None
        rest = _encode_rest(logprobs, reason, token_ids or None)
        return self._envelope.event(_encode_delta(index, delta, rest), usage)


def _text_choice(index: int, text: str, logprobs: Json | None, reason: FinishReason | None) -> Json:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _encode_delta(index: int, delta: str, rest: str) -> str:
    """Returns the choice of a streamed chat, as JSON. delta, rest: as JSON."""
    return f'{{"index":{index},"delta":{delta},{rest}}}'


def _encode_rest(
    logprobs: Json | None = None, reason: str | None = None, token_ids: Sequence[int] | None = None
) -> str:
    """Returns, as JSON, the fields of a streamed choice that follow the text. token_ids: None leaves the field out."""
    if logprobs is None and reason is None and token_ids is None:  # This is nearly always the case.
        return '"logprobs":null,"finish_reason":null'
    ids = {} if token_ids is None else {"token_ids": token_ids}
    return encode_ascii({"logprobs": logprobs, "finish_reason": reason, **ids})[1:-1]


def _encode_usage(usage: AnswerUsage) -> str:
    return f',"usage":{encode_ascii(usage.to_json())}'


def _list_now(items: Callable[[], Iterable[Any]]) -> list[Any]:
    return list(items())


def _long_list(token_ids: Sequence[int]) -> LongList:
    return LongList(lambda: token_ids)
