"""Turns the body of a request into the engine's input: token ids that fit into the context, and sampling parameters.

This module refuses invalid requests before the engine sees them, and its errors name the field. Cheap checks come
first: counts and sampling values, then characters, then tokens.
`AnswerSize` computes the number of tokens and log-probabilities of an answer before the engine sees it.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from slora.core.errors import RequestRefused
from slora.core.request_check import (
    check_adapters,
    check_max_tokens,
    check_sampling,
    check_terms,
    check_token_ids,
    find_answer_room,
)
from slora.core.sampling_params import CHANCE_FIELDS, OutputKind, SamplingParams, StructuredOutput
from slora.text.answer import Answer, AnswerOptions
from slora_api.chat.answer_reader import THINK_START, AnswerSyntax
from slora_api.chat.chat_grammar import ChatGrammar
from slora_api.chat.template_traits import TemplateTraits
from slora_api.completions.inference_call import InferenceCall
from slora_api.completions.prompt_echo import PromptEchoes
from slora_api.completions.prompt_fields import PromptFields
from slora_api.completions.prompt_tokenizer import encode_bad_words, encode_chat, encode_texts, render_chat
from slora_api.completions.schemas import AnswerFields, CompletionRequest, ConversationFields
from slora_api.core.errors import BadRequest
from slora_api.http.request_bounds import RequestBounds

# The default of max_tokens in OpenAI's completions API.
_COMPLETION_TOKENS = 16
# Checking the sampling parameters of this many prompts, each with the largest logit_bias, takes 2 ms.
_PROMPTS_AT_ONCE = 16
# Checking this many ids takes 1 ms.
_IDS_AT_ONCE = 1 << 15


# Fields of SamplingParams that do not have the value of the body's field of the same name. `_draft` and
# `_finish_sampling` say what they have instead.
_CONVERTED = (
    "max_tokens",
    "logprobs",
    "prompt_logprobs",
    "logprob_token_ids",
    "allowed_token_ids",
    "bad_words",
    "stop",
    "stop_token_ids",
    "structured_output",
)
# Fields of the body that set the field of the same name in SamplingParams and in AnswerOptions.
_SAMPLING_FIELDS = tuple(field.name for field in fields(SamplingParams) if field.name not in _CONVERTED)
_OPTION_FIELDS = tuple(field.name for field in fields(AnswerOptions))

_ANY_OBJECT = '{"type": "object"}'
_JSON_KINDS = (OutputKind.JSON_SCHEMA, OutputKind.COMPACT_JSON, OutputKind.JSON_OBJECT)


@dataclass(frozen=True, slots=True)
class AnswerSize:
    """The number of tokens and log-probabilities that a request asks the answer to contain.

    num_choices: number of answers to each prompt.
    logprobs: number of most probable tokens to list for each token of the answer and of an echoed prompt; None if no
    log-probabilities are listed.
    prompt_logprobs: the value of the field of this name; None if the field was not sent.
    echoes: whether each choice repeats the text of its prompt.
    lists_prompts: whether each choice lists the token ids of its prompt.
    param: the field that asks for log-probabilities.
    length_param: the field that sets the number of tokens.

    Worked example: a prompt of 1,000 tokens and max_tokens 16, with n 128, echo, logprobs 20 and prompt_logprobs 20.
    The answer lists 128 x (1,016 x 21 + 1,000 x 21) = 5,419,008 log-probabilities.
    """

    num_choices: int
    logprobs: int | None
    prompt_logprobs: int | None
    echoes: bool
    param: str = "logprobs"
    lists_prompts: bool = False
    length_param: str = "max_tokens"

    def answer_room(self, bounds: RequestBounds, num_prompts: int, prompt_tokens: int) -> int:
        """Returns the maximum number of tokens per answer that the bounds allow; at least 1. prompt_tokens: tokens of
        all prompts together.
        """
        answers = self.num_choices * num_prompts
        room = (bounds.answer_tokens - self._echoed(prompt_tokens)) // answers
        if self.logprobs is not None:
            left = bounds.answer_logprobs - self._num_prompt_logprobs(prompt_tokens)
            room = min(room, left // (answers * (self.logprobs + 1)))
        return max(1, room)

    def check(self, bounds: RequestBounds, prompt_tokens: int, answer_tokens: int) -> None:
        """Raises BadRequest if the answer would exceed a bound.

        prompt_tokens: tokens of all prompts together. answer_tokens: sum of the tokens of one answer to each prompt.
        """
        drawn = self.num_choices * answer_tokens
        tokens = drawn + self._echoed(prompt_tokens)
        if tokens > bounds.answer_tokens:
            raise BadRequest(
                f"The request asks for {tokens} tokens in all choices and repeated prompts together; "
                f"this server returns at most {bounds.answer_tokens}. Send fewer prompts, or a "
                f"smaller `n` or `{self.length_param}`.",
                self.length_param,
            )
        listed = self._num_prompt_logprobs(prompt_tokens)
        if self.logprobs is not None:
            listed += drawn * (self.logprobs + 1)
        if listed > bounds.answer_logprobs:
            param = self.param if self.logprobs is not None else "prompt_logprobs"
            raise BadRequest(
                f"`{param}` asks for {listed} log-probabilities in all choices together; this server "
                f"returns at most {bounds.answer_logprobs}. Ask for fewer per token, or send fewer "
                f"prompts or a smaller `n` or `{self.length_param}`.",
                param,
            )

    def _echoed(self, prompt_tokens: int) -> int:
        return self.num_choices * prompt_tokens * (self.echoes + self.lists_prompts)

    def _num_prompt_logprobs(self, prompt_tokens: int) -> int:
        listed = 0
        if self.echoes and self.logprobs is not None:
            listed += self.num_choices * prompt_tokens * (self.logprobs + 1)
        if self.prompt_logprobs is not None:
            listed += self.num_choices * prompt_tokens * (self.prompt_logprobs + 1)
        return listed


def _draft(
    call: InferenceCall,
    body: CompletionRequest | ConversationFields,
    logprobs: int | None,
    prompt_logprobs: int | None,
    num_prompts: int,
) -> SamplingParams:
    """Does all checks that need no token ids. Returns the sampling parameters of the request, from its fields and the
    model's defaults. `_finish_sampling` adds what only the prompt determines.

    prompt_logprobs: number of most probable tokens to list for each token of the prompt.
    """
    check_terms(call.priority, call.deadline_s, call.info)
    check_adapters(call.model.adapters, call.info)
    defaults, form = call.model.defaults, body.structured_output
    values = defaults.explicit_fields()
    if form is not None:
        values.pop("min_tokens", None)  # The grammar of the form determines where the answer may end.
    sent = _read_sent(body, _SAMPLING_FIELDS)
    if sent.get("use_beam_search"):
        values = {name: value for name, value in values.items() if name not in CHANCE_FIELDS} | {
            "temperature": 0.0
        }
    values |= sent
    if values.get("top_k") == -1:  # In vLLM, -1 turns top_k off.
        values["top_k"] = 0
    values["stop"] = defaults.stop if body.stop is None else tuple(body.stop)
    values["stop_token_ids"] = (
        *(body.stop_token_ids or ()),
        *(() if body.ignore_eos else defaults.stop_token_ids),
    )
    if body.allowed_token_ids is not None:
        values["allowed_token_ids"] = tuple(body.allowed_token_ids)
    values["logprob_token_ids"] = tuple(dict.fromkeys(body.logprob_token_ids or ()))
    values |= {"max_tokens": None, "logprobs": logprobs, "structured_output": form}
    draft = SamplingParams(**values, prompt_logprobs=prompt_logprobs)
    check_sampling(draft, call.info)
    if body.stream:
        draft.refuse_streaming()
    call.meter.check_answers(num_prompts, draft.width, draft.width_param)
    return draft


def _finish_sampling(
    call: InferenceCall, body: AnswerFields, draft: SamplingParams, max_tokens: int, **values: Any
) -> SamplingParams:
    """Returns the draft with `max_tokens` and other values that were not known when it was made."""
    changed = {name: value for name, value in values.items() if value != getattr(draft, name)}
    if body.min_tokens is None and draft.min_tokens:
        # The default is lowered: a request's maximum takes precedence over a file's minimum, and the grammar of a form
        # determines where the answer may end.
        is_free = changed.get("structured_output") is None
        changed["min_tokens"] = min(draft.min_tokens, max_tokens) if is_free else 0
    completed = (
        replace(draft, max_tokens=max_tokens, **changed) if changed else draft.with_max_tokens(max_tokens)
    )
    if completed.structured_output is not None:
        call.encoder.tokenizer.check_form(completed.structured_output, _find_markers(call).values())
    if changed:
        check_sampling(completed, call.info)
    return completed


def _read_sent(body: AnswerFields, names: Sequence[str]) -> dict[str, Any]:
    """Returns those of the named fields that the client sent. A kind of request may lack some of them."""
    return {name: value for name in names if (value := getattr(body, name, None)) is not None}


def _answer_options(call: InferenceCall, body: AnswerFields, *, prompt_only: bool = False) -> AnswerOptions:
    shown = frozenset[str]() if call.syntax is None else call.syntax.markers
    return AnswerOptions(**_read_sent(body, _OPTION_FIELDS) | {"shown": shown, "prompt_only": prompt_only})


def _answer_syntax(body: ConversationFields, text: str, traits: TemplateTraits) -> AnswerSyntax | None:
    """text: the rendered conversation. If it ends within reasoning, the answer continues the reasoning."""
    tools = body.shown_tools
    thinks = traits.thinks and _thinks_before(body.structured_output)
    if not tools and not thinks:
        return None
    return AnswerSyntax(
        thinks,
        text.rstrip().endswith(THINK_START),
        traits.call_format if tools else None,
        frozenset(tool.function.name for tool in tools),
        # A template that shows no earlier calls does not keep its model from making calls.
        1 if body.has_one_call else traits.max_calls or None,
        body.names_tool,
        frozenset(tool.function.name for tool in tools if tool.custom is not None),
    )


def _thinks_before(form: StructuredOutput | None) -> bool:
    """Returns whether reasoning may precede the form. A form that is not JSON begins with the first token of the
    answer.
    """
    return form is None or form.kind in _JSON_KINDS


async def add_completion_answers(call: InferenceCall, body: CompletionRequest) -> None:
    """Makes the prompts of a completion request, and adds an answer for each. Raises BadRequest, RequestRefused, and
    the errors of the meter.
    """
    given, info, bounds = body.prompts, call.info, call.bounds
    draft = _draft(call, body, body.logprobs, body.prompt_logprobs, len(given))
    await call.services.grammars.check(call.tenant, draft.structured_output)
    for item in given:
        if isinstance(item, list) and not body.truncates:
            find_answer_room(len(item), info.max_model_len)
    if body.echo:
        bounds.check_echo(draft.num_choices * sum(len(item) for item in given if isinstance(item, str)))
    room = max(1, info.max_model_len - (body.max_tokens or 1))
    token_ids = await prompt_token_ids(call, body, given, room, "prompt")
    if body.truncates:
        given = token_ids
    num_tokens = sum(map(len, token_ids))
    bounds.check_prompt_tokens(num_tokens)
    size = AnswerSize(
        draft.num_choices,
        body.count_listed(body.logprobs),
        body.prompt_logprobs,
        echoes=bool(body.echo),
        lists_prompts=bool(body.return_token_ids),
    )
    default = call.model.defaults.max_tokens or _COMPLETION_TOKENS
    default = min(default, _answer_room(call, size, draft, len(given), num_tokens))
    bad_words = await encode_bad_words(call, body.bad_words or ())
    for position, ids in enumerate(token_ids):
        if position and not position % _PROMPTS_AT_ONCE:
            await asyncio.sleep(0)
        room, max_tokens = find_answer_room(len(ids), info.max_model_len), body.max_tokens
        if max_tokens is None:
            max_tokens = min(default, room)
        else:
            check_max_tokens(max_tokens, len(ids), info.max_model_len)
        # The engine scores a prompt only if it computes at least one token of an answer.
        is_scored = bool(body.echo) and max_tokens == 0
        sampling = _finish_sampling(
            call,
            body,
            draft,
            1 if is_scored else max_tokens,
            bad_words=bad_words,
            prompt_logprobs=_num_prompt_logprobs(body),
        )
        call.add_answer(ids, sampling, _answer_options(call, body, prompt_only=is_scored))
    wanted = sum(answer.request.sampling.max_tokens or 0 for answer in call.answers)
    size.check(bounds, num_tokens, wanted)
    if body.echo:
        encoder = call.encoder
        texts = [item if isinstance(item, str) else await encoder.decode(call.tenant, item) for item in given]
        call.echoes = PromptEchoes(texts, call.answers, encoder.tokenizer)


async def add_conversation_answer(call: InferenceCall, body: ConversationFields) -> Answer:
    """Makes the prompt of a conversation. Adds its answer and returns it. Raises BadRequest, RequestRefused, and the
    errors of the meter.
    """
    logprobs, field = body.num_top_logprobs, body.messages_field
    draft = _draft(call, body, logprobs, body.num_prompt_logprobs, 1)
    text, traits = await render_chat(call, body.chat_messages, body.shown_tools, body, field)
    token_ids = await encode_chat(call, text, body, field)
    room = find_answer_room(len(token_ids), call.info.max_model_len, field)
    wanted, param = body.answer_limit
    size = AnswerSize(
        draft.num_choices,
        body.count_listed(logprobs),
        body.num_prompt_logprobs,
        echoes=False,
        param="top_logprobs",
        length_param=param,
    )
    most = min(room, _answer_room(call, size, draft, 1, len(token_ids)))
    if wanted is None:
        max_tokens = min(most, call.model.defaults.max_tokens or most)
    elif body.caps_answer:
        max_tokens = min(most, wanted)
    else:
        check_max_tokens(wanted, len(token_ids), call.info.max_model_len, param)
        max_tokens = wanted
    size.check(call.bounds, len(token_ids), max_tokens)
    call.syntax = _answer_syntax(body, text, traits)
    form = _conversation_form(call, body)
    await call.services.grammars.check(call.tenant, form)
    bad_words = await encode_bad_words(call, body.bad_words or ())
    sampling = _finish_sampling(call, body, draft, max_tokens, bad_words=bad_words, structured_output=form)
    return call.add_answer(token_ids, sampling, _answer_options(call, body))


def _conversation_form(call: InferenceCall, body: ConversationFields) -> StructuredOutput | None:
    """Returns the structured output that constrains the whole answer: the form that the request asks for, the tool
    calls and the reasoning.
    """
    forced, syntax = body.forced_tools, call.syntax
    form = None if forced else body.structured_output  # Answers that must be calls have no content.
    are_strict = any(tool.function.strict for tool in body.shown_tools)
    if syntax is None or (form is None and not forced and not are_strict):
        return form
    if form is not None and form.kind not in _JSON_KINDS:
        raise RequestRefused(
            f"{form.param} asks for the form {form.kind.value}, which leaves no room for tool calls; omit tools, "
            "or ask for JSON",
            form.param,
        )
    grammar = ChatGrammar(
        syntax,
        [(tool.function.name, tool.function.parameters) for tool in forced or body.shown_tools],
        is_single=syntax.names_tool or syntax.max_calls == 1,
        schema=None if form is None else form.text or _ANY_OBJECT,
        special_ids=_find_markers(call),
        allows_text=form is None and not forced,
        is_compact=form is not None and form.kind is OutputKind.COMPACT_JSON,
    )
    return StructuredOutput.grammar(grammar.write(), "tools" if form is None else form.param)


def _find_markers(call: InferenceCall) -> dict[str, int]:
    """Returns the tokens that mark reasoning and tool calls, and that grammars name by their ids. Grammars do not have
    the tokens of an adapter behind those of the base model.
    """
    if call.syntax is None:
        return {}
    size = call.info.vocab_size - call.model.added_rows
    found = call.encoder.tokenizer.find_special_tokens(call.syntax.markers)
    return {text: token_id for text, token_id in found.items() if token_id < size}


def _num_prompt_logprobs(body: CompletionRequest) -> int | None:
    """Returns the prompt_logprobs for the engine, which an echo with log-probabilities needs too."""
    asked = (body.logprobs if body.echo else None, body.prompt_logprobs)
    return max((count for count in asked if count is not None), default=None)


def _answer_room(
    call: InferenceCall, size: AnswerSize, draft: SamplingParams, num_prompts: int, num_tokens: int
) -> int:
    """Returns the maximum number of tokens of an answer if the request has no max_tokens. num_tokens: tokens of all
    prompts.
    """
    room = size.answer_room(call.bounds, num_prompts, num_tokens)
    quota = call.meter.default_answer_tokens(num_tokens, num_prompts * draft.width)
    return room if quota is None else min(room, quota)


async def prompt_token_ids(
    call: InferenceCall,
    body: PromptFields,
    given: Sequence[str | list[int]],
    room: int,
    param: str,
) -> list[list[int]]:
    """Returns the checked token ids of each prompt, truncated if the request asks for this. given: either only
    texts or only token ids.

    room: the maximum number of tokens of a prompt. param: the field that holds the prompts.
    """
    texts = [item for item in given if isinstance(item, str)]
    ids = [item for item in given if isinstance(item, list)]
    if texts:
        ids = await encode_texts(call, texts, add_special_tokens=body.add_special_tokens, param=param)
    ids = [body.truncate(token_ids, room) for token_ids in ids]
    num_checked = 0
    for token_ids in ids:
        check_token_ids(token_ids, call.info.vocab_size, param)
        num_checked += len(token_ids)
        if num_checked > _IDS_AT_ONCE:
            num_checked = 0
            await asyncio.sleep(0)
    return ids
