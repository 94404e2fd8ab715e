"""The items of `input` in a request to /v1/responses, and their conversion to chat messages.

Clients send the items of earlier answers back, with all fields of an answer. The items that the assistant wrote in one
turn, such as its reasoning, a text and two calls, become one message.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    model_validator,
)

from slora_adapters.errors import abbreviate
from slora_api.chat.tool_schemas import SentCall, SentCustom, make_call
from slora_api.completions.schemas import ChatMessage, make_message
from slora_api.http.field_types import (
    Name,
    RequestModel,
    Text,
    join_text_parts,
    make_refusal,
    note_ignored,
    refuse_surrogates,
)

_Status = Literal["in_progress", "completed", "incomplete"]


class ResponsesTextPart(RequestModel):
    """A part of a text. annotations, cache_control, citations, logprobs, parsed: added by answers and clients; no
    effect.
    """

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Any = None
    cache_control: Any = None
    citations: Any = None
    logprobs: Any = None
    parsed: Any = None


class RefusalPart(RequestModel):
    type: Literal["refusal"]
    refusal: str


class ReasoningPart(RequestModel):
    type: Literal["reasoning_text", "summary_text"]
    text: str


_TEXT_KINDS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_REASONING_KINDS = {"reasoning_text": "text", "summary_text": "text"}


def _read_text(value: Any, info: ValidationInfo) -> Any:
    return join_text_parts(value, info, param="input", kinds=_TEXT_KINDS)


def _read_reasoning(value: Any, info: ValidationInfo) -> Any:
    return join_text_parts(value, info, param="input", kinds=_REASONING_KINDS)


_JoinedText = Annotated[
    Text, BeforeValidator(_read_text, json_schema_input_type=str | list[ResponsesTextPart | RefusalPart])
]
_JoinedReasoning = Annotated[
    Text, BeforeValidator(_read_reasoning, json_schema_input_type=list[ReasoningPart])
]


class MessageItem(RequestModel):
    """One message. The role `developer` is OpenAI's newer name for `system`. id, status, phase: no effect."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: _JoinedText
    id: Name | None = None
    status: _Status | None = None
    phase: Name | None = None


class FunctionCallItem(RequestModel):
    """A function call from an earlier answer.

    arguments: JSON, as the model wrote it; it may be invalid. id, status, caller, namespace: no effect.
    parsed_arguments: added by the openai SDK; no effect.
    """

    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: Text
    id: Name | None = None
    status: _Status | None = None
    parsed_arguments: Any = None
    is_async: Annotated[Any, Field(alias="async")] = None
    namespace: Any = None
    caller: Any = None


class FunctionOutputItem(RequestModel):
    """The result of a call. call_id: the id of the call. id, status, name, caller, namespace: no effect."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Name
    output: _JoinedText
    id: Name | None = None
    status: _Status | None = None
    name: Name | None = None
    namespace: Any = None
    caller: Any = None


class CustomCallItem(RequestModel):
    """The call of a custom tool from an earlier answer. id, status, caller, namespace: no effect."""

    type: Literal["custom_tool_call"]
    call_id: Name
    name: Name
    input: Text
    id: Name | None = None
    status: _Status | None = None
    namespace: Any = None
    caller: Any = None


class ReasoningItem(RequestModel):
    """The reasoning of an earlier answer. The chat template decides whether the model sees it.

    content: the text. summary: read if there is no content. encrypted_content: not readable here, no effect.
    id, status: no effect.
    """

    type: Literal["reasoning"]
    id: Name | None = None
    summary: _JoinedReasoning = ""
    content: _JoinedReasoning | None = None
    status: _Status | None = None
    encrypted_content: Any = None

    @property
    def thought(self) -> str:
        return self.content or self.summary

    @model_validator(mode="after")
    def _note_what_cannot_be_read(self, info: ValidationInfo) -> Self:
        if self.encrypted_content and not self.thought:
            note_ignored(info, "input.encrypted_content")
        return self


class HostedCallItem(BaseModel):
    """A call of one of OpenAI's own tools from an earlier answer, or its result. The model does not see it. The text
    of the answer follows in an item of its own.
    """

    model_config = ConfigDict(frozen=True)
    type: Name

    @model_validator(mode="after")
    def _note_it(self, info: ValidationInfo) -> Self:
        note_ignored(info, f"input.{self.type}")
        return self


_KINDS = (
    "message",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "reasoning",
)
# What the tools of OpenAI's servers leave in an answer.
_HOSTED_KINDS = frozenset(
    {
        "apply_patch_call",
        "apply_patch_call_output",
        "code_interpreter_call",
        "computer_call",
        "computer_call_output",
        "file_search_call",
        "image_generation_call",
        "local_shell_call",
        "local_shell_call_output",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "shell_call",
        "shell_call_output",
        "tool_search_call",
        "tool_search_output",
        "web_search_call",
    }
)


def _find_kind(value: Any) -> str | None:
    """Returns the type of an item. Only a message may leave the type out."""
    if not isinstance(value, dict):
        return None
    kind = value.get("type") or ("message" if "role" in value else None)
    return kind if isinstance(kind, str) else None


def _find_tag(value: Any) -> str | None:
    kind = _find_kind(value)
    return "hosted" if kind in _HOSTED_KINDS else kind


def _check_kind(value: Any) -> Any:
    kind = _find_kind(value)
    if isinstance(value, dict) and kind not in _KINDS and kind not in _HOSTED_KINDS:
        raise make_refusal(
            "it has the type {kind}, which this server does not read; {remedy} (accepted: {known})",
            remedy="this server stores nothing, so send the item itself"
            if kind == "item_reference"
            else "leave it out",
            known=", ".join(map(repr, _KINDS)),
            kind=abbreviate(value.get("type")),
        )
    return value


Item = MessageItem | FunctionCallItem | FunctionOutputItem | CustomCallItem | ReasoningItem | HostedCallItem
_Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[FunctionOutputItem, Tag("custom_tool_call_output")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[HostedCallItem, Tag("hosted")],
    Discriminator(
        _find_tag, custom_error_type="invalid_value", custom_error_message="an item must be an object"
    ),
    BeforeValidator(_check_kind, json_schema_input_type=Item),
]


def _read_input(value: Any) -> Any:
    """Returns the items. A text becomes one message of the user."""
    if isinstance(value, str):
        refuse_surrogates(value)
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise make_refusal("`input` must be a text, or a list of items that is not empty.", param="input")
    return value


Input = Annotated[
    list[_Item],
    Field(fail_fast=True),
    BeforeValidator(_read_input, json_schema_input_type=str | list[Item]),
]


@dataclass(slots=True)
class _Turn:
    """The assistant's items that become one message. calls: the calls by id."""

    thoughts: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: dict[str, SentCall] = field(default_factory=dict)

    def message(self) -> ChatMessage:
        return make_message(
            "assistant",
            "".join(self.texts),
            reasoning="\n".join(self.thoughts) or None,
            tool_calls=list(self.calls.values()) or None,
        )


class _Messages:
    """Collects messages from items. waiting: ids of calls that have no result yet."""

    def __init__(self) -> None:
        self.made: list[ChatMessage] = []
        self._turn: _Turn | None = None
        self._waiting: dict[str, None] = {}

    def add(self, index: int, item: Item) -> None:
        """Adds the next item. index: the item's position in `input`. Raises a refusal."""
        match item:
            case ReasoningItem() if item.thought:
                turn = self._turn
                if turn is not None and turn.texts and not turn.calls:
                    self._end_turn()
                self._open_turn().thoughts.append(item.thought)
            case FunctionCallItem():
                self._add_call(index, make_call(item.call_id, item.name, item.arguments))
            case CustomCallItem():
                custom = SentCustom.model_construct(name=item.name, input=item.input)
                made = make_call(item.call_id, "", "")
                self._add_call(
                    index, made.model_copy(update={"type": "custom", "function": None, "custom": custom})
                )
            case ReasoningItem() | HostedCallItem():
                pass
            case FunctionOutputItem():
                self._add_output(index, item)
            case MessageItem(role="assistant"):
                turn = self._turn
                if turn is not None and turn.texts and not turn.calls:
                    self._end_turn()
                self._open_turn().texts.append(item.content)
            case MessageItem():
                self.end()
                self.made.append(make_message(item.role, item.content))

    def end(self) -> None:
        """Ends the turn of the assistant. Raises a refusal if a call of the turn has no result."""
        self._end_turn()
        self._check_answered()

    def _open_turn(self) -> _Turn:
        if self._turn is None:
            self._turn = _Turn()
        return self._turn

    def _end_turn(self) -> None:
        if self._turn is not None:
            self._check_answered()
            self.made.append(self._turn.message())
            self._waiting = dict.fromkeys(self._turn.calls)
            self._turn = None

    def _add_call(self, index: int, call: SentCall) -> None:
        calls = self._open_turn().calls
        if call.id in calls:
            raise make_refusal(
                "`input.{index}.call_id` is {value}, which an earlier call of the same turn already uses; give each "
                "call an id of its own",
                param="input",
                index=index,
                value=abbreviate(call.id),
            )
        calls[call.id] = call

    def _add_output(self, index: int, item: FunctionOutputItem) -> None:
        self._end_turn()
        if item.call_id not in self._waiting:
            raise make_refusal(
                "`input.{index}.call_id` is {value}, which matches no unanswered function_call before it{known}; send "
                "the items of the answer with the call before its result",
                param="input",
                index=index,
                known=f"; these do: {abbreviate(list(self._waiting))}" if self._waiting else "",
                value=abbreviate(item.call_id),
            )
        del self._waiting[item.call_id]
        self.made.append(make_message("tool", item.output, tool_call_id=item.call_id))

    def _check_answered(self) -> None:
        if self._waiting:
            raise make_refusal(
                "`input` has no result for the calls {value}; after the calls, add one item with the type "
                "'function_call_output' for each",
                param="input",
                value=abbreviate(list(self._waiting)),
            )


def make_messages(instructions: str | None, items: Sequence[Item]) -> list[ChatMessage]:
    """Returns the conversation. Raises a refusal for a call without a result, and for a result without a call."""
    messages = _Messages()
    if instructions:
        messages.made.append(make_message("system", instructions))
    for index, item in enumerate(items):
        messages.add(index, item)
    messages.end()
    return messages.made
