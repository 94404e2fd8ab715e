"""Turns the texts and conversations of one request into token ids."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from slora.errors import RequestRefused
from slora.text.chat_template import RESERVED_NAMES, cut_at_mark, mark_end
from slora.text.resolved_tokenizer import SPECIAL_NAMES
from slora_api.errors import BadRequest
from slora_api.generation.chat_templates import ChatTemplates
from slora_api.generation.prompt_encoder import PromptEncoder
from slora_api.generation.served_model import ServedModel
from slora_api.quotas.quota_meter import RequestMeter
from slora_api.request_bounds import RequestBounds
from slora_api.schemas import ChatMessage, ChatTemplateFields

__all__ = ["PromptTokenizer"]


@dataclass(frozen=True, slots=True)
class PromptTokenizer:
    """Tokenizes for one request. A long text is charged to the tenant first.

    Both methods raise what the encoder, the chat templates and the meter raise.
    """

    tenant: str
    meter: RequestMeter
    model: ServedModel
    encoder: PromptEncoder
    templates: ChatTemplates
    bounds: RequestBounds

    async def encode_texts(self, texts: Sequence[str], *, add_special_tokens: bool | None) -> list[list[int]]:
        """Returns the token ids of each text. By default, the special tokens of the tokenizer are added."""
        for text in texts:
            self.bounds.check_chars(len(text), "prompt")
        encode = partial(
            self.encoder.tokenizer.encode,
            add_special_tokens=True if add_special_tokens is None else add_special_tokens,
        )
        return await self._encode(texts, encode, "prompt")

    async def encode_chat(self, messages: Sequence[ChatMessage], fields: ChatTemplateFields) -> list[int]:
        """Returns the token ids of a conversation. Raises BadRequest and RequestRefused, too."""
        num_chars = sum(len(message.content) + len(message.name or "") for message in messages)
        self.bounds.check_chars(num_chars, "messages")
        text = await self._render([message.for_template() for message in messages], fields)
        self.bounds.check_chars(len(text), "messages")
        encode = partial(
            self.encoder.tokenizer.encode_chat, add_special_tokens=bool(fields.add_special_tokens)
        )
        (token_ids,) = await self._encode([text], encode, "messages")
        return token_ids

    async def _render(self, messages: list[dict[str, str]], fields: ChatTemplateFields) -> str:
        add_generation_prompt = fields.add_generation_prompt
        if add_generation_prompt is None:
            add_generation_prompt = not fields.continue_final_message
        text = await self.templates.render(
            self.tenant,
            mark_end(messages) if fields.continue_final_message else messages,
            self.model.chat_template,
            add_generation_prompt=add_generation_prompt,
            variables=self._variables(fields.chat_template_kwargs or {}),
        )
        if not fields.continue_final_message:
            return text
        cut = cut_at_mark(text)
        if cut is None:
            raise RequestRefused(
                "the chat template does not show the end of the last message, so the answer cannot continue this "
                "message; omit continue_final_message",
                "continue_final_message",
            )
        return cut

    def _variables(self, variables: dict[str, Any]) -> dict[str, Any]:
        """Returns the variables of a chat template after checking them. Raises BadRequest."""
        param, most = "chat_template_kwargs", self.bounds.template_kwargs_chars
        reserved = sorted(variables.keys() & {*RESERVED_NAMES, *SPECIAL_NAMES})
        if reserved:
            raise BadRequest(f"`{param}` sets `{reserved[0]}`, which the server sets itself; omit it.", param)
        try:
            num_chars = len(json.dumps(variables, ensure_ascii=False))
        except RecursionError:
            raise BadRequest(f"`{param}` is nested too deeply; flatten it.", param) from None
        if num_chars > most:
            raise BadRequest(
                f"`{param}` has {num_chars} characters of JSON; this server accepts at most {most}. Shorten it.",
                param,
            )
        return variables

    async def _encode(
        self, texts: Sequence[str], encode: Callable[[str], list[int]], param: str
    ) -> list[list[int]]:
        if self.encoder.is_long(texts):
            await self.meter.count_request(self.encoder.count_least_tokens(texts))
        return await self.encoder.encode(
            self.tenant, texts, encode, max_model_len=self.bounds.max_model_len, param=param
        )
