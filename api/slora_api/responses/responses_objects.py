"""The JSON types of /v1/responses, for the OpenAPI document. `responses_format.py` makes the JSON."""

from typing import Any, Literal

from typing_extensions import TypedDict

from slora_api.completions.answer_objects import TokenLogprob
from slora_api.completions.schemas import ReasoningEffort

_Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(TypedDict):
    """The text of a message. logprobs: empty unless the request includes them."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class OutputMessage(TypedDict):
    """A message of the assistant. content: a list of one text."""

    type: Literal["message"]
    id: str
    status: _Status
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(TypedDict):
    """The reasoning. content: a list of one text, as the model wrote it. summary: always empty."""

    type: Literal["reasoning"]
    id: str
    status: _Status
    summary: list[Any]
    content: list[ReasoningText]


class OutputCall(TypedDict):
    """A call of a function. arguments: JSON, as the model wrote it. The JSON may be invalid, or incomplete if the
    answer was cut off.
    """

    type: Literal["function_call"]
    id: str
    status: _Status
    call_id: str
    name: str
    arguments: str


class OutputCustomCall(TypedDict):
    """A call of a custom tool. input: a text."""

    type: Literal["custom_tool_call"]
    id: str
    status: _Status
    call_id: str
    name: str
    input: str


OutputItem = OutputMessage | OutputReasoning | OutputCall | OutputCustomCall


class InputTokensDetails(TypedDict):
    """Details of the input tokens. cached_tokens: tokens of the prompt that were found in the prefix cache.
    cache_write_tokens: always 0.
    """

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(TypedDict):
    """Details of the output tokens. reasoning_tokens: tokens of the answer up to the end of its reasoning."""

    reasoning_tokens: int


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(TypedDict):
    """Why the answer was cut off. `max_output_tokens` is also the reason when the context is full."""

    reason: Literal["max_output_tokens"]


class ResponseError(TypedDict):
    code: Literal["server_error", "rate_limit_exceeded"]
    message: str


class ReasoningSettings(TypedDict):
    effort: ReasoningEffort | None
    summary: None


class ResponseObject(TypedDict):
    """An answer. Fields that it shares with the request have the values that were used.

    output: reasoning, messages and function calls, in the order in which the model wrote them.
    error: set if the stream failed. incomplete_details: set if the answer was cut off.
    usage: null in the events before the last one.
    """

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    output: list[OutputItem]
    usage: ResponseUsage | None
    background: Literal[False]
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    parallel_tool_calls: bool
    previous_response_id: None
    prompt_cache_key: str | None
    reasoning: ReasoningSettings
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    user: str | None


class ResponseStateEvent(TypedDict):
    """An event that begins or ends a stream."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: ResponseObject
    sequence_number: int


class OutputItemEvent(TypedDict):
    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem
    sequence_number: int


class ContentPartEvent(TypedDict):
    type: Literal["response.content_part.added", "response.content_part.done"]
    item_id: str
    output_index: int
    content_index: int
    part: OutputText | ReasoningText
    sequence_number: int


class OutputTextDelta(TypedDict):
    type: Literal["response.output_text.delta"]
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[TokenLogprob]
    sequence_number: int


class OutputTextDone(TypedDict):
    type: Literal["response.output_text.done"]
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: list[TokenLogprob]
    sequence_number: int


class ReasoningTextDelta(TypedDict):
    type: Literal["response.reasoning_text.delta"]
    item_id: str
    output_index: int
    content_index: int
    delta: str
    sequence_number: int


class ReasoningTextDone(TypedDict):
    type: Literal["response.reasoning_text.done"]
    item_id: str
    output_index: int
    content_index: int
    text: str
    sequence_number: int


class CallArgumentsDelta(TypedDict):
    type: Literal["response.function_call_arguments.delta"]
    item_id: str
    output_index: int
    delta: str
    sequence_number: int


class CallArgumentsDone(TypedDict):
    type: Literal["response.function_call_arguments.done"]
    item_id: str
    output_index: int
    name: str
    arguments: str
    sequence_number: int


class CustomInputDelta(TypedDict):
    """The input of a custom tool, in one piece."""

    type: Literal["response.custom_tool_call_input.delta"]
    item_id: str
    output_index: int
    delta: str
    sequence_number: int


class CustomInputDone(TypedDict):
    type: Literal["response.custom_tool_call_input.done"]
    item_id: str
    output_index: int
    input: str
    sequence_number: int


class InputTokens(TypedDict):
    """The tokens of a request that was not computed."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class ErrorEvent(TypedDict):
    """The error of a stream that failed. `response.failed` follows."""

    type: Literal["error"]
    code: str | None
    message: str
    param: str | None
    sequence_number: int


ResponseEvent = (
    ResponseStateEvent
    | OutputItemEvent
    | ContentPartEvent
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | CallArgumentsDelta
    | CallArgumentsDone
    | CustomInputDelta
    | CustomInputDone
    | ErrorEvent
)
