"""Formats an answer as the JSON of /v1/responses, either as one body or event by event.

The answer is a list of items in the order in which the model wrote them: reasoning, messages and function calls. The
last events of a text repeat the whole text several times. So each text is encoded once, and these events are written in
slices.

Finds the tokens of an answer's content, so that their log-probabilities can be listed with the content.
"""

import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from slora.core.request import FinishReason
from slora.core.sampling_params import SamplingParams
from slora.text.answer import AlignedToken, Completion, CompletionDelta
from slora_api.chat.answer_reader import AnswerReader, AnswerSyntax
from slora_api.chat.chat_parts import make_call_id
from slora_api.chat.text_reader import Piece, PieceKind
from slora_api.chat.tool_schemas import read_custom_input
from slora_api.completions.answer_format import AnswerUsage, LogprobsFormat
from slora_api.core.errors import ErrorAnswer
from slora_api.http.json_slices import LongList, Once, Written, encode_ascii, slice_ascii
from slora_api.http.sse import KEEP_ALIVE
from slora_api.responses.responses_request import ResponsesRequest

Json = dict[str, Any]
_TOO_MANY_REQUESTS = 429
_PREFIXES = {PieceKind.REASONING: "rs", PieceKind.CONTENT: "msg", PieceKind.CALL: "fc"}


class ContentTokens:
    """Assigns each token of one answer to the first piece of content with which the token overlaps.

    Tokens of reasoning, tool calls and markers are dropped.
    """

    def __init__(self) -> None:
        # Each token with the position of its first character in the answer.
        self._held: deque[tuple[int, AlignedToken]] = deque()
        self._num_chars = 0

    def add(self, tokens: Iterable[AlignedToken]) -> None:
        for token in tokens:
            self._held.append((self._num_chars, token))
            self._num_chars += token.width

    def take(self, start: int, end: int) -> list[AlignedToken]:
        """Returns the tokens of the content from `start` to `end`. Positions must not decrease between calls."""
        taken = []
        while self._held and self._held[0][0] < end:
            first, token = self._held.popleft()
            if first >= start or first + token.width > start:
                taken.append(token)
        return taken


def _make_id(prefix: str, end: str | None = None) -> str:
    return f"{prefix}_{end or uuid.uuid4().hex}"


@dataclass(slots=True)
class _Item:
    """One item of an answer.

    index: the position in the list of items.
    texts, logprobs: the parts that have arrived. For a stream, these parts are already JSON.
    name, call_id: the tool's name and the id of a call. is_custom: whether the tool is a custom tool.
    """

    kind: PieceKind
    index: int
    name: str = ""
    status: str = "in_progress"
    texts: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    is_custom: bool = False
    item_id: str = ""
    call_id: str = ""

    def __post_init__(self) -> None:
        self.item_id = _make_id("ctc" if self.is_custom else _PREFIXES[self.kind])
        self.call_id = make_call_id() if self.kind is PieceKind.CALL else ""

    def part(self, text: Any, logprobs: Any) -> Json:
        """Returns the only part of a message or of reasoning."""
        if self.kind is PieceKind.REASONING:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "annotations": [], "logprobs": logprobs, "text": text}

    def to_json(self, text: Any, logprobs: Any, *, is_empty: bool = False) -> Json:
        """Returns the item as JSON. is_empty: whether the item is new and has no part yet."""
        about = {"id": self.item_id, "status": self.status}
        if self.is_custom:
            call = {"call_id": self.call_id, "name": self.name, "input": text}
            return about | {"type": "custom_tool_call"} | call
        if self.kind is PieceKind.CALL:
            call = {"call_id": self.call_id, "name": self.name, "arguments": text}
            return about | {"type": "function_call"} | call
        parts = [] if is_empty else [self.part(text, logprobs)]
        if self.kind is PieceKind.REASONING:
            return about | {"type": "reasoning", "summary": [], "content": parts}
        return about | {"type": "message", "role": "assistant", "content": parts}


class ResponsesFormat:
    """Formats the answer to one request.

    model: the name in the request. sampling: the sampling parameters of the answer.
    syntax: how the answer's tool calls and reasoning are written; None if an answer is one text.
    """

    keep_alive = KEEP_ALIVE

    def __init__(
        self,
        model: str,
        fields: ResponsesRequest,
        sampling: SamplingParams,
        logprobs: LogprobsFormat,
        syntax: AnswerSyntax | None,
    ) -> None:
        self._logprobs = logprobs if fields.num_top_logprobs is not None else None
        self._reader = None if syntax is None else AnswerReader(syntax)
        self._custom_names = frozenset() if syntax is None else syntax.custom_names
        self._custom_arguments: list[str] = []
        self._tokens = ContentTokens()
        self._items: list[_Item] = []
        self._is_cut = False
        self._num_events = 0
        self._about = _describe_request(model, fields, sampling)

    @property
    def reads_text(self) -> bool:
        return self._reader is not None

    def opening(self, usage: AnswerUsage) -> Iterator[bytes]:
        for kind in ("response.created", "response.in_progress"):
            yield from self._event(kind, {"response": self._response("in_progress")})

    def events(self, delta: CompletionDelta, usage: AnswerUsage) -> Iterator[bytes]:
        is_last = delta.finish_reason is not None
        for piece, tokens in self._read(delta.text, delta.tokens, is_last=is_last):
            if piece.kind is not PieceKind.ARGUMENTS and self._begins_item(piece):
                yield from self._end_item("completed")
                yield from self._begin_item(piece)
            if piece.kind is not PieceKind.CALL and self._items[-1].is_custom:
                # The input can be read only from complete arguments, so it is sent in one piece.
                self._custom_arguments.append(piece.text)
            elif piece.kind is not PieceKind.CALL:
                yield self._delta(self._items[-1], piece.text, tokens)
        if is_last:
            if not self._items:
                yield from self._begin_item(Piece(PieceKind.CONTENT, ""))
            self._is_cut = delta.finish_reason is FinishReason.LENGTH
            yield from self._end_item("incomplete" if self._is_cut else "completed")

    def closing(self, usage: AnswerUsage) -> Iterator[bytes]:
        status = self._final_status
        yield from self._event(f"response.{status}", {"response": self._response(status, usage)})

    def failure(self, error: ErrorAnswer) -> Iterator[bytes]:
        """Yields an event with the error, which clients raise, and an event that ends the response as failed."""
        about = error.body["error"]
        yield from self._event("error", {name: about[name] for name in ("code", "message", "param")})
        for item in self._items[-1:]:
            item.status = "incomplete" if item.status == "in_progress" else item.status
        code = "rate_limit_exceeded" if error.status == _TOO_MANY_REQUESTS else "server_error"
        failed = self._response("failed") | {"error": {"code": code, "message": about["message"]}}
        yield from self._event("response.failed", {"response": failed})

    def whole(self, completions: Sequence[Completion], usage: AnswerUsage) -> Json:
        ((choice,),) = (completion.choices for completion in completions)
        for piece, tokens in self._read(choice.text, choice.tokens, is_last=True):
            if piece.kind is not PieceKind.ARGUMENTS and self._begins_item(piece):
                self._items.append(self._new_item(piece))
            if piece.kind is not PieceKind.CALL:
                self._items[-1].texts.append(piece.text)
                self._items[-1].logprobs += tokens
        if not self._items:
            self._items.append(_Item(PieceKind.CONTENT, 0))
        self._is_cut = choice.finish_reason is FinishReason.LENGTH
        for item in self._items:
            item.status = "completed"
        self._items[-1].status = "incomplete" if self._is_cut else "completed"
        for item in self._items:
            if item.is_custom:
                item.texts = [read_custom_input("".join(item.texts))]
        output = [item.to_json("".join(item.texts), self._list_logprobs(item)) for item in self._items]
        return self._response(self._final_status, usage) | {"output": output}

    @property
    def _final_status(self) -> str:
        return "incomplete" if self._is_cut else "completed"

    def _read(
        self, text: str, tokens: Sequence[AlignedToken], *, is_last: bool
    ) -> Iterator[tuple[Piece, Sequence[AlignedToken]]]:
        """Divides the next part of the answer into pieces. Yields each piece with its tokens, if they have
        log-probabilities.
        """
        if self._reader is None:
            if text or tokens:
                yield Piece(PieceKind.CONTENT, text), tokens
            return
        self._tokens.add(tokens)
        for piece in self._reader.push(text, is_last=is_last):
            end = piece.start + len(piece.text)
            yield piece, self._tokens.take(piece.start, end) if piece.kind is PieceKind.CONTENT else ()

    def _begins_item(self, piece: Piece) -> bool:
        return piece.kind is PieceKind.CALL or not self._items or self._items[-1].kind is not piece.kind

    def _list_logprobs(self, item: _Item) -> Any:
        logprobs = self._logprobs
        return [] if logprobs is None else LongList(lambda: map(logprobs.content_token, item.logprobs))

    def _new_item(self, piece: Piece) -> _Item:
        is_custom = piece.kind is PieceKind.CALL and piece.text in self._custom_names
        return _Item(piece.kind, len(self._items), piece.text, is_custom=is_custom)

    def _begin_item(self, piece: Piece) -> Iterator[bytes]:
        """Yields the events that begin a new item. piece: the first piece of the item; for a call, its text is the
        tool's name.
        """
        item = self._new_item(piece)
        self._items.append(item)
        self._custom_arguments = []
        made = item.to_json("", [], is_empty=True)
        yield from self._event("response.output_item.added", {"output_index": item.index, "item": made})
        if item.kind is not PieceKind.CALL:
            part = {**_place(item), "part": item.part("", [])}
            yield from self._event("response.content_part.added", part)

    def _delta(self, item: _Item, text: str, tokens: Sequence[AlignedToken]) -> bytes:
        """Returns the event of one delta. It is built from strings for speed, because each token has an event."""
        written = encode_ascii(text)
        item.texts.append(written[1:-1])
        place = f'"item_id":"{item.item_id}","output_index":{item.index}'
        rest = ""
        if item.kind is PieceKind.CALL:
            kind = "response.function_call_arguments.delta"
        else:
            place += ',"content_index":0'
            kind = "response.reasoning_text.delta"
        if item.kind is PieceKind.CONTENT:
            kind = "response.output_text.delta"
            listed = (
                ""
                if self._logprobs is None
                else encode_ascii([*map(self._logprobs.content_token, tokens)])[1:-1]
            )
            if listed:
                item.logprobs.append(f",{listed}" if item.logprobs else listed)
            rest = f',"logprobs":[{listed}]'
        number = self._next_number()
        return (
            f'event: {kind}\ndata: {{"type":"{kind}",{place},"delta":{written}{rest},"sequence_number":{number}}}\n\n'
        ).encode("ascii")

    def _end_item(self, status: str) -> Iterator[bytes]:
        if not self._items:
            return
        item = self._items[-1]
        item.status = status
        if item.is_custom:
            item.texts.append(encode_ascii(read_custom_input("".join(self._custom_arguments)))[1:-1])
        text, logprobs = _written(item)
        match item.kind:
            case PieceKind.CALL if item.is_custom:
                place = {"item_id": item.item_id, "output_index": item.index}
                yield from self._event("response.custom_tool_call_input.delta", place | {"delta": text})
                yield from self._event("response.custom_tool_call_input.done", place | {"input": text})
            case PieceKind.CALL:
                done = {
                    "item_id": item.item_id,
                    "output_index": item.index,
                    "name": item.name,
                    "arguments": text,
                }
                yield from self._event("response.function_call_arguments.done", done)
            case PieceKind.REASONING:
                yield from self._event("response.reasoning_text.done", {**_place(item), "text": text})
            case _:
                done = {**_place(item), "text": text, "logprobs": logprobs}
                yield from self._event("response.output_text.done", done)
        if item.kind is not PieceKind.CALL:
            part = {**_place(item), "part": item.part(text, logprobs)}
            yield from self._event("response.content_part.done", part)
        made = {"output_index": item.index, "item": item.to_json(text, logprobs)}
        yield from self._event("response.output_item.done", made)

    def _response(self, status: str, usage: AnswerUsage | None = None) -> Json:
        """Returns the response object, with the items that have been streamed so far."""
        is_over = status in ("completed", "incomplete")
        return self._about | {
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [item.to_json(*_written(item)) for item in self._items],
            "usage": _usage_json(usage) if is_over and usage is not None else None,
        }

    def _event(self, kind: str, content: Json) -> Iterator[bytes]:
        yield f"event: {kind}\ndata: ".encode("ascii")
        yield from slice_ascii({"type": kind, **content, "sequence_number": self._next_number()})
        yield b"\n\n"

    def _next_number(self) -> int:
        self._num_events += 1
        return self._num_events - 1


def _place(item: _Item) -> Json:
    return {"item_id": item.item_id, "output_index": item.index, "content_index": 0}


def _written(item: _Item) -> tuple[Written, Written]:
    """Returns the text and the log-probabilities of an item of a stream."""
    return Written(item.texts, '""'), Written(item.logprobs, "[]")


def _usage_json(usage: AnswerUsage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        # Nothing is charged for writing to the prefix cache.
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


def _describe_request(model: str, fields: ResponsesRequest, sampling: SamplingParams) -> Json:
    """Returns the fields of an answer that are known before it is computed."""
    return {
        "id": _make_id("resp", fields.request_id),
        "object": "response",
        "created_at": int(time.time()),
        "background": False,
        "instructions": Once(fields.instructions),
        "max_output_tokens": fields.max_output_tokens,
        "max_tool_calls": fields.max_tool_calls,
        "metadata": fields.metadata or {},
        "model": model,
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": fields.prompt_cache_key,
        "reasoning": {"effort": fields.effort[0], "summary": None},
        "safety_identifier": fields.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": sampling.temperature,
        # Encoded as a whole, because writing the many small values of a schema one by one takes ten times as long.
        "text": Written([encode_ascii({"format": fields.sent_format, "verbosity": "medium"})[1:-1]], "{}"),
        "tool_choice": fields.sent_choice,
        "tools": Once(LongList(lambda: fields.sent_tools)),
        "top_logprobs": fields.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "user": fields.user,
    }
