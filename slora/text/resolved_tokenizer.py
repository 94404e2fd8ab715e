"""Finds the tokenizer that transformers builds from a model directory, because adapters are trained with it.

transformers 5 does not always use tokenizer.json as it is. A class such as LlamaTokenizer reads only the vocabulary
from it and builds the rest itself. Settings of tokenizer_config.json change the special tokens that are put around a
text. The installed version of transformers decides which class and settings apply, so this module calls transformers.
A directory in the format that transformers 5 saves is the exception: its tokenizer.json is used as it is.

This module does not import torch. A process that has not imported torch runs `slora.text.transformers_tokenizer` in a
subprocess.
"""

import importlib
import json
import logging
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer as FastTokenizer

from slora.core.errors import ConfigError

_log = logging.getLogger(__name__)

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
# Long enough to import transformers and torch on a busy machine.
_TIMEOUT_S = 300
# The classes that use tokenizer.json as it is.
_PLAIN_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
# Files of older versions of transformers that add special tokens.
_OLD_FILES = ("special_tokens_map.json", "added_tokens.json")
# Keys of tokenizer_config.json that do not change how the plain classes encode and decode.
_HARMLESS_KEYS = frozenset(
    {
        *SPECIAL_NAMES,
        "additional_special_tokens",
        "backend",
        "chat_template",
        "clean_up_tokenization_spaces",
        "extra_special_tokens",
        "is_local",
        "local_files_only",
        "max_length",
        "model_input_names",
        "model_max_length",
        "name_or_path",
        "pad_to_multiple_of",
        "pad_token_type_id",
        "padding_side",
        "processor_class",
        "stride",
        "tokenizer_class",
        "truncation_side",
        "truncation_strategy",
    }
)


@dataclass(frozen=True, slots=True)
class ResolvedTokenizer:
    """A tokenizer as transformers builds it.

    serialized: the tokenizer in the format of tokenizer.json.
    special_tokens: the special tokens that chat templates may use by name.
    splits_special_tokens: whether a special token in a text is encoded like ordinary text.
    """

    serialized: str
    special_tokens: Mapping[str, str]
    splits_special_tokens: bool


def resolve_tokenizer(
    directory: Path, config: Mapping[str, Any], as_saved: FastTokenizer
) -> ResolvedTokenizer | None:
    """Returns the tokenizer that transformers builds, or None if tokenizer.json (`as_saved`) is to be used as it is.

    config: the content of tokenizer_config.json.
    """
    if _is_served_as_saved(directory, config, as_saved):
        return None
    try:
        return _read_in_process(directory) if "torch" in sys.modules else _read_in_subprocess(directory)
    except ConfigError as error:
        _log.warning("%s; its tokenizer.json is used as it is", error)
        return None


def _is_served_as_saved(directory: Path, config: Mapping[str, Any], as_saved: FastTokenizer) -> bool:
    if config.get("tokenizer_class") not in _PLAIN_CLASSES or not _HARMLESS_KEYS.issuperset(config):
        return False
    special = {token.content for token in as_saved.get_added_tokens_decoder().values() if token.special}
    return special.issuperset(_named_tokens(config)) and not any(
        (directory / name).exists() for name in _OLD_FILES
    )


def _named_tokens(config: Mapping[str, Any]) -> Iterator[str]:
    for name in SPECIAL_NAMES:
        yield from _contents(config.get(name))
    for name in ("additional_special_tokens", "extra_special_tokens"):
        yield from _contents(config.get(name))


def _contents(value: object) -> Iterator[str]:
    """Yields the strings of tokens. value: one token (a string or an object), a list of tokens, or tokens by name."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _contents(item)
    elif isinstance(value, dict):
        yield from _contents(value["content"] if "content" in value else list(value.values()))


def _read_in_process(directory: Path) -> ResolvedTokenizer:
    module = importlib.import_module("slora.text.transformers_tokenizer")
    return cast(ResolvedTokenizer, module.read_tokenizer(directory))


def _read_in_subprocess(directory: Path) -> ResolvedTokenizer:
    command = [sys.executable, "-P", "-m", "slora.text.transformers_tokenizer", str(directory)]
    try:
        answer = subprocess.run(
            command, capture_output=True, timeout=_TIMEOUT_S, check=False, encoding="utf-8", errors="replace"
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"{directory}: transformers took more than {_TIMEOUT_S} s to read the tokenizer"
        ) from error
    if answer.returncode != 0:
        raise ConfigError(
            f"{directory}: transformers could not read the tokenizer: {answer.stderr.strip()[-500:]}"
        )
    fields = json.loads(answer.stdout)
    if "refused" in fields:
        raise ConfigError(fields["refused"])
    return ResolvedTokenizer(**fields)
