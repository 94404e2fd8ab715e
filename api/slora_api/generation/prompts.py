"""From the body of a request to what the engine takes: token ids within the context, and sampling parameters.

Everything that can be refused is refused here, before the engine sees the request, with the field's name. Long texts
are tokenised on a thread (the tokenizer releases the interpreter while it works), so that one long prompt does not
hold up everybody's tokens.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slora.engine.info import EngineInfo
from slora.errors import ContextTooLong
from slora.sampling_params import SamplingParams
from slora.text.generation_defaults import GenerationDefaults
from slora.text.tokenizer import Tokenizer
from slora_api.errors import BadRequest
from slora_api.generation.chat_templates import ChatTemplates
from slora_api.generation.prompt_echo import PromptEcho
from slora_api.generation.served_model import ServedModel
from slora_api.schemas import ChatRequest, CompletionRequest, GenerationFields

__all__ = ["Prompt", "chat_prompt", "completion_prompts"]

# A text of 8,000 characters takes about a millisecond to tokenise: as long as a thread's round trip is worth.
_INLINE_CHARS = 8_000
# What OpenAI's completions API answers with when max_tokens is left out.
_COMPLETION_TOKENS = 16


# Fields of a body that mean what SamplingParams means by them.
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
)
# What a generation_config.json says of chance is nothing to a search, which has none.
_OF_CHANCE = ("temperature", "top_p", "top_k", "min_p")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, ready for the engine."""

    token_ids: list[int]
    sampling: SamplingParams
    echo: PromptEcho | None = None


async def _encode(encode: Callable[[str], list[int]], text: str) -> list[int]:
    return encode(text) if len(text) <= _INLINE_CHARS else await asyncio.to_thread(encode, text)


def _check_token_ids(token_ids: Sequence[int], info: EngineInfo) -> None:
    if not token_ids:
        raise BadRequest("`prompt` has no tokens; it needs at least one.", "prompt")
    wrong = next((token for token in token_ids if not 0 <= token < info.vocab_size), None)
    if wrong is not None:
        raise BadRequest(
            f"`prompt` holds token id {wrong}; this model's ids are 0 to {info.vocab_size - 1}.", "prompt"
        )


def _room(num_tokens: int, info: EngineInfo, param: str) -> int:
    """Tokens left for the answer. Raises ContextTooLong when there are none."""
    room = info.max_model_len - num_tokens
    if room < 1:
        raise ContextTooLong(
            f"This model's context is {info.max_model_len} tokens (max_model_len), prompt and answer together; the "
            f"prompt alone has {num_tokens}. Shorten it.",
            param,
        )
    return room


def _max_tokens(wanted: int | None, default: int | None, room: int, prompt_tokens: int, param: str) -> int:
    """What was asked for must fit; what was not asked for is cut to what fits."""
    if wanted is None:
        return room if default is None else min(default, room)
    if wanted > room:
        raise ContextTooLong(
            f"This model's context is {room + prompt_tokens} tokens (max_model_len), prompt and answer together; the "
            f"prompt has {prompt_tokens} and `{param}` asks for {wanted}. Ask for at most {room}.",
            param,
        )
    return wanted


def _sampling(
    fields: GenerationFields,
    defaults: GenerationDefaults,
    info: EngineInfo,
    max_tokens: int,
    logprobs: int | None,
    echo: PromptEcho | None,
) -> SamplingParams:
    values = defaults.cut_to(max_tokens).said()
    if fields.use_beam_search:
        values = {name: value for name, value in values.items() if name not in _OF_CHANCE} | {
            "temperature": 0.0
        }
    values |= {name: sent for name in _AS_SENT if (sent := getattr(fields, name, None)) is not None}
    if values.get("top_k") == -1:  # off, in vLLM
        values["top_k"] = 0
    values["stop"] = defaults.stop if fields.stop is None else tuple(fields.stop)
    values["stop_token_ids"] = (
        *(fields.stop_token_ids or ()),
        *(() if fields.ignore_eos else defaults.stop_token_ids),
    )
    values |= {"max_tokens": max_tokens, "logprobs": logprobs}
    sampling = SamplingParams(**values, prompt_logprobs=echo.most_logprobs if echo is not None else None)
    sampling.check_vocabulary(info.vocab_size)
    _check_choices(sampling, info, stream=bool(fields.stream))
    return sampling


def _check_choices(sampling: SamplingParams, info: EngineInfo, *, stream: bool) -> None:
    """Raises BadRequest or RequestRefused."""
    wanted, limit = sampling.width, info.max_num_seqs
    if wanted > limit:
        param = sampling.width_param
        raise BadRequest(
            f"`{param}` is {wanted}; this server computes at most {limit} answers at once (max_num_seqs).",
            param,
        )
    if stream:
        sampling.refuse_streaming()


async def completion_prompts(
    body: CompletionRequest, model: ServedModel, tokenizer: Tokenizer, info: EngineInfo
) -> list[Prompt]:
    """The prompts of a completion request. Raises BadRequest or RequestRefused."""
    prompts = []
    for given in body.prompts:
        token_ids = await _encode(tokenizer.encode, given) if isinstance(given, str) else given
        _check_token_ids(token_ids, info)
        room = _room(len(token_ids), info, "prompt")
        default = model.defaults.max_tokens or _COMPLETION_TOKENS
        max_tokens = _max_tokens(body.max_tokens, default, room, len(token_ids), "max_tokens")
        echo = _echo(body, given, token_ids, tokenizer)
        if echo is not None and echo.alone:
            max_tokens = 1  # the engine scores a prompt on its way to a token
        sampling = _sampling(body, model.defaults, info, max_tokens, body.logprobs, echo)
        prompts.append(Prompt(token_ids, sampling, echo))
    return prompts


def _echo(
    body: CompletionRequest, given: str | list[int], token_ids: list[int], tokenizer: Tokenizer
) -> PromptEcho | None:
    if not body.echo:
        return None if body.prompt_logprobs is None else PromptEcho(scores=body.prompt_logprobs)
    text = given if isinstance(given, str) else tokenizer.decode(token_ids)
    return PromptEcho(text, body.logprobs, body.prompt_logprobs, alone=body.max_tokens == 0)


async def chat_prompt(
    body: ChatRequest, model: ServedModel, tokenizer: Tokenizer, templates: ChatTemplates, info: EngineInfo
) -> Prompt:
    """The one prompt of a chat request. Raises BadRequest or RequestRefused."""
    text = await templates.render([message.for_template() for message in body.messages], model.chat_template)
    token_ids = await _encode(tokenizer.encode_chat, text)
    room = _room(len(token_ids), info, "messages")
    wanted, param = body.max_tokens, "max_tokens"
    if body.max_completion_tokens is not None:
        wanted, param = body.max_completion_tokens, "max_completion_tokens"
    max_tokens = _max_tokens(wanted, model.defaults.max_tokens, room, len(token_ids), param)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    echo = None if body.prompt_logprobs is None else PromptEcho(scores=body.prompt_logprobs)
    return Prompt(token_ids, _sampling(body, model.defaults, info, max_tokens, logprobs, echo), echo)
