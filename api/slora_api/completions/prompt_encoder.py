"""Tokenizes prompts. Short prompts are tokenized on the event loop. Long prompts are tokenized on a thread, in slots
that tenants share.

The tokenizer releases the interpreter lock while it works, so a thread does not block the event loop. A call of the
tokenizer cannot be interrupted. So the tokens of a long text are first counted slice by slice, until the text exceeds
the context or the request is cancelled. Only a text that may fit is tokenized as a whole.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextvars import Context
from functools import partial

from slora.core.errors import ContextTooLong
from slora.text.tokenizer import Tokenizer
from slora_adapters.peft.extras import AddedToken
from slora_api.core.fair_slots import FairSlots
from slora_api.core.threads import tenant_thread

# Tokenizing 8,000 characters takes one to three milliseconds.
_INLINE_CHARS = 8_000
# Tokenizing this many short texts takes two milliseconds.
_INLINE_TEXTS = 64
# Decoding this many ids also takes one to three milliseconds.
_INLINE_TOKENS = 2_000
# The maximum number of characters for one call of the tokenizer. Such a call takes 10 to 30 ms.
_SLICE_CHARS = 1 << 16
# Cutting a text into slices may split words, which adds tokens. This many tokens are subtracted for each slice, so that
# a text that fits is never refused.
_CUT_TOKENS = 256
# Tokenizers of adapters that are kept. Each takes some KB for the added tokens of the adapter and the base.
_MAX_EXTENDED = 64


class PromptEncoder:
    """Tokenizes and decodes prompts. slots: see `cpu_slots`."""

    def __init__(self, tokenizer: Tokenizer, slots: FairSlots) -> None:
        self.tokenizer = tokenizer
        self._slots = slots
        # The encoders of adapters with added tokens, the last used one at the end. Tenants share an encoder only if
        # all of its tokens are equal.
        self._extended: OrderedDict[tuple[AddedToken, ...], PromptEncoder] = OrderedDict()
        # Those that a thread builds now. A build begins with a slot, so who joins it never waits in another's queue.
        self._builds: dict[tuple[AddedToken, ...], asyncio.Task[PromptEncoder]] = {}

    async def with_added_tokens(self, tenant: str, tokens: tuple[AddedToken, ...]) -> "PromptEncoder":
        """Returns the encoder for an adapter's added tokens. Raises ValueError if the tokenizer cannot have them, and
        TenantBusy.
        """
        if not tokens:
            return self
        encoder = self._extended.get(tokens)
        if encoder is None:
            if tokens in self._builds:
                encoder = await self._build_once(tenant, tokens)
            else:
                async with self._slots.hold(tenant):
                    encoder = self._extended.get(tokens) or await self._build_once(tenant, tokens)
        if tokens in self._extended:
            self._extended.move_to_end(tokens)
        return encoder

    async def _build_once(self, tenant: str, tokens: tuple[AddedToken, ...]) -> "PromptEncoder":
        """Joins the build of the encoder that runs, or begins it. A caller that is cancelled does not end it."""
        building = self._builds.get(tokens)
        if building is None:
            # Requests of other tenants may wait for it.
            building = asyncio.create_task(self._build(tenant, tokens), context=Context())
            self._builds[tokens] = building
            building.add_done_callback(lambda _: self._builds.pop(tokens))
        return await asyncio.shield(building)

    async def _build(self, tenant: str, tokens: tuple[AddedToken, ...]) -> "PromptEncoder":
        extended = await tenant_thread(tenant, self.tokenizer.with_added_tokens, tokens)
        encoder = self._extended[tokens] = PromptEncoder(extended, self._slots)
        if len(self._extended) > _MAX_EXTENDED:
            self._extended.popitem(last=False)
        return encoder

    @staticmethod
    def is_long(texts: Sequence[str]) -> bool:
        """Returns whether `encode` takes a slot for these texts."""
        return len(texts) > _INLINE_TEXTS or sum(map(len, texts)) > _INLINE_CHARS

    def count_least_tokens(self, texts: Sequence[str]) -> int:
        """Returns the minimum number of tokens that the texts can have."""
        return sum(-(-len(text) // self.tokenizer.longest_token_chars) for text in texts)

    async def encode(
        self,
        tenant: str,
        texts: Sequence[str],
        encode: Callable[[str], list[int]],
        *,
        max_model_len: int,
        param: str,
    ) -> list[list[int]]:
        """Returns the token ids of each text. Raises ContextTooLong or TenantBusy.

        encode: a method of the tokenizer.
        """
        if not self.is_long(texts):
            return [encode(text) for text in texts]
        async with self._slots.hold(tenant):
            encoded: list[list[int]] = []
            for group in _groups(texts):
                if len(group[0]) > _SLICE_CHARS:
                    await self._check_fits(tenant, group[0], max_model_len, param)
                encoded += await tenant_thread(tenant, _encode_all, encode, group)
            return encoded

    async def decode(self, tenant: str, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids that the client sent. Raises TenantBusy."""
        if len(token_ids) <= _INLINE_TOKENS:
            return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        decode = partial(self.tokenizer.decode_long, skip_special_tokens=skip_special_tokens)
        async with self._slots.hold(tenant):
            return await tenant_thread(tenant, decode, token_ids)

    async def _check_fits(self, tenant: str, text: str, max_model_len: int, param: str) -> None:
        num_tokens = 0
        for start in range(0, len(text), _SLICE_CHARS):
            part = text[start : start + _SLICE_CHARS]
            num_tokens += await tenant_thread(tenant, self.tokenizer.count_tokens, part) - _CUT_TOKENS
            if num_tokens > max_model_len:
                raise ContextTooLong.of(
                    max_model_len,
                    f"`{param}` is too long: the first {start + len(part)} of its {len(text)} characters exceed the "
                    "context, which prompt and answer share. Shorten it.",
                    param,
                )


def _encode_all(encode: Callable[[str], list[int]], texts: Sequence[str]) -> list[list[int]]:
    return [encode(text) for text in texts]


def _groups(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yields the texts in groups, one for each call on a thread. Short texts share a group, and a long text has a group
    of its own.
    """
    group: list[str] = []
    num_chars = 0
    for text in texts:
        if group and num_chars + len(text) > _SLICE_CHARS:
            yield group
            group, num_chars = [], 0
        group.append(text)
        num_chars += len(text)
    if group:
        yield group
