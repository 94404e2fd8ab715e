"""Formats an answer as the JSON of /v1/messages, Anthropic's API, either as one body or event by event.

The JSON types of /v1/messages, for the OpenAPI document. `messages_format.py` makes the JSON.
"""

import json
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from slora.core.request import FinishReason
from slora.text.answer import Completion, CompletionDelta
from slora_api.chat.answer_reader import AnswerReader, AnswerSyntax
from slora_api.chat.text_reader import Piece, PieceKind
from slora_api.completions.answer_format import AnswerUsage
from slora_api.core.errors import ErrorAnswer, describe_for_messages
from slora_api.http.json_slices import Written, encode_ascii
from slora_api.messages.messages_request import MessagesChat

Json = dict[str, Any]
# The type of the delta of each kind of block, and the field that holds its text.
_DELTAS = {
    PieceKind.REASONING: ("thinking_delta", "thinking"),
    PieceKind.CONTENT: ("text_delta", "text"),
    PieceKind.ARGUMENTS: ("input_json_delta", "partial_json"),
}

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class TextContent(TypedDict):
    type: Literal["text"]
    text: str
    citations: None


class ThinkingContent(TypedDict):
    """The reasoning, as the model wrote it. signature: always empty."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseContent(TypedDict):
    """A tool call. input: the arguments. Arguments that are not a JSON object are a text in the field
    `INVALID_JSON`.
    """

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(TypedDict):
    """The tokens of a request. input_tokens: tokens of the prompt, except those in `cache_read_input_tokens`, which
    were found in the prefix cache. cache_creation_input_tokens: always 0.
    """

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    service_tier: Literal["standard"]


class MessageObject(TypedDict):
    """An answer. stop_sequence: the text of `stop_sequences` that ended it."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextContent | ThinkingContent | ToolUseContent]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(TypedDict):
    """An event of a stream. The other fields depend on its type."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "ping",
        "error",
    ]
    message: NotRequired[MessageObject]
    index: NotRequired[int]
    content_block: NotRequired[TextContent | ThinkingContent | ToolUseContent]
    delta: NotRequired[dict[str, Any]]
    usage: NotRequired[MessageUsage]
    error: NotRequired[dict[str, Any]]


class TokenCount(TypedDict):
    input_tokens: int


class MessagesFormat:
    """Formats the answer to one request.

    model: the name in the request. syntax: how the answer's tool calls and reasoning are written; None if an answer is
    one text.
    """

    keep_alive = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, model: str, fields: MessagesChat, syntax: AnswerSyntax | None) -> None:
        self._reader = None if syntax is None else AnswerReader(syntax)
        self._shows_reasoning = fields.include_reasoning is not False
        self._max_tokens = fields.max_tokens
        self._about: Json = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        self._has_begun = False
        # The kind of the open block, and how many blocks came before it.
        self._open: PieceKind | None = None
        self._num_closed = 0
        self._end: Json = {"stop_reason": None, "stop_sequence": None}

    @property
    def reads_text(self) -> bool:
        return self._reader is not None

    def opening(self, usage: AnswerUsage) -> Iterable[bytes]:
        """Returns no events: the first event has the number of cached tokens, which comes with the first delta."""
        return ()

    def events(self, delta: CompletionDelta, usage: AnswerUsage) -> Iterator[bytes]:
        if not self._has_begun:
            self._has_begun = True
            message = {**self._about, "content": [], **self._end, "usage": _usage_json(usage)}
            yield _event("message_start", {"message": message})
        for piece in self._read(delta.text, is_last=delta.finish_reason is not None):
            yield from self._piece_events(piece)
        if delta.finish_reason is not None:
            yield from self._close_block()
            self._end = self._describe_end(delta.finish_reason, delta.stop, usage)

    def closing(self, usage: AnswerUsage) -> Iterator[bytes]:
        yield _event("message_delta", {"delta": self._end, "usage": _usage_json(usage)})
        yield _event("message_stop", {})

    def failure(self, error: ErrorAnswer) -> Iterator[bytes]:
        yield _event("error", describe_for_messages(error))

    def whole(self, completions: Sequence[Completion], usage: AnswerUsage) -> Json:
        ((choice,),) = (completion.choices for completion in completions)
        content: list[Json] = []
        for piece in self._read(choice.text, is_last=True):
            match piece.kind:
                case PieceKind.CALL:
                    content.append(_new_block(piece))
                case PieceKind.ARGUMENTS:
                    content[-1]["input"] += piece.text
                case _:
                    name = _DELTAS[piece.kind][1]
                    if not content or name not in content[-1]:
                        content.append(_new_block(piece))
                    content[-1][name] += piece.text
        for block in content:
            if block["type"] == "tool_use":
                block["input"] = _read_input(block["input"])
        end = self._describe_end(choice.finish_reason, choice.stop, usage)
        return {**self._about, "content": content, **end, "usage": _usage_json(usage)}

    def _read(self, text: str, *, is_last: bool) -> Iterator[Piece]:
        """Divides the next part of the answer into the pieces to show."""
        if self._reader is None:
            if text:
                yield Piece(PieceKind.CONTENT, text)
            return
        for piece in self._reader.push(text, is_last=is_last):
            if piece.kind is not PieceKind.REASONING or self._shows_reasoning:
                yield piece

    def _piece_events(self, piece: Piece) -> Iterator[bytes]:
        kind = PieceKind.CALL if piece.kind is PieceKind.ARGUMENTS else piece.kind
        if piece.kind is PieceKind.CALL or kind is not self._open:
            yield from self._close_block()
            self._open = kind
            block = _new_block(piece)
            if kind is PieceKind.CALL:
                block["input"] = {}
            yield _event("content_block_start", {"index": self._num_closed, "content_block": block})
        if piece.kind is not PieceKind.CALL:
            delta_type, name = _DELTAS[piece.kind]
            delta = {"type": delta_type, name: piece.text}
            yield _event("content_block_delta", {"index": self._num_closed, "delta": delta})

    def _close_block(self) -> Iterator[bytes]:
        if self._open is not None:
            yield _event("content_block_stop", {"index": self._num_closed})
            self._open = None
            self._num_closed += 1

    def _describe_end(self, reason: FinishReason, stop: str | None, usage: AnswerUsage) -> Json:
        if reason is FinishReason.LENGTH:
            is_cut = self._max_tokens is not None and usage.completion_tokens < self._max_tokens
            shown = "model_context_window_exceeded" if is_cut else "max_tokens"
        elif self._reader is not None and self._reader.num_calls:
            shown = "tool_use"
        else:
            shown = "end_turn" if stop is None else "stop_sequence"
        return {"stop_reason": shown, "stop_sequence": stop}


def _new_block(piece: Piece) -> Json:
    """Returns the empty block that begins with this piece."""
    if piece.kind is PieceKind.CALL:
        return {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex[:24]}", "name": piece.text, "input": ""}
    if piece.kind is PieceKind.REASONING:
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": "", "citations": None}


def _read_input(arguments: str) -> Any:
    """Returns the arguments of a call as JSON. They are repeated as the model wrote them, if they are an object."""
    text = arguments.strip() or "{}"
    try:
        is_object = isinstance(json.loads(text, parse_constant=_refuse_constant), dict)
    except (ValueError, RecursionError):
        is_object = False
    return Written([text[1:-1]], "{}") if is_object else {"INVALID_JSON": arguments}


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _event(kind: str, content: Json) -> bytes:
    return f"event: {kind}\ndata: {encode_ascii({'type': kind, **content})}\n\n".encode("ascii")


def _usage_json(usage: AnswerUsage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "service_tier": "standard",
    }
