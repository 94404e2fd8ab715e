"""Turns the texts and conversations of one request into token ids.

A long text is charged to the tenant before it is tokenized, unless the request was already counted, as in /tokenize.
The functions raise the errors of the encoder, the chat templates and the meter.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic_core import to_json

from slora.core.errors import RequestRefused
from slora.text.chat_template import RESERVED_NAMES, cut_at_mark, mark_end
from slora.text.resolved_tokenizer import SPECIAL_NAMES
from slora_api.chat.call_format import CALL_FORMATS
from slora_api.chat.chat_parts import shorten_call_ids
from slora_api.chat.template_traits import LEAST_EFFORTS, TemplateTraits, read_traits
from slora_api.chat.tool_schemas import Tool
from slora_api.completions.inference_call import InferenceCall
from slora_api.completions.schemas import ChatMessage, TemplateFields
from slora_api.core.errors import BadRequest

# Making this many messages and calls for the template takes 1 ms. With more, other requests run before and after it.
_MESSAGES_AT_ONCE = 256


async def encode_texts(
    call: InferenceCall, texts: Sequence[str], *, add_special_tokens: bool | None, param: str = "prompt"
) -> list[list[int]]:
    """Returns the token ids of each text. By default, the special tokens of the tokenizer are added.

    param: the field that holds the texts.
    """
    for text in texts:
        call.bounds.check_chars(len(text), param)
    encode = partial(
        call.encoder.tokenizer.encode,
        add_special_tokens=True if add_special_tokens is None else add_special_tokens,
    )
    return await _encode(call, texts, encode, param)


async def encode_bad_words(call: InferenceCall, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Returns the token sequences that spell the words. Each word is tokenized at the beginning of a text and after
    a space.

    Raises TenantBusy.
    """
    bare = [word.lstrip() for word in words]
    encode = partial(call.encoder.tokenizer.encode, add_special_tokens=False)
    encoded = await call.encoder.encode(
        call.tenant,
        [spelling for word in bare for spelling in (word, f" {word}")],
        encode,
        max_model_len=call.bounds.max_model_len,
        param="bad_words",
    )
    return tuple(dict.fromkeys(tuple(token_ids) for token_ids in encoded if token_ids))


async def render_chat(
    call: InferenceCall,
    messages: Sequence[ChatMessage],
    shown_tools: Sequence[Tool],
    fields: TemplateFields,
    param: str = "messages",
) -> tuple[str, TemplateTraits]:
    """Renders a conversation. Returns the text and the traits of the template. Also raises BadRequest and
    RequestRefused.

    shown_tools: the tools that the model sees. param: the field of the request that holds the messages.
    """
    call.bounds.check_chars(sum(message.num_chars for message in messages), param)
    tools = [tool.for_template() for tool in shown_tools]
    traits = _traits(call, has_tools=bool(tools))
    _check_template(call, traits, messages, tools, param)
    is_long = sum(1 + len(message.tool_calls or ()) for message in messages) > _MESSAGES_AT_ONCE
    if is_long:
        await asyncio.sleep(0)
    made = [message.for_template() for message in messages]
    if is_long:
        await asyncio.sleep(0)
    if traits.call_format is not None and traits.call_format.has_short_ids:
        shorten_call_ids(made)
    variables = _variables(call, fields.chat_template_kwargs or {}) | _set_effort(call, fields, traits)
    if tools:
        variables["tools"] = tools
    return await _render(call, made, variables, fields, param), traits


async def encode_chat(
    call: InferenceCall, text: str, fields: TemplateFields, param: str = "messages"
) -> list[int]:
    """Returns the token ids of a rendered conversation. param: the field of the request that holds the messages."""
    call.bounds.check_chars(len(text), param)
    encode = partial(
        call.encoder.tokenizer.encode_chat,
        add_special_tokens=bool(fields.add_special_tokens),
        param=param,
    )
    (token_ids,) = await _encode(call, [text], encode, param)
    return token_ids


def _traits(call: InferenceCall, *, has_tools: bool) -> TemplateTraits:
    """Returns the traits of the model's template, with the settings applied."""
    own = call.model.chat_template
    traits = read_traits(call.services.templates.find_template(own, has_tools=has_tools) or "")
    settings = call.services.settings
    chosen, thinks = CALL_FORMATS.get(settings.tool_call_parser), settings.reasoning_parser
    if chosen is not None and (own is None or traits.call_format is None):
        traits = replace(traits, call_format=chosen)
    return traits if thinks == "auto" else replace(traits, thinks=thinks == "think")


def _check_template(
    call: InferenceCall,
    traits: TemplateTraits,
    messages: Sequence[ChatMessage],
    tools: Sequence[Mapping[str, Any]],
    param: str,
) -> None:
    """Raises BadRequest if the template would not show all tools and calls to the model, or if the model's calls
    could not be read.
    """
    name = call.model.asked_for
    remedy = "Choose a model with tools, or upload an adapter with a chat template that has them."
    if tools:
        call.bounds.check_chars(_count_json_chars(tools), "tools")
        if not traits.reads_tools:
            raise BadRequest(
                f"`tools` is set, but the chat template of the model {name!r} does not show tools to the model. "
                f"{remedy}",
                "tools",
            )
        if traits.call_format is None:
            raise BadRequest(
                f"`tools` is set, but this server does not know the format in which the model "
                f"{name!r} writes tool calls. The operator can set it with --tool-call-parser; without it, send "
                "`tool_choice: none`.",
                "tools",
            )
    if traits.max_calls is None:
        return
    num_calls = max(len(message.tool_calls or ()) for message in messages)
    if num_calls > traits.max_calls:
        raise BadRequest(
            f"`{param}` has a message with {num_calls} tool calls, but the chat template of the model {name!r} "
            f"shows at most {traits.max_calls} of them to the model. {remedy}",
            param,
        )


async def _render(
    call: InferenceCall,
    messages: list[dict[str, Any]],
    variables: dict[str, Any],
    fields: TemplateFields,
    param: str,
) -> str:
    add_generation_prompt = fields.add_generation_prompt
    if add_generation_prompt is None:
        add_generation_prompt = not fields.continue_final_message
    text = await call.services.templates.render(
        call.tenant,
        mark_end(messages) if fields.continue_final_message else messages,
        call.model.chat_template,
        add_generation_prompt=add_generation_prompt,
        variables=variables,
        param=param,
    )
    if not fields.continue_final_message:
        return text
    cut = cut_at_mark(text)
    if cut is None:
        raise RequestRefused(
            "the chat template changes or drops the last words of the final message, so an answer cannot continue "
            "it; omit continue_final_message",
            "continue_final_message",
        )
    return cut


def _variables(call: InferenceCall, variables: dict[str, Any]) -> dict[str, Any]:
    """Checks the client's variables for the chat template and returns them. Raises BadRequest."""
    param, most = "chat_template_kwargs", call.bounds.template_kwargs_chars
    reserved = sorted(variables.keys() & {*RESERVED_NAMES, *SPECIAL_NAMES})
    if reserved:
        raise BadRequest(f"`{param}` sets `{reserved[0]}`, which the server sets itself; omit it.", param)
    num_chars = _count_json_chars(variables)
    if num_chars > most:
        raise BadRequest(
            f"`{param}` has {num_chars} characters of JSON; this server accepts at most {most}. Shorten it.",
            param,
        )
    return variables


def _set_effort(call: InferenceCall, fields: TemplateFields, traits: TemplateTraits) -> dict[str, Any]:
    """Returns the variables that set the effort of reasoning. A model that never reasons ignores the effort. Raises
    BadRequest if the model reasons, but its template has no switch for it and the effort is not a hint.
    """
    effort, param = fields.effort
    if effort is None:
        return {}
    accepted = traits.switch.list_accepted(thinks=traits.thinks)
    if accepted is not None and (fields.is_effort_hint or not traits.thinks):
        if traits.thinks or effort not in LEAST_EFFORTS:
            call.ignored.add(param)
        return {}
    if accepted is not None and effort not in accepted:
        listed = " or ".join(map(repr, accepted))
        raise BadRequest(
            f"`{param}` is {effort!r}, but the chat template of the model {call.model.asked_for!r} has no variable "
            f"that sets the effort of reasoning; omit it (accepted: {listed}).",
            param,
        )
    chosen, sent = {**traits.switch.choose_variables(effort)}, fields.chat_template_kwargs or {}
    for name, value in chosen.items():
        if name in sent and sent[name] != value:
            raise BadRequest(
                f"`{param}` is {effort!r}, which sets `{name}` to {to_json(value).decode()}, and "
                f"`chat_template_kwargs` sets it to another value; send only one of them.",
                param,
            )
    return chosen


async def count_long_request(call: InferenceCall, texts: Sequence[str], least_answers: int = 1) -> None:
    """Charges a request whose texts take long to tokenize, before that. Raises the errors of the meter.

    least_answers: the minimum number of answers in progress that the request needs.
    """
    if call.encoder.is_long(texts):
        await call.meter.count_request(call.encoder.count_least_tokens(texts), least_answers)


async def _encode(
    call: InferenceCall, texts: Sequence[str], encode: Callable[[str], list[int]], param: str
) -> list[list[int]]:
    await count_long_request(call, texts)
    return await call.encoder.encode(
        call.tenant, texts, encode, max_model_len=call.bounds.max_model_len, param=param
    )


def _count_json_chars(value: object) -> int:
    """Returns the characters of a value as JSON without white space."""
    return len(to_json(value).decode())
