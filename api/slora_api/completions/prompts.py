"""Turns the body of a request into the engine's input: token ids that fit into the context, and sampling parameters.

This module refuses invalid requests before the engine sees them, and its errors name the field. Cheap checks come
first: counts and sampling values, then characters, then tokens.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from slora.core.engine_state import EngineInfo
from slora.core.errors import RequestRefused
from slora.core.request import Pooling
from slora.core.request_check import (
    check_adapters,
    check_embedded_tokens,
    check_max_tokens,
    check_pooling,
    check_sampling,
    check_terms,
    check_token_ids,
    find_answer_room,
)
from slora.core.sampling_params import OutputKind, SamplingParams, StructuredOutput
from slora.text.generation_defaults import GenerationDefaults
from slora_api.chat.answer_reader import AnswerSyntax
from slora_api.chat.chat_grammar import ChatGrammar
from slora_api.completions.answer_size import AnswerSize
from slora_api.completions.prompt_tokenizer import PromptTokenizer, TokenizedChat
from slora_api.completions.request_limiter import RequestLimiter
from slora_api.completions.schemas import AnswerFields, ChatRequest, CompletionRequest
from slora_api.completions.service_terms import ServiceTerms
from slora_api.embeddings.schemas import EmbeddingRequest
from slora_api.responses.responses_request import ResponsesRequest
from slora_api.sandbox.grammar_checks import GrammarChecks

# The default of max_tokens in OpenAI's completions API.
_COMPLETION_TOKENS = 16
# Checking the sampling parameters of this many prompts, each with the largest logit_bias, takes 2 ms.
_PROMPTS_AT_ONCE = 16
# Checking this many ids takes 1 ms.
_IDS_AT_ONCE = 1 << 15


# Fields of the body that are passed to SamplingParams under the same name.
_AS_SENT = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "min_tokens",
    "seed",
    "ignore_eos",
    "n",
    "best_of",
    "use_beam_search",
    "length_penalty",
    "early_stopping",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "prompt_lookup",
)
ConversationRequest = ChatRequest | ResponsesRequest

_ANY_OBJECT = '{"type": "object"}'
_JSON_KINDS = (OutputKind.JSON_SCHEMA, OutputKind.COMPACT_JSON, OutputKind.JSON_OBJECT)
# Sampling defaults of a generation_config.json. Beam search ignores them, because it does not sample.
_OF_CHANCE = ("temperature", "top_p", "top_k", "min_p")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, ready for the engine.

    echo: the text to repeat before each answer; None if the prompt is not repeated.
    is_alone: whether the prompt is only scored and repeated (max_tokens 0).
    lists_every_token: whether log-probabilities are listed for all token ids of the answer, also for its stop token.
    syntax: how the answer's tool calls and reasoning are written; None if the answer has neither.
    """

    token_ids: list[int]
    sampling: SamplingParams
    echo: str | None = None
    is_alone: bool = False
    syntax: AnswerSyntax | None = None
    lists_every_token: bool = False


def _sampling(
    fields: AnswerFields,
    defaults: GenerationDefaults,
    info: EngineInfo,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    form: StructuredOutput | None,
    bad_words: tuple[tuple[int, ...], ...],
) -> SamplingParams:
    """Makes the sampling parameters of a request from its fields and the model's defaults.

    max_tokens: None if it is not known yet.
    prompt_logprobs: number of most probable tokens to list for each token of the prompt.
    form: the structured output that the answers must follow; None for free text.
    bad_words: the tokens of the field `bad_words`.
    """
    values = defaults.cap_min_tokens(max_tokens).explicit_fields()
    if form is not None:
        values.pop("min_tokens", None)  # The grammar of the form determines where the answer may end.
    sent = {name: value for name in _AS_SENT if (value := getattr(fields, name, None)) is not None}
    if sent.get("use_beam_search"):
        values = {name: value for name, value in values.items() if name not in _OF_CHANCE} | {
            "temperature": 0.0
        }
    values |= sent
    if values.get("top_k") == -1:  # In vLLM, -1 turns top_k off.
        values["top_k"] = 0
    values["stop"] = defaults.stop if fields.stop is None else tuple(fields.stop)
    values["stop_token_ids"] = (
        *(fields.stop_token_ids or ()),
        *(() if fields.ignore_eos else defaults.stop_token_ids),
    )
    if fields.allowed_token_ids is not None:
        values["allowed_token_ids"] = tuple(fields.allowed_token_ids)
    values["bad_words"] = bad_words
    values["logprob_token_ids"] = tuple(dict.fromkeys(fields.logprob_token_ids or ()))
    values |= {"max_tokens": max_tokens, "logprobs": logprobs, "structured_output": form}
    sampling = SamplingParams(**values, prompt_logprobs=prompt_logprobs)
    check_sampling(sampling, info)
    if fields.stream:
        sampling.refuse_streaming()
    return sampling


def _answer_syntax(body: ConversationRequest, chat: TokenizedChat) -> AnswerSyntax | None:
    tools, traits = body.shown_tools, chat.traits
    thinks = traits.thinks and _thinks_before(body.structured_output)
    if not tools and not thinks:
        return None
    return AnswerSyntax(
        thinks,
        chat.ends_in_thought,
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


@dataclass(frozen=True, slots=True)
class PromptMaker:
    """Makes the prompts of one request."""

    terms: ServiceTerms
    tokenizer: PromptTokenizer
    grammars: GrammarChecks
    limiter: RequestLimiter
    info: EngineInfo

    async def completion_prompts(self, body: CompletionRequest) -> list[Prompt]:
        """Makes the prompts of a completion request. Raises BadRequest, RequestRefused, and the errors of the meter and
        the limiter.
        """
        given = body.prompts
        form = body.structured_output
        draft = self._draft(body, form, body.logprobs, body.prompt_logprobs, len(given))
        await self.grammars.check(self.terms.tenant, form)
        for item in given:
            if isinstance(item, list) and not body.truncates:
                find_answer_room(len(item), self.info.max_model_len)
        if body.echo:
            self.tokenizer.bounds.check_echo(
                draft.num_choices * sum(len(item) for item in given if isinstance(item, str))
            )
        room = max(1, self.info.max_model_len - (body.max_tokens or 1))
        token_ids = await self._token_ids(body, given, room, "prompt")
        if body.truncates:
            given = token_ids
        num_tokens = sum(map(len, token_ids))
        self.tokenizer.bounds.check_prompt_tokens(num_tokens)
        size = AnswerSize(
            draft.num_choices,
            body.count_listed(body.logprobs),
            body.prompt_logprobs,
            echoes=bool(body.echo),
            lists_prompts=bool(body.return_token_ids),
        )
        default = self.tokenizer.model.defaults.max_tokens or _COMPLETION_TOKENS
        default = min(default, self._answer_room(size, draft, len(given), num_tokens))
        bad_words = await self.tokenizer.encode_bad_words(body.bad_words or ())
        prompts = []
        for position, (item, ids) in enumerate(zip(given, token_ids, strict=True)):
            if position and not position % _PROMPTS_AT_ONCE:
                await asyncio.sleep(0)
            prompts.append(await self._completion_prompt(body, item, ids, default, bad_words))
        wanted = sum(prompt.sampling.max_tokens or 0 for prompt in prompts)
        size.check(self.tokenizer.bounds, num_tokens, wanted)
        return prompts

    async def embedding_inputs(self, body: EmbeddingRequest, pooling: Pooling) -> list[list[int]]:
        """Returns the token ids of each input. Raises the same errors as `completion_prompts`."""
        check_terms(self.terms.priority, None, self.info)
        check_pooling(pooling, self.info)
        given, bounds = body.inputs, self.tokenizer.bounds
        dimensions = pooling.dimensions or self.info.shape.hidden_size
        bounds.check_embeddings(len(given), dimensions, is_base64=body.is_base64)
        self.limiter.check_generation(self.terms.tenant, 1)
        for item in given:
            if isinstance(item, list) and not body.truncates:
                check_embedded_tokens(len(item), self.info.max_model_len)
        inputs = await self._token_ids(body, given, self.info.max_model_len, "input")
        for token_ids in inputs:
            check_embedded_tokens(len(token_ids), self.info.max_model_len)
        bounds.check_prompt_tokens(sum(map(len, inputs)), "input")
        return inputs

    async def conversation_prompt(self, body: ConversationRequest) -> Prompt:
        """Makes the prompt of a conversation. Raises BadRequest, RequestRefused, and the errors of the meter and the
        limiter.
        """
        logprobs, field = body.num_top_logprobs, body.messages_field
        draft = self._draft(body, body.structured_output, logprobs, body.prompt_logprobs, 1)
        chat = await self.tokenizer.encode_chat(body.chat_messages, body.shown_tools, body, field)
        token_ids = chat.token_ids
        room = find_answer_room(len(token_ids), self.info.max_model_len, field)
        wanted, param = body.answer_limit
        size = AnswerSize(
            draft.num_choices,
            body.count_listed(logprobs),
            body.prompt_logprobs,
            echoes=False,
            param="top_logprobs",
            length_param=param,
        )
        most = min(room, self._answer_room(size, draft, 1, len(token_ids)))
        if wanted is None:
            max_tokens = min(most, self.tokenizer.model.defaults.max_tokens or most)
        elif body.caps_answer:
            max_tokens = min(most, wanted)
        else:
            check_max_tokens(wanted, len(token_ids), self.info.max_model_len, param)
            max_tokens = wanted
        size.check(self.tokenizer.bounds, len(token_ids), max_tokens)
        syntax = _answer_syntax(body, chat)
        form = self._conversation_form(body, syntax)
        await self.grammars.check(self.terms.tenant, form)
        bad_words = await self.tokenizer.encode_bad_words(body.bad_words or ())
        sampling = self._sampling(body, max_tokens, logprobs, body.prompt_logprobs, form, bad_words)
        lists_every_token = isinstance(body, ChatRequest) and bool(body.return_token_ids)
        return Prompt(token_ids, sampling, syntax=syntax, lists_every_token=lists_every_token)

    def _conversation_form(
        self, body: ConversationRequest, syntax: AnswerSyntax | None
    ) -> StructuredOutput | None:
        """Returns the structured output that constrains the whole answer: the form that the request asks for, the tool
        calls and the reasoning.
        """
        forced = body.forced_tools
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
            special_ids=self.tokenizer.encoder.tokenizer.find_special_tokens(syntax.markers),
            allows_text=form is None and not forced,
            is_compact=form is not None and form.kind is OutputKind.COMPACT_JSON,
        )
        return StructuredOutput.grammar(grammar.write(), "tools" if form is None else form.param)

    def _draft(
        self,
        body: AnswerFields,
        form: StructuredOutput | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
        num_prompts: int,
    ) -> SamplingParams:
        """Does all checks that need no token ids. Returns the sampling parameters, without max_tokens."""
        check_terms(self.terms.priority, self.terms.deadline_s, self.info)
        check_adapters(self.tokenizer.model.adapters, self.info)
        draft = self._sampling(body, None, logprobs, prompt_logprobs, form)
        self.limiter.check_generation(self.terms.tenant, num_prompts, draft.width, draft.width_param)
        return draft

    def _sampling(
        self,
        body: AnswerFields,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
        form: StructuredOutput | None,
        bad_words: tuple[tuple[int, ...], ...] = (),
    ) -> SamplingParams:
        return _sampling(
            body,
            self.tokenizer.model.defaults,
            self.info,
            max_tokens,
            logprobs,
            prompt_logprobs,
            form,
            bad_words,
        )

    def _answer_room(self, size: AnswerSize, draft: SamplingParams, num_prompts: int, num_tokens: int) -> int:
        """Returns the maximum number of tokens of an answer if the request has no max_tokens. num_tokens: tokens of all
        prompts.
        """
        room = size.answer_room(self.tokenizer.bounds, num_prompts, num_tokens)
        quota = self.tokenizer.meter.default_answer_tokens(num_tokens, num_prompts * draft.width)
        return room if quota is None else min(room, quota)

    async def _token_ids(
        self,
        body: CompletionRequest | EmbeddingRequest,
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
            ids = await self.tokenizer.encode_texts(
                texts, add_special_tokens=body.add_special_tokens, param=param
            )
        ids = [body.truncate(token_ids, room) for token_ids in ids]
        num_checked = 0
        for token_ids in ids:
            check_token_ids(token_ids, self.info.vocab_size, param)
            num_checked += len(token_ids)
            if num_checked > _IDS_AT_ONCE:
                num_checked = 0
                await asyncio.sleep(0)
        return ids

    async def _completion_prompt(
        self,
        body: CompletionRequest,
        given: str | list[int],
        token_ids: list[int],
        default: int,
        bad_words: tuple[tuple[int, ...], ...],
    ) -> Prompt:
        room, max_tokens = find_answer_room(len(token_ids), self.info.max_model_len), body.max_tokens
        if max_tokens is None:
            max_tokens = min(default, room)
        else:
            check_max_tokens(max_tokens, len(token_ids), self.info.max_model_len)
        if not body.echo:
            sampling = self._sampling(
                body,
                max_tokens,
                body.logprobs,
                body.prompt_logprobs,
                body.structured_output,
                bad_words,
            )
            return Prompt(token_ids, sampling, lists_every_token=bool(body.return_token_ids))
        text = (
            given
            if isinstance(given, str)
            else await self.tokenizer.encoder.decode(self.terms.tenant, token_ids)
        )
        is_alone = body.max_tokens == 0
        asked = [count for count in (body.logprobs, body.prompt_logprobs) if count is not None]
        # The engine scores a prompt only if it computes at least one token of an answer.
        sampling = self._sampling(
            body,
            max_tokens or 1,
            body.logprobs,
            max(asked, default=None),
            body.structured_output,
            bad_words,
        )
        return Prompt(token_ids, sampling, text, is_alone, lists_every_token=bool(body.return_token_ids))
