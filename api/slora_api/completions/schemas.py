"""The JSON bodies and numeric query parameters that this API accepts, and their conversion to the engine's types.

No field is ignored silently. An unknown field is refused by name. Unsupported fields of OpenAI's or vLLM's API are
declared as `Unsupported`. Such a field is refused unless its value has no effect, such as `functions: []`.
`SamplingParams` and `slora.core.request_check` check the ranges of values. As in OpenAI's API, null means the same as
leaving the field out.

This module does not depend on adapters, tokens or the engine.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)

from slora.core.sampling_params import MAX_BAD_WORD_CHARS, MAX_LOGPROBS, StructuredOutput
from slora_adapters.errors import abbreviate
from slora_api.adapters.served_model import AdapterWeight
from slora_api.chat.tool_schemas import (
    MAX_TOOLS,
    AnyChoice,
    FunctionTool,
    NamedChoice,
    NamedFunction,
    SentCall,
    SentFunction,
    Tool,
    ToolChoice,
    Tools,
    check_tool_choice,
    find_forced_tools,
    find_shown_tools,
)
from slora_api.completions.output_fields import OutputFields
from slora_api.completions.prompt_fields import PromptFields
from slora_api.http.field_types import (
    Name,
    RequestModel,
    Text,
    check_length,
    check_object,
    join_text_parts,
    make_refusal,
    note_ignored,
    refuse_surrogates,
)
from slora_api.http.unsupported import Unsupported


def check_prompt(value: Any, info: ValidationInfo) -> Any:
    """Checks all four forms of a prompt with one error message. A pydantic union would try every branch, and report one
    error for each branch.
    """
    items = value if isinstance(value, list) else [value]
    kinds = set(map(type, items))
    if kinds == {str}:
        for text in items:
            refuse_surrogates(text)
        return value
    if kinds == {int} and isinstance(value, list):
        return value
    if kinds == {list} and all(items) and set().union(*(map(type, item) for item in items)) == {int}:
        return value
    raise make_refusal(
        "`{param}` must be a string, a list of token ids, or a list of either, and not empty.",
        param=info.field_name,
    )


def list_prompts(value: "SentPrompt") -> Sequence[str | list[int]]:
    """Returns one entry for each prompt of a request."""
    if isinstance(value, str):
        return [value]
    # There may be 130,000 ids. The first item decides, because the schema has checked that all items have one type.
    if isinstance(value[0], int):
        return cast(Sequence[list[int]], [value])
    return cast(Sequence[str | list[int]], value)


def _read_content(value: Any, info: ValidationInfo) -> Any:
    """Returns the text of a message. Null is accepted only for the assistant, and becomes an empty text."""
    if value is None:
        if info.data.get("role") == "assistant":
            return ""
        raise make_refusal("is required unless the role is `assistant`")
    return join_text_parts(value, info, param="messages", kinds={"text": "text", "refusal": "refusal"})


def _check_bias(value: Any) -> Any:
    """Converts the keys of `logit_bias` to token ids. In JSON, keys are strings."""
    if value is None:
        return None
    is_object = isinstance(value, dict)
    wrong = [key for key in value if not _is_token_id(key)] if is_object else []
    if is_object and not wrong:
        return {int(token): bias for token, bias in value.items()}
    raise make_refusal(
        "`logit_bias` must be an object whose keys are token ids, such as {example}{wrong}.",
        param="logit_bias",
        example='{"42": -100}',
        wrong=f", but it has {abbreviate(wrong)}" if wrong else "",
    )


def _is_token_id(key: Any) -> bool:
    return isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10


def _check_bad_words(words: list[str]) -> list[str]:
    for word in words:
        check_length(word, MAX_BAD_WORD_CHARS)
        if not word.strip():
            raise make_refusal("it has a word that is empty or only white space; remove it")
    return words


def as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


# OpenAI's bounds.
_MAX_PAIRS, _MAX_KEY_CHARS, _MAX_VALUE_CHARS = 16, 64, 512


def _check_metadata(value: dict[str, str]) -> dict[str, str]:
    if len(value) > _MAX_PAIRS:
        raise make_refusal(
            "it has {count} pairs, and at most {limit} are accepted; send fewer",
            count=len(value),
            limit=_MAX_PAIRS,
        )
    if any(len(name) > _MAX_KEY_CHARS or len(text) > _MAX_VALUE_CHARS for name, text in value.items()):
        raise make_refusal(
            "it has a key or a value that is too long; keys have at most {key} characters and values at most {value}",
            key=_MAX_KEY_CHARS,
            value=_MAX_VALUE_CHARS,
        )
    return value


Metadata = Annotated[
    dict[Text, Text],
    AfterValidator(_check_metadata),
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": _MAX_PAIRS,
            "propertyNames": {"maxLength": _MAX_KEY_CHARS},
            "additionalProperties": {"type": "string", "maxLength": _MAX_VALUE_CHARS},
        }
    ),
]


def _ignore_nested_metadata(value: Any, info: ValidationInfo) -> Any:
    """Ignores metadata with nested values. Gateways send their own metadata in this field."""
    if isinstance(value, dict) and any(isinstance(item, dict | list) for item in value.values()):
        note_ignored(info, "metadata")
        return None
    return value


class StreamOptions(RequestModel):
    """The options of a stream. include_usage: if true, a last chunk has the usage. continuous_usage_stats: as in vLLM,
    if this and `include_usage` are true, every chunk has the usage so far.
    include_timing: if this and `include_usage` are true, the last chunk also has `metrics`: how long each stage took.
    include_obfuscation: padding of chunks against traffic analysis, which is not supported.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_timing: bool | None = None
    include_obfuscation: Annotated[Any, Unsupported(False)] = None


class ModelFields(RequestModel):
    """The fields of every request that a model computes. A field that the client did not send is None.

    adapters: the model that computes is the base model plus the weighted sum of these adapters, as if they were merged.
    `model` must then be the base model or `default`.
    priority: as in vLLM, but only among the requests of one tenant; lower is served sooner.
    """

    hint_path = ""

    model: Name
    adapters: list[AdapterWeight] | None = None
    user: Name | None = None
    priority: int | None = None


class AnswerFields(ModelFields):
    """The fields of every request for an answer.

    deadline_ms: time limit for the first token. A beam search sends no token before its end, so the limit applies to
    the whole search. A request that cannot meet the limit gets the error 503 `deadline_missed`.
    prompt_lookup: false forbids drafts from the request's own text. Drafts never change an answer.
    safety_identifier, prompt_cache_key, metadata: for the client's own records, without effect.
    request_id: as in vLLM, the end of the answer's id.
    allowed_token_ids: as in vLLM, the only tokens that may be sampled. A stop token is sampled only if it is listed.
    bad_words: as in vLLM, texts that are never sampled. Two tokenizations of each text are excluded: at the beginning
    of a text, and after a space.
    logprob_token_ids: as in vLLM, tokens whose log-probabilities are listed instead of those of the most probable
        tokens. The sampled token is always listed.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[int, float] | None, BeforeValidator(_check_bias)] = None
    allowed_token_ids: list[int] | None = None
    bad_words: Annotated[list[Text], AfterValidator(_check_bad_words)] | None = None
    logprob_token_ids: list[int] | None = None
    min_tokens: int | None = None
    seed: int | None = None
    stop: Annotated[
        list[Text] | None, BeforeValidator(as_list, json_schema_input_type=str | list[str] | None)
    ] = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_lookup: bool | None = None
    stream: bool | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None
    metadata: Annotated[Metadata | None, BeforeValidator(_ignore_nested_metadata)] = None
    request_id: Name | None = None
    deadline_ms: int | None = None
    # OpenAI's fields.
    store: Annotated[Any, Unsupported(False)] = None
    service_tier: Annotated[Any, Unsupported("auto", "default")] = None
    prompt_cache_options: Annotated[Any, Unsupported({})] = None
    # vLLM's fields.
    spaces_between_special_tokens: Annotated[Any, Unsupported(True)] = None
    logits_processors: Annotated[Any, Unsupported([])] = None
    repetition_detection: Annotated[Any, Unsupported()] = None
    thinking_token_budget: Annotated[Any, Unsupported(-1)] = None
    watermarking: Annotated[Any, Unsupported(False)] = None
    truncate_prompt_tokens: Annotated[Any, Unsupported(instead="Leave out the oldest messages.")] = None
    truncation_side: Annotated[Any, Unsupported("left", "right")] = None
    session_id: Annotated[Any, Unsupported(instead="Send the header X-Session-Id.")] = None
    return_token_offsets: Annotated[Any, Unsupported(False)] = None
    return_mm_kwargs: Annotated[Any, Unsupported(True)] = None
    return_weight_versions: Annotated[Any, Unsupported(False)] = None
    mm_payload: Annotated[Any, Unsupported("tensors")] = None
    routed_experts_prompt_start: Annotated[Any, Unsupported(0)] = None
    stream_interval: Annotated[Any, Unsupported(1)] = None
    cache_salt: Annotated[Any, Unsupported(instead="Each tenant has a prefix cache of its own.")] = None
    kv_transfer_params: Annotated[Any, Unsupported({})] = None
    ec_transfer_params: Annotated[Any, Unsupported({})] = None
    vllm_xargs: Annotated[Any, Unsupported({})] = None

    @property
    def structured_output(self) -> StructuredOutput | None:
        """The form of the answer; None if it is free."""
        return None

    def count_listed(self, num_top: int | None) -> int | None:
        """Returns how many log-probabilities are listed for each token besides the token's own log-probability.

        num_top: how many of the most probable tokens the request asks for; None if it asks for no log-probabilities.
        """
        if num_top is None or not self.logprob_token_ids:
            return num_top
        return len(self.logprob_token_ids) + 1


class GenerationFields(OutputFields, AnswerFields):
    """The fields that both kinds of completion share.

    use_beam_search: as in vLLM, answers with a beam search of `best_of` beams, by default `n`. The temperature is then
    0 unless the client sends one, and a stream sends each answer in one piece.
    return_token_ids: as in vLLM, adds the token ids of the prompt and of the answer.
    return_tokens_as_token_ids: as in vLLM, log-probabilities show `token_id:7` in place of the text of token 7.
    """

    max_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    prompt_logprobs: int | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def include_timing(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.include_timing)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @model_validator(mode="after")
    def _what_needs_a_stream_and_what_forbids_it(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise make_refusal(
                "`stream_options` is only allowed with `stream: true`.", param="stream_options"
            )
        if self.prompt_logprobs is not None and self.stream:
            raise make_refusal(
                "`prompt_logprobs` is not allowed with `stream: true`.", param="prompt_logprobs"
            )
        return self


SentPrompt = str | list[str] | list[int] | list[list[int]]


class CompletionRequest(PromptFields, GenerationFields):
    """POST /v1/completions."""

    prompt: Annotated[SentPrompt, PlainValidator(check_prompt, json_schema_input_type=SentPrompt)]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: Annotated[Any, Unsupported("")] = None
    prompt_embeds: Annotated[Any, Unsupported([])] = None

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """One entry for each prompt of the request."""
        return list_prompts(self.prompt)

    @model_validator(mode="after")
    def _no_echo_of_chosen_logprobs(self) -> Self:
        if self.echo and self.logprob_token_ids:
            raise make_refusal(
                "`logprob_token_ids` is not allowed with `echo: true`.", param="logprob_token_ids"
            )
        return self


class TextPart(RequestModel):
    """A part of a message's content. annotations, cache_control, citations: no effect."""

    type: Literal["text"]
    text: str
    annotations: Any = None
    cache_control: Any = None
    citations: Any = None


class SentAudio(RequestModel):
    """The audio of an earlier answer. The model reads its transcript. id, data, expires_at: no effect."""

    transcript: Text = ""
    id: Any = None
    data: Any = None
    expires_at: Any = None


class ChatMessage(RequestModel):
    """One turn of a conversation. The role `developer` is OpenAI's newer name for `system`. A message with the role
    `function` answers the `function_call` before it, which is OpenAI's older form of a tool call.

    content: may be left out only in messages of the assistant.
    refusal: the text of an earlier answer that refused; shown to the model if there is no content.
    tool_call_id: the id of the call that a message with the role `tool` answers.
    reasoning, reasoning_content: two names for the reasoning of an earlier answer. The chat template decides whether
    the model sees it.
    annotations, cache_control, citations, parsed, provider_specific_fields, reasoning_details, thinking_blocks: added
        by answers and clients; no effect.

    Clients send the messages of earlier answers back, with all fields of an answer.
    """

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[
        Text, BeforeValidator(_read_content, json_schema_input_type=str | list[TextPart] | None)
    ] = Field(None, validate_default=True)
    name: Name | None = None
    refusal: Text | None = None
    audio: SentAudio | None = None
    tool_calls: list[SentCall] | None = None
    tool_call_id: Name | None = None
    function_call: SentFunction | None = None
    reasoning: Text | None = None
    reasoning_content: Text | None = None
    annotations: Any = None
    cache_control: Any = None
    citations: Any = None
    parsed: Any = None
    provider_specific_fields: Any = None
    reasoning_details: Any = None
    thinking_blocks: Any = None

    @model_validator(mode="after")
    def _fields_of_its_role(self) -> Self:
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise make_refusal("must have `tool_call_id` with the role `tool`, and with no other role")
        of_assistant = self.tool_calls or self.function_call or self.thoughts or self.refusal or self.audio
        if self.role != "assistant" and of_assistant:
            raise make_refusal(
                "has the role `{role}`; only a message of the assistant has calls, reasoning, a refusal and audio",
                role=self.role,
            )
        if self.audio is not None and not self.text:
            raise make_refusal("has audio without a transcript; this model reads text only")
        if self.role == "function" and self.name is None:
            raise make_refusal("must have `name` with the role `function`")
        return self

    @property
    def text(self) -> str:
        """The text that the model sees."""
        return self.content or self.refusal or (self.audio.transcript if self.audio is not None else "")

    @property
    def num_chars(self) -> int:
        """The number of characters that a chat template may show."""
        num_chars = len(self.text) + len(self.name or "") + len(self.thoughts)
        return num_chars + sum(call.num_chars for call in self.tool_calls or ())

    @property
    def thoughts(self) -> str:
        return self.reasoning_content or self.reasoning or ""

    def for_template(self) -> dict[str, Any]:
        """Returns the message in the form that chat templates expect."""
        role = "system" if self.role == "developer" else self.role
        made: dict[str, Any] = {"role": role, "content": self.text}
        if self.name is not None:
            made["name"] = self.name
        if self.tool_call_id is not None:
            made["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            made["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.thoughts:
            made["reasoning"] = made["reasoning_content"] = self.thoughts
        return made


# Messages of other routes are copies of this template. Copying takes a tenth of the time of model_construct. It also
# avoids a second check of the texts, which may be long.
_MESSAGE = ChatMessage(role="user", content="")


def make_message(role: str, content: str, **fields: Any) -> ChatMessage:
    """Returns a message. The texts are already checked."""
    return _MESSAGE.model_copy(update={"role": role, "content": content, **fields})


# OpenAI's values, and vLLM's `max`.
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Thinking(RequestModel):
    """The switch of the reasoning in the APIs of Anthropic, DeepSeek and Z.ai. budget_tokens: ignored. display: no
    effect.
    """

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: int | None = None
    display: Any = None

    @property
    def effort(self) -> ReasoningEffort:
        return "none" if self.type == "disabled" else "medium"

    @model_validator(mode="after")
    def _note_the_budget(self, info: ValidationInfo) -> Self:
        if self.budget_tokens is not None:
            note_ignored(info, "thinking.budget_tokens")
        return self


def _read_thinking(value: Any) -> Any:
    return {"type": "enabled" if value else "disabled"} if isinstance(value, bool) else value


ThinkingSwitch = Annotated[Thinking, BeforeValidator(_read_thinking, json_schema_input_type=Thinking | bool)]


class TemplateFields(RequestModel):
    """The fields that control how a conversation becomes a prompt, as in vLLM.

    chat_template_kwargs: further variables of the chat template, such as `{"enable_thinking": false}`.
    add_generation_prompt: whether the prompt ends with the beginning of an answer; by default, it does.
    continue_final_message: the prompt ends with the text of the last message, which the answer continues.
    add_special_tokens: whether the tokenizer adds its special tokens to those of the template; by default, it does not.
    """

    hint_path = ""
    # Whether the effort of reasoning is ignored where the model has no switch for it.
    is_effort_hint: ClassVar[bool] = False
    # Whether an answer that cannot have the requested number of tokens is shorter. Otherwise, the request is refused.
    caps_answer: ClassVar[bool] = False

    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(check_object)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template: Annotated[Any, Unsupported(instead="Upload the template with the adapter.")] = None
    documents: Annotated[Any, Unsupported([])] = None
    media_io_kwargs: Annotated[Any, Unsupported({})] = None
    mm_processor_kwargs: Annotated[Any, Unsupported({})] = None

    @property
    def effort(self) -> tuple[ReasoningEffort | None, str]:
        """The reasoning effort, and the field that sets it."""
        return None, ""

    @model_validator(mode="after")
    def _continues_or_begins(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise make_refusal(
                "`continue_final_message` and `add_generation_prompt` contradict each other; send only one of them.",
                param="continue_final_message",
            )
        return self


class ChatTemplateFields(TemplateFields):
    """A conversation with tools. tools: the functions that the model may call."""

    tools: Tools | None = None

    @property
    def shown_tools(self) -> list[Tool]:
        """The tools that the model sees."""
        return self.tools or []


def _check_messages(messages: list[ChatMessage]) -> list[ChatMessage]:
    _check_tool_messages(messages)
    if any(message.function_call is not None or message.role == "function" for message in messages):
        return _convert_function_calls(messages)
    return messages


def _convert_function_calls(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Converts OpenAI's older `function_call` and messages with the role `function` to tool calls and their results."""
    made, call_id = list[ChatMessage](), ""
    for index, message in enumerate(messages):
        if message.function_call is not None:
            call_id = f"function-{index}"
            call = SentCall(id=call_id, function=message.function_call)
            made.append(message.model_copy(update={"function_call": None, "tool_calls": [call]}))
        elif message.role == "function":
            call_id = call_id or f"function-{index}"
            made.append(message.model_copy(update={"role": "tool", "tool_call_id": call_id}))
        else:
            made.append(message)
    return made


_Messages = Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True), AfterValidator(_check_messages)]


class ConversationFields(TemplateFields, AnswerFields):
    """The fields and the reading of every request that continues a conversation.

    tool_choice: `none` leaves the tools out of the prompt. With `required`, or the name of a function, the model must
        call a tool, with arguments that follow the tool's schema.
    parallel_tool_calls: if false, an answer has at most one call.
    top_logprobs: how many of the most probable tokens to list for each token.
    """

    messages_field: ClassVar[str]

    tool_choice: AnyChoice = None
    parallel_tool_calls: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def chat_messages(self) -> Sequence[ChatMessage]:
        raise NotImplementedError

    @property
    def chat_tools(self) -> list[Tool]:
        """The tools in the form of /v1/chat/completions."""
        raise NotImplementedError

    @property
    def num_top_logprobs(self) -> int | None:
        """How many of the most probable tokens to list for each token of the answer. None: no log-probabilities."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The value of `prompt_logprobs`; None where there is no such field."""
        return None

    @property
    def answer_limit(self) -> tuple[int | None, str]:
        """The maximum number of tokens of an answer, and the field that sets it. None: as many as the bounds allow."""
        raise NotImplementedError

    @property
    def chosen(self) -> AnyChoice:
        """The tool choice, whichever field sets it."""
        return self.tool_choice

    @cached_property
    def shown_tools(self) -> list[Tool]:
        """The tools that the model sees."""
        return find_shown_tools(self.chosen, self.chat_tools)

    @property
    def forced_tools(self) -> list[Tool]:
        return find_forced_tools(self.chosen, self.shown_tools)

    @property
    def names_tool(self) -> bool:
        """Whether the request names the tool that the model must call."""
        return isinstance(self.chosen, NamedChoice)

    @property
    def has_one_call(self) -> bool:
        """Whether an answer has at most one call."""
        return self.parallel_tool_calls is False


class ChatRequest(ConversationFields, ChatTemplateFields, GenerationFields):
    """POST /v1/chat/completions.

    functions, function_call: OpenAI's older form of `tools` and `tool_choice`. The answer then has `function_call`.
    reasoning_effort: sets the variables of the chat template that switch the reasoning. An effort that the template
        would ignore is refused, unless the model already behaves that way. A model that never reasons ignores it.
    thinking: another switch of the reasoning; `reasoning_effort` takes precedence.
    include_reasoning: as in vLLM, false leaves the reasoning out of the answer.
    """

    messages_field: ClassVar[str] = "messages"

    messages: _Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    # OpenAI's fields.
    tool_choice: ToolChoice = None
    functions: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    function_call: (
        Annotated[Literal["none", "auto"] | NamedFunction, Field(union_mode="left_to_right")] | None
    ) = None
    modalities: Annotated[Any, Unsupported(["text"], refuses_empty=True)] = None
    audio: Annotated[Any, Unsupported()] = None
    moderation: Annotated[Any, Unsupported()] = None
    reasoning_effort: ReasoningEffort | None = None
    thinking: ThinkingSwitch | None = None
    web_search_options: Annotated[Any, Unsupported(refuses_empty=True)] = None
    # vLLM's fields.
    include_reasoning: bool | None = None
    echo: Annotated[Any, Unsupported(False)] = None
    return_prompt_text: Annotated[Any, Unsupported(False)] = None

    @property
    def is_legacy(self) -> bool:
        """Whether the request has OpenAI's older fields for functions, so that the answer has them, too."""
        return bool(self.functions)

    @property
    def chosen(self) -> AnyChoice:
        if not self.functions:
            return self.tool_choice
        if isinstance(self.function_call, NamedFunction):
            return NamedChoice(type="function", function=self.function_call)
        return self.function_call

    @property
    def chat_tools(self) -> list[Tool]:
        legacy = [
            Tool.model_construct(type="function", function=function) for function in self.functions or ()
        ]
        return legacy or self.tools or []

    @property
    def has_one_call(self) -> bool:
        return super().has_one_call or self.is_legacy

    @property
    def chat_messages(self) -> Sequence[ChatMessage]:
        return self.messages

    @property
    def num_top_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs

    @property
    def answer_limit(self) -> tuple[int | None, str]:
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens, "max_completion_tokens"
        return self.max_tokens, "max_tokens"

    @property
    def effort(self) -> tuple[ReasoningEffort | None, str]:
        if self.thinking is not None and self.reasoning_effort is None:
            return self.thinking.effort, "thinking"
        return self.reasoning_effort, "reasoning_effort"

    @model_validator(mode="after")
    def _fields_that_depend_on_each_other(self) -> Self:
        check_tool_choice(self.tool_choice, self.tools)
        if self.functions and self.tools:
            raise make_refusal(
                "`functions` and `tools` contradict each other; send only `tools`.", param="functions"
            )
        if isinstance(self.function_call, NamedFunction) or self.function_call == "auto":
            names = [function.name for function in self.functions or ()]
            if isinstance(self.function_call, NamedFunction) and self.function_call.name not in names:
                raise make_refusal(
                    "`function_call` names a function that is not in `functions`; choose one of them: {known}",
                    param="function_call",
                    known=abbreviate(names),
                )
            if not names:
                raise make_refusal(
                    "`function_call` is only allowed when `functions` are sent.", param="function_call"
                )
        if self.top_logprobs and not self.logprobs:
            raise make_refusal("`top_logprobs` is only allowed with `logprobs: true`.", param="top_logprobs")
        if (
            None not in (self.max_tokens, self.max_completion_tokens)
            and self.max_tokens != self.max_completion_tokens
        ):
            raise make_refusal(
                "`max_tokens` and `max_completion_tokens` contradict each other; send only one of them.",
                param="max_tokens",
            )
        return self


class TokenizeRequest(ChatTemplateFields):
    """POST /tokenize, with vLLM's fields and either a prompt or messages.

    return_token_strs: adds the token strings of the vocabulary.
    """

    model: Name = "default"
    prompt: Text | None = None
    messages: _Messages | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise make_refusal("Send either `prompt` or `messages`.", param="prompt")
        return self


class DetokenizeRequest(RequestModel):
    """POST /detokenize, with vLLM's fields."""

    hint_path = ""

    model: Name = "default"
    tokens: list[int]


def _check_tool_messages(messages: Sequence[ChatMessage]) -> None:
    """Raises a refusal unless each message with tool calls is followed by exactly the results of its calls."""
    waiting: dict[str, None] = {}
    for index, message in enumerate(messages):
        if message.role == "tool":
            if message.tool_call_id not in waiting:
                raise make_refusal(
                    "`messages.{index}.tool_call_id` is {value}, which matches no unanswered tool call of the "
                    "preceding assistant message{known}",
                    param="messages",
                    index=index,
                    known=f"; these do: {abbreviate(list(waiting))}" if waiting else "",
                    value=abbreviate(message.tool_call_id),
                )
            del waiting[message.tool_call_id]
            continue
        if waiting:
            break
        for call in message.tool_calls or ():
            if call.id in waiting:
                raise make_refusal(
                    "`messages.{index}.tool_calls` has the id {value} twice; give each call an id of its own",
                    param="messages",
                    index=index,
                    value=abbreviate(call.id),
                )
            waiting[call.id] = None
    if waiting:
        raise make_refusal(
            "`messages` has no tool result for the calls {value}; after the assistant message, add one message with "
            "the role 'tool' for each call",
            param="messages",
            value=abbreviate(list(waiting)),
        )
