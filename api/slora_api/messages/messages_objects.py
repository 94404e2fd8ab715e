"""The JSON types of /v1/messages, for the OpenAPI document. `messages_format.py` makes the JSON."""

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

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
