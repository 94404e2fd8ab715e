"""The JSON types of completions, for the OpenAPI document. `answer_format.py` makes the JSON.

Answers are not checked against these types, because they are written in slices.
"""

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from slora.core.request import FinishReason
from slora_api.completions.answer_timing import TimingObject


class PromptTokensDetails(TypedDict):
    """Details of the prompt's tokens. cached_tokens: tokens of the prompt that were found in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    """Details of the answers' tokens. reasoning_tokens: tokens of the answers up to the end of their reasoning,
    including the token that marks the end.
    """

    reasoning_tokens: int


# The tier that served the request, if the request has the field `service_tier`.
ServiceTier = Literal["default"]


class UsageObject(TypedDict):
    """The tokens of a request. completion_tokens_details: only in chats with a model that reasons."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: NotRequired[CompletionTokensDetails]


class PromptLogprob(TypedDict):
    """The log-probability of one token. rank: null if the token is not among the most probable tokens that the engine
    listed.
    """

    logprob: float
    rank: int | None
    decoded_token: str


# The log-probabilities by token id, for each token of the prompt. The first token has no log-probabilities.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(TypedDict):
    """One item for each token. Tokens of an echoed prompt may have no log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    prompt_logprobs: PromptLogprobs | None
    token_ids: list[int] | None
    prompt_token_ids: list[int] | None


class Completion(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageObject
    service_tier: NotRequired[ServiceTier]


class CompletionChunkChoice(TypedDict):
    """One choice in a chunk of a stream. finish_reason: null except in the last chunk of a choice. prompt_token_ids:
    only in the first chunk of a choice.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]


class CompletionChunk(TypedDict):
    """One event of a stream. If the request asks for the usage, the last event has it and no choices."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: NotRequired[UsageObject | None]
    metrics: NotRequired[TimingObject]
    service_tier: NotRequired[ServiceTier]


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]
    refusal: None


class CalledFunction(TypedDict):
    """The function of a tool call. arguments: JSON, as the model wrote it. The JSON may be invalid, or incomplete if
    the answer was cut off.
    """

    name: str
    arguments: str


class CalledCustom(TypedDict):
    """The custom tool of a call. input: a text."""

    name: str
    input: str


class ToolCall(TypedDict):
    """A call. custom: in place of `function` for a custom tool."""

    id: str
    type: Literal["function", "custom"]
    function: NotRequired[CalledFunction]
    custom: NotRequired[CalledCustom]


# A complete answer with tool calls ends for the reason `tool_calls`, or `function_call` if the request has `functions`.
ChatFinishReason = FinishReason | Literal["tool_calls", "function_call"]


class ChatAnswer(TypedDict):
    """The message of an answer. content: null if the answer has only tool calls or reasoning. reasoning,
    reasoning_content: the same text.
    """

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[ToolCall]]
    function_call: NotRequired[CalledFunction]
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]


class ChatChoice(TypedDict):
    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    token_ids: list[int] | None


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageObject
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None
    service_tier: NotRequired[ServiceTier]


class CalledFunctionDelta(TypedDict):
    """A part of the function of a tool call. name: only in the first delta of a call."""

    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """A part of a tool call. id, type: only in the first delta of a call. custom: the call of a custom tool, in one
    piece.
    """

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function", "custom"]]
    function: NotRequired[CalledFunctionDelta]
    custom: NotRequired[CalledCustom]


class ChatDelta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str | None]
    tool_calls: NotRequired[list[ToolCallDelta]]
    function_call: NotRequired[CalledFunctionDelta]
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]


class ChatChunkChoice(TypedDict):
    """One choice in a chunk of a stream. finish_reason: null except in the last chunk of a choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    token_ids: NotRequired[list[int]]


class ChatCompletionChunk(TypedDict):
    """One event of a stream. If the request asks for the usage, the last event has it and no choices.

    prompt_token_ids: only in the first chunk.
    """

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[UsageObject | None]
    metrics: NotRequired[TimingObject]
    prompt_token_ids: NotRequired[list[int]]
    service_tier: NotRequired[ServiceTier]
