"""The types of the JSON of completions, for the OpenAPI document. `answer_format.py` makes the JSON.

Lists of log-probabilities may be long, so answers are written in slices and not checked against these types.
"""

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from slora.request import FinishReason

__all__ = ["ChatCompletion", "ChatCompletionChunk", "Completion", "CompletionChunk"]


class PromptTokensDetails(TypedDict):
    """cached_tokens: tokens of the prompt that were found in the prefix cache."""

    cached_tokens: int


class UsageObject(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptLogprob(TypedDict):
    """rank: null if the token is not among the most probable tokens that the engine listed."""

    logprob: float
    rank: int | None
    decoded_token: str


# For each token of the prompt, the log-probabilities by token id. The first token has none.
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
    prompt_logprobs: NotRequired[PromptLogprobs]


class Completion(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageObject


class CompletionChunkChoice(TypedDict):
    """finish_reason: null except in the last chunk of a choice."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class CompletionChunk(TypedDict):
    """One event of a stream. The last one has the usage and no choices, if the request asks for it."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: NotRequired[UsageObject | None]


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]
    refusal: None


class ChatAnswer(TypedDict):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(TypedDict):
    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageObject
    prompt_logprobs: NotRequired[PromptLogprobs]


class ChatDelta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]


class ChatChunkChoice(TypedDict):
    """finish_reason: null except in the last chunk of a choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletionChunk(TypedDict):
    """One event of a stream. The last one has the usage and no choices, if the request asks for it."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[UsageObject | None]
