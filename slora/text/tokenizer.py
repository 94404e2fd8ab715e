"""Converts text to token ids and back, and renders chat templates.

This module does not import torch, to keep the API process small. It uses the `tokenizers` library, which reads the
checkpoint's tokenizer.json. Chat templates are untrusted Jinja from checkpoints and uploads. They are rendered in a
sandbox, with the same names that transformers provides.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Tokenizer as FastTokenizer

from slora.core.errors import ConfigError, RequestRefused
from slora.core.sampling_params import StructuredOutput
from slora.grammar.matcher import TokenSpelling
from slora.text.chat_template import render_chat
from slora.text.incremental_decoder import DecoderChain, IncrementalDecoder, TokenWidths
from slora.text.resolved_tokenizer import SPECIAL_NAMES, resolve_tokenizer
from slora_adapters.peft.extras import AddedToken, digest_tokenizer, extend_tokenizer

# Each call has one text, which the library encodes on one thread. It would start a thread for each core anyway, and it
# panics if the machine allows no further threads.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Errors of Python code that a template runs: "{0}".format() raises IndexError, a recursive macro RecursionError.
_TEMPLATE_FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RuntimeError,
)


class Tokenizer:
    """A checkpoint's tokenizer.

    `chat_template` is None if the checkpoint has none. The model then serves completions, and chats only with an
    adapter's template. `tool_template` is a separate template for conversations with tools, or None.
    """

    def __init__(
        self,
        fast: FastTokenizer,
        special_tokens: Mapping[str, str],
        chat_template: str | None,
        tool_template: str | None = None,
        digests: tuple[str, ...] = (),
        longest_token_chars: int | None = None,
    ) -> None:
        self._fast = fast
        self._special_tokens = dict(special_tokens)
        self.chat_template = chat_template
        self.tool_template = tool_template
        # Digests of the tokenizer as it is served and as it is saved; see `digest_tokenizer`.
        self.digests = digests
        self.vocab_size: int = fast.get_vocab_size(with_added_tokens=True)
        if longest_token_chars is None:
            longest_token_chars = max(map(len, fast.get_vocab(with_added_tokens=True)), default=1)
        self.longest_token_chars = longest_token_chars
        self._decoder_chain = DecoderChain(fast)
        added = fast.get_added_tokens_decoder().items()
        self._special_ids = frozenset(token_id for token_id, token in added if token.special)
        # Tokens of an adapter without text in the base's tokenizer, whose spelling grammars are compiled with.
        self._unspelled: dict[str, int] = {}
        # Tokens of an adapter with another text in the base's tokenizer.
        self._respelled: tuple[int, ...] = ()

    @staticmethod
    def from_directory(directory: Path) -> "Tokenizer":
        """Builds the tokenizer that transformers would build from this directory (`resolve_tokenizer`).

        Raises ConfigError if there is no readable tokenizer.json, or if tokenizer_config.json is damaged.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                f"{directory} has no tokenizer.json; save the model's tokenizer there with "
                "transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )
        try:
            fast = FastTokenizer.from_file(str(path))
        except Exception as error:  # For any damage, the library raises bare Exception.
            raise ConfigError(f"{path} is not a tokenizer: {error}") from error
        config = _read_config(directory / "tokenizer_config.json")
        special_tokens: Mapping[str, str] = _special_tokens(config)
        digests = {digest_tokenizer(fast)}
        resolved = resolve_tokenizer(directory, config, fast)
        if resolved is not None:
            fast = FastTokenizer.from_str(resolved.serialized)
            fast.encode_special_tokens = resolved.splits_special_tokens
            special_tokens = resolved.special_tokens
        digests.add(digest_tokenizer(fast))
        return Tokenizer(
            fast,
            special_tokens,
            _chat_template(directory, config),
            _tool_template(directory, config),
            tuple(sorted(digests)),
        )

    def with_added_tokens(self, tokens: Sequence[AddedToken]) -> "Tokenizer":
        """Returns a tokenizer with the added tokens of an adapter, which shares the vocabulary of this one.

        Takes a millisecond for each 500 added tokens of both. Raises ValueError; see `extend_tokenizer`.
        """
        if not tokens:
            return self
        longest = max(self.longest_token_chars, *(len(token.content) for token in tokens))
        extended = Tokenizer(
            extend_tokenizer(self._fast, tokens),
            self._special_tokens,
            self.chat_template,
            self.tool_template,
            self.digests,
            longest,
        )
        spelled = {token.token_id: self.spell(token.token_id, is_first=False) for token in tokens}
        extended._unspelled = {
            token.content: token.token_id for token in tokens if spelled[token.token_id] == b""
        }
        extended._respelled = tuple(
            token_id
            for token_id, spelling in spelled.items()
            if spelling not in (b"", extended.spell(token_id, is_first=False))
        )
        return extended

    def check_form(self, output: StructuredOutput | None, used: Iterable[int] = ()) -> None:
        """Raises RequestRefused if a form may have a token whose text differs from the one in grammars.

        used: tokens that the grammar names by their ids.
        """
        wrong = () if output is None else sorted({*self._respelled} - {*used})
        if output is not None and wrong:
            raise RequestRefused(
                f"{output.param} can't be enforced: the adapter's tokenizer makes {self.token_string(wrong[0])!r:.80} "
                "a special token, which the base model's tokenizer spells as text; upload the adapter with a tokenizer "
                f"that leaves it as it is, or omit {output.param}",
                output.param,
            )

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """The special tokens that chat templates may use by name, such as bos_token."""
        return self._special_tokens

    @property
    def added_token_ids(self) -> frozenset[int]:
        """Ids outside the plain vocabulary: end of text, roles, padding and reserved ids."""
        return frozenset(self._fast.get_added_tokens_decoder())

    def find_special_tokens(self, texts: Iterable[str]) -> dict[str, int]:
        """Returns the ids of those strings that are special tokens, by string. Grammars name such tokens by their ids,
        as they do all added tokens of an adapter which the base's tokenizer does not spell.
        """
        special = self._decoder_chain.special
        ids = {
            text: self._fast.token_to_id(text) for text in texts if text in special or text in self._unspelled
        }
        return {text: token_id for text, token_id in ids.items() if token_id is not None}

    def find_special_parts(self, texts: Iterable[str]) -> frozenset[str]:
        """Returns the special tokens that occur in the texts."""
        joined = "\0".join(texts)
        return frozenset(token for token in self._decoder_chain.special if token and token in joined)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encodes a text. Releases the GIL while it tokenizes, which the library's `encode` does not.

        add_special_tokens: adds the special tokens of tokenizer.json, such as BOS; false for a rendered chat.
        """
        ids: list[int] = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def join_pair(self, first: list[int], second: list[int]) -> list[int]:
        """Joins the ids of two texts, encoded without special tokens, with the special tokens of a pair."""
        before, between, after = self._pair_tokens
        return [*before, *first, *between, *second, *after]

    @cached_property
    def _pair_tokens(self) -> tuple[list[int], list[int], list[int]]:
        """The special tokens before the first text of a pair, between the two, and after the second."""
        (pair,) = self._fast.encode_batch([("a", "a")])
        parts = list(pair.sequence_ids)
        first, second = parts.index(0), parts.index(1)
        end_of_first = second - parts[::-1][len(parts) - second :].index(0)
        end = len(parts) - parts[::-1].index(1)
        ids: list[int] = pair.ids
        return ids[:first], ids[end_of_first:second], ids[end:]

    def count_tokens(self, text: str) -> int:
        """The number of tokens of the text alone. Does not copy the ids, which would hold the GIL."""
        return len(self._fast.encode_batch_fast([text], add_special_tokens=False)[0])

    def encode_chat(
        self, rendered: str, *, add_special_tokens: bool = False, param: str = "messages"
    ) -> list[int]:
        """Encodes a rendered chat, which usually contains its special tokens already.

        Raises RequestRefused, which names `param`, if the chat has no tokens.
        """
        ids = self.encode(rendered, add_special_tokens=add_special_tokens)
        if not ids:
            raise RequestRefused("The chat template renders these messages as an empty prompt.", param)
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decodes to text, by default without special tokens. An incomplete character becomes U+FFFD."""
        text: str = self._fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def decode_long(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Like `decode`, but releases the GIL, which `decode` holds for 29 ms for 210,000 ids. Call it on a thread."""
        text: str = self._fast.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)[0]
        return text

    def start_decoding(
        self, *, skip_special_tokens: bool = True, shown: frozenset[str] = frozenset()
    ) -> IncrementalDecoder:
        """Returns a decoder for the tokens of one text as they arrive.

        Its joined text equals `decode` of all tokens. shown: special tokens that are not skipped.
        """
        return self._decoder_chain.start(skip_special_tokens=skip_special_tokens, shown=shown)

    def start_measuring(
        self, *, skip_special_tokens: bool = True, shown: frozenset[str] = frozenset()
    ) -> TokenWidths:
        """Returns an object that takes tokens as they arrive, and counts the characters that belong to each token."""
        return TokenWidths(self.start_decoding(skip_special_tokens=skip_special_tokens, shown=shown))

    def measure(self, token_ids: Sequence[int]) -> list[int]:
        """For each token, the number of characters of `decode(token_ids)` that belong to it.

        Their sum is the text's length.
        """
        widths = self.start_measuring()
        found = widths.push(token_ids) + widths.finish()
        if found:
            found[-1] += len(self.decode(token_ids)) - sum(found)
        return found

    def spell(self, token_id: int, *, is_first: bool) -> bytes | None:
        """Returns the bytes that a token adds to a text, as its first token or a later token; b"" for a special token.

        Returns None if the bytes depend on further tokens.
        """
        return self._decoder_chain.spell(token_id, is_first=is_first)

    def spell_vocabulary(self, vocab_size: int) -> TokenSpelling:
        """Reads the spelling of every token, for structured output. Takes half a second for 128,000 tokens.

        vocab_size: the model's vocabulary size, which may exceed the tokenizer's.

        Raises ConfigError if the tokenizer's decoder does not map each token to bytes.
        """
        pieces, not_first = [], []
        for token_id in range(vocab_size):
            first, later = (self.spell(token_id, is_first=is_first) for is_first in (True, False))
            if first is None or later is None:
                raise ConfigError(
                    "the tokenizer's decoder joins tokens to text in a way that structured output does not support"
                )
            pieces.append(later)
            if first != later:
                not_first.append(token_id)
        return TokenSpelling(pieces, not_first)

    def token_text(self, token_id: int) -> str:
        """The text of one token, special tokens included, as logprobs show it."""
        text: str = self._fast.decode([token_id], skip_special_tokens=False)
        return text

    def token_bytes(self, token_id: int, *, is_first: bool = False) -> bytes:
        """The bytes of one token in a text, special tokens included. A part of a character has its own bytes."""
        if token_id in self._special_ids:
            return self.token_text(token_id).encode()
        spelled = self.spell(token_id, is_first=is_first)
        return self.token_text(token_id).encode() if spelled is None else spelled

    def token_string(self, token_id: int) -> str:
        """The token as the vocabulary has it, such as `Ġthe`. Empty for an id that the tokenizer does not know."""
        return self._fast.id_to_token(token_id) or ""

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        template: str | None = None,
        *,
        add_generation_prompt: bool = True,
        param: str = "messages",
    ) -> str:
        """Renders a conversation.

        template: an adapter's own template, which replaces the checkpoint's.
        param: the field of the request that holds the messages. Errors name it.

        Raises RequestRefused when there is no template, or when the template refuses these messages.
        """
        source = template or self.chat_template
        if source is None:
            raise RequestRefused(
                "this model has no chat template; send a text prompt to /v1/completions", param
            )
        try:
            rendered = render_chat(
                source, messages, self._special_tokens, {"add_generation_prompt": add_generation_prompt}
            )
        except _TEMPLATE_FAILURES as error:
            raise RequestRefused(f"the chat template refuses these messages: {error}", param) from error
        return rendered


def _read_config(path: Path) -> dict[str, Any]:
    """Reads tokenizer_config.json.

    Many tokenizers have none; then there are no named special tokens and no template.
    """
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is a {type(config).__name__}; it must be an object")
    return config


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in SPECIAL_NAMES:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """Reads the chat template. chat_template.jinja takes precedence over the templates in tokenizer_config.json."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = _named_templates(template).get("default")
    return template if isinstance(template, str) else None


def _tool_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """Reads the template `tool_use`, which transformers uses for conversations with tools, if there is one."""
    path = directory / "additional_chat_templates" / "tool_use.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    templates = config.get("chat_template")
    if not isinstance(templates, list) or (directory / "chat_template.jinja").is_file():
        return None
    template = _named_templates(templates).get("tool_use")
    return template if isinstance(template, str) else None


def _named_templates(templates: Sequence[Any]) -> dict[object, object]:
    return {entry.get("name"): entry.get("template") for entry in templates if isinstance(entry, dict)}
