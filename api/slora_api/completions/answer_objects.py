"""The JSON types of completions, for the OpenAPI document. `answer_format.py` makes the JSON.

Answers are not checked against these types, because they are written in slices.
"""

from collections.abc import Sequence
from typing import Literal, NotRequired

from typing_extensions import TypedDict

from slora.core.request import FinishReason, RequestTiming
from slora.text.answer import Answer

_HEADER = "x-slora-timing"


class TimingObject(TypedDict):
    """Times in milliseconds, with vLLM's names. A stage that the request did not reach is null. If a request has
    several prompts, the times belong to the prompt that ended last.

    queue_time_ms: from arrival in the engine to the first computed token, including waits for adapters.
    adapter_fetch_ms: the part of the queue time until the adapters were on the host.
    adapter_load_ms: the part of the queue time from admission to the batch until the adapters were in the page pool.
    time_to_first_token_ms: from the first computed token to the first generated token.
    generation_time_ms: from the first generated token to the end.
    tokens_per_second: generated tokens, divided by the time since the first computed token; only with one prompt.
    mean_itl_ms: mean time between two tokens; only with one prompt and one choice.
    """

    queue_time_ms: float | None
    adapter_fetch_ms: float
    adapter_load_ms: float
    time_to_first_token_ms: float | None
    generation_time_ms: float | None
    mean_itl_ms: NotRequired[float]
    tokens_per_second: NotRequired[float]


def timing_headers(answers: Sequence[Answer]) -> dict[str, str]:
    """Returns the header x-slora-timing, which has the stages in milliseconds; empty if the engine did not report the
    timing.
    """
    timing = _find_timing(answers)
    if timing is None:
        return {}
    stages = {"queue": timing.queue_s, "fetch": timing.fetch_s, "load": timing.load_s}
    if timing.computed_at is not None:
        first_token_at = timing.ended_at if timing.first_token_at is None else timing.first_token_at
        stages |= {"prefill": first_token_at - timing.computed_at, "decode": timing.ended_at - first_token_at}
    return {_HEADER: ", ".join(f"{name};dur={_ms(seconds):.3f}" for name, seconds in stages.items())}


def timing_object(answers: Sequence[Answer]) -> TimingObject | None:
    """Returns the timing as JSON; None if the engine did not report it."""
    timing = _find_timing(answers)
    if timing is None:
        return None
    computed_at, first_token_at = timing.computed_at, timing.first_token_at
    made: TimingObject = {
        "queue_time_ms": None if computed_at is None else _ms(computed_at - timing.arrived_at),
        "adapter_fetch_ms": _ms(timing.fetch_s),
        "adapter_load_ms": _ms(timing.load_s),
        "time_to_first_token_ms": None,
        "generation_time_ms": None,
    }
    if computed_at is None or first_token_at is None:
        return made
    made["time_to_first_token_ms"] = _ms(first_token_at - computed_at)
    made["generation_time_ms"] = _ms(timing.ended_at - first_token_at)
    num_tokens, is_lone = answers[0].num_generated, len(answers) == 1
    if is_lone and timing.ended_at > computed_at:
        made["tokens_per_second"] = round(num_tokens / (timing.ended_at - computed_at), 3)
    if is_lone and num_tokens > 1 and answers[0].request.sampling.width == 1:
        made["mean_itl_ms"] = _ms((timing.ended_at - first_token_at) / (num_tokens - 1))
    return made


def _find_timing(answers: Sequence[Answer]) -> RequestTiming | None:
    """Returns the timing of the prompt whose answer ended last."""
    timings = [answer.timing for answer in answers if answer.timing is not None]
    return max(timings, key=lambda timing: timing.ended_at, default=None)


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)


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
