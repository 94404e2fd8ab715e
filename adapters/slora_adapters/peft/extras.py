"""Reads the optional text files of an adapter: chat template, sampling defaults, and the tokenizer's added tokens.

This module returns the texts unchanged. It does not render templates or load tokenizers.
"""

from collections.abc import Iterable, Mapping

from slora_adapters.errors import Reason
from slora_adapters.limits import AdapterLimits
from slora_adapters.peft.adapter import AdapterExtras
from slora_adapters.peft.strict_json import parse_object

TEMPLATE_NAME = "chat_template.jinja"
TOKENIZER_NAME = "tokenizer_config.json"
ADDED_TOKENS_NAME = "added_tokens.json"
GENERATION_NAME = "generation_config.json"
EXTRA_NAMES = (TEMPLATE_NAME, TOKENIZER_NAME, ADDED_TOKENS_NAME, GENERATION_NAME)

# Tokenizer configs list every added token of the base model. Llama 3's config is 50 KB; others are a few hundred KB.
MAX_TOKENIZER_BYTES = 4 << 20


def read_extras(
    members: Mapping[str, memoryview], limits: AdapterLimits
) -> tuple[AdapterExtras, list[Reason]]:
    """Returns the extras among an adapter's files, and a reason for each error in these files."""
    reasons: list[Reason] = []
    tokenizer = _read_json(members, TOKENIZER_NAME, MAX_TOKENIZER_BYTES, reasons)
    reasons += _refuse_added_tokens(tokenizer.get("added_tokens_decoder"), limits)
    added = _read_json(members, ADDED_TOKENS_NAME, MAX_TOKENIZER_BYTES, reasons)
    reasons += _refuse_added_tokens({str(number): token for token, number in added.items()}, limits)
    _read_json(members, GENERATION_NAME, limits.max_text_bytes, reasons)
    template = _read_text(members, TEMPLATE_NAME, limits, reasons)
    if template is None:
        template = _tokenizer_template(tokenizer.get("chat_template"), limits, reasons)
    return AdapterExtras(template, _read_text(members, GENERATION_NAME, limits, reasons)), reasons


def _read_json(
    members: Mapping[str, memoryview], name: str, max_bytes: int, reasons: list[Reason]
) -> dict[str, object]:
    if name not in members:
        return {}
    try:
        return parse_object(members[name], source=name, max_bytes=max_bytes)
    except ValueError as error:
        reasons.append(Reason("extra_malformed", str(error)))
        return {}


def _read_text(
    members: Mapping[str, memoryview], name: str, limits: AdapterLimits, reasons: list[Reason]
) -> str | None:
    raw = members.get(name)
    if raw is None:
        return None
    if len(raw) > limits.max_text_bytes:
        reasons.append(_too_long(name, len(raw), limits))
        return None
    try:
        return bytes(raw).decode("utf-8")
    except UnicodeDecodeError as error:
        reasons.append(
            Reason("extra_malformed", f"{name} is not UTF-8 text: {error.reason} at byte {error.start}")
        )
        return None


def _tokenizer_template(value: object, limits: AdapterLimits, reasons: list[Reason]) -> str | None:
    """Returns the default chat template of a tokenizer config. The field is a string or a list of {name, template}."""
    if isinstance(value, list):
        named = (item for item in value if isinstance(item, dict))
        value = next((item.get("template") for item in named if item.get("name") == "default"), None)
    if not isinstance(value, str):
        return None
    num_bytes = len(value.encode())
    if num_bytes > limits.max_text_bytes:
        reasons.append(_too_long(f"chat_template in {TOKENIZER_NAME}", num_bytes, limits))
        return None
    return value


def _too_long(what: str, num_bytes: int, limits: AdapterLimits) -> Reason:
    return Reason(
        "extra_too_long",
        f"{what} takes {num_bytes} bytes; this server accepts at most {limits.max_text_bytes}",
    )


def _refuse_added_tokens(table: object, limits: AdapterLimits) -> Iterable[Reason]:
    """Refuses token ids beyond the base model's vocabulary. Ids inside the vocabulary are accepted, because saved
    tokenizers list the base model's special tokens again.
    """
    if limits.vocab_size is None or not isinstance(table, dict):
        return
    beyond = [key for key in table if _token_id(key) >= limits.vocab_size]
    if beyond:
        yield Reason(
            "added_tokens",
            f"the adapter's tokenizer adds {len(beyond)} tokens (id {beyond[0]!s:.20}) beyond the base's "
            f"vocabulary of {limits.vocab_size}; resized embeddings are not supported",
        )


def _token_id(key: object) -> int:
    text = str(key)
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 12 else 0
