"""Writes the tokenizer of a GGUF file as the files of transformers: tokenizer.json and the chat templates.

There are two kinds. `gpt2` is BPE over bytes; the field `pre` names the rule that divides a text before it. `llama` is
SentencePiece; its merges follow from the scores of the vocabulary. A rule that is not known here would give other
tokens for some texts, so it is refused.

This module does not import torch.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from slora.models.weights.gguf_file import GgufFile

_PREFIX = "tokenizer."
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
# Named tokens in a GGUF file -> names in tokenizer_config.json.
_NAMED = {
    "bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token",
    "seperator": "sep_token", "separator": "sep_token", "mask": "mask_token", "cls": "cls_token",
}  # fmt: skip
_END_NAMES = ("eos", "eot", "eom")
# Special tokens that end an answer. Many files name only one token, which may not be the one of their chat template.
_END_TEXTS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
)
# Fields without an effect on how a text becomes tokens.
_IGNORED = {
    "ggml.token_type_count", "ggml.fim_pre_token_id", "ggml.fim_suf_token_id", "ggml.fim_mid_token_id",
    "ggml.fim_pad_token_id", "ggml.fim_rep_token_id", "ggml.fim_sep_token_id", "ggml.prefix_token_id",
    "ggml.suffix_token_id", "ggml.middle_token_id", "chat_templates",
}  # fmt: skip
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"

_WORD_END = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START = r"[^\r\n\p{L}\p{N}]?"


def _cased(ending: str) -> str:
    """Words with at most one change from upper to lower case."""
    return f"{_START}{_UPPER}*{_LOWER}+{ending}|{_START}{_UPPER}+{_LOWER}*{ending}"


def _cl100k(digits: str) -> str:
    return rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|{_WORD_END}"


@dataclass(frozen=True, slots=True)
class _Rule:
    """How a text is divided. pattern: None: as GPT-2 does.

    adds_bos: whether BOS comes first if the file does not say so.
    """

    pattern: str | None
    single_digits: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False
    composes: bool = False  # normalizes to NFC


_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_cased('')}|\p{{N}}|{_SLASHES}"
_O200K = rf"{_cased(_CONTRACTION + '?')}|\p{{N}}{{1,3}}|{_SLASHES}"
_LLAMA3 = _Rule(_cl100k(r"\p{N}{1,3}"), ignores_merges=True, adds_bos=True)
_QWEN2 = _Rule(_cl100k(r"\p{N}"), composes=True)
_RULES: Mapping[str, _Rule] = {
    "gpt-2": _Rule(None),
    "smollm": _Rule(None, single_digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "dbrx": _Rule(_cl100k(r"\p{N}{1,3}")),
    "smaug-bpe": _Rule(_cl100k(r"\p{N}{1,3}")),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _Rule(_TEKKEN, ignores_merges=True, adds_bos=True),
    "gpt-4o": _Rule(_O200K),
}


def write_tokenizer(file: GgufFile, directory: Path, vocab_size: int) -> dict[str, Any]:
    """Writes the files into `directory`. Returns the fields of config.json that name tokens. Raises ConfigError.

    vocab_size: rows of the embedding.
    """
    fields = {
        name.removeprefix(_PREFIX): value
        for name, value in file.fields.items()
        if name.startswith(_PREFIX) and name.removeprefix(_PREFIX) not in _IGNORED
    }
    tokens = _Tokens(file, fields, vocab_size)
    named = {name: fields.pop(f"ggml.{name}_token_id", None) for name in (*_NAMED, "eot", "eom")}
    texts = {
        theirs: tokens.texts[named[own]]
        for own, theirs in _NAMED.items()
        if named[own] in range(len(tokens.texts))
    }
    templates = {name: fields.pop(name) for name in list(fields) if name.split(".")[0] == "chat_template"}
    fast = _build(file, fields, tokens, named)
    if fields:
        name, value = next(iter(fields.items()))
        raise file.refusal(
            f"{_PREFIX}{name} is {value!r:.100}; slora does not know this field, which may change the tokens of a text"
        )
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **texts}
    fast.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    for name, template in templates.items():
        _write_template(directory, name.removeprefix("chat_template").removeprefix("."), template)
    ends = [named[name] for name in _END_NAMES]
    ends += [token_id for token_id in tokens.of_type(_CONTROL) if tokens.texts[token_id] in _END_TEXTS]
    found = {"eos_token_id": list(dict.fromkeys(end for end in ends if end is not None))}
    return found if named["bos"] is None else {"bos_token_id": named["bos"], **found}


def _write_template(directory: Path, name: str, template: str) -> None:
    if not name:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    elif name.replace("_", "").isalnum():
        others = directory / "additional_chat_templates"
        others.mkdir(exist_ok=True)
        (others / f"{name}.jinja").write_text(template, encoding="utf-8")


class _Tokens:
    """The vocabulary. It takes its fields out of `fields`."""

    def __init__(self, file: GgufFile, fields: dict[str, Any], vocab_size: int) -> None:
        self.file = file
        self.texts: list[str] = fields.pop("ggml.tokens", [])
        self.types: list[int] = fields.pop("ggml.token_type", [1] * len(self.texts))
        self.scores: list[float] = fields.pop("ggml.scores", [])
        self.merges: list[str] = fields.pop("ggml.merges", [])
        if not self.texts or len(self.texts) > vocab_size or len(self.types) != len(self.texts):
            raise file.refusal(
                f"it has {len(self.texts)} tokens and {len(self.types)} types of tokens for {vocab_size} rows of the "
                "embedding"
            )
        if len(set(self.texts)) != len(self.texts):
            raise file.refusal("tokenizer.ggml.tokens has the same token twice")

    def of_type(self, *kinds: int) -> list[int]:
        return [token_id for token_id, kind in enumerate(self.types) if kind in kinds]


def _build(
    file: GgufFile, fields: dict[str, Any], tokens: _Tokens, named: Mapping[str, int | None]
) -> Tokenizer:
    kind = fields.pop("ggml.model", None)
    saved = fields.pop("huggingface.json", None)
    pre = fields.pop("ggml.pre", None)
    add_space = fields.pop("ggml.add_space_prefix", kind == "llama")
    if fields.pop("ggml.remove_extra_whitespaces", False):
        raise file.refusal("tokenizer.ggml.remove_extra_whitespaces is true, which is not served")
    adds = {name: fields.pop(f"ggml.add_{name}_token", None) for name in ("bos", "eos", "sep")}
    if adds["sep"]:
        raise file.refusal("tokenizer.ggml.add_sep_token is true, which is not served")
    if saved is not None:
        return Tokenizer.from_str(saved)
    if kind == "gpt2":
        rule = _RULES.get(pre)
        if rule is None:
            raise file.refusal(
                f"tokenizer.ggml.pre is {pre!r}; this version knows {', '.join(_RULES)}: use the model's safetensors "
                "checkpoint"
            )
        fast, adds_bos = _build_bpe(tokens, rule), rule.adds_bos
    elif kind == "llama":
        fast, adds_bos = _build_sentencepiece(tokens, named, add_space=add_space), True
    else:
        raise file.refusal(f"tokenizer.ggml.model is {kind!r}; this version serves gpt2 and llama")
    _add_special_tokens(fast, tokens)
    pieces = ["$A"]
    if adds["bos"] if adds["bos"] is not None else adds_bos:
        pieces.insert(0, "bos")
    if adds["eos"]:
        pieces.append("eos")
    if len(pieces) > 1:
        ids = {name: named[name] for name in pieces if name != "$A"}
        if not all(token_id in range(len(tokens.texts)) for token_id in ids.values()):
            raise file.refusal(f"its tokenizer adds {', '.join(ids)}, but it does not name these tokens")
        special = [(tokens.texts[token_id], token_id) for token_id in ids.values() if token_id is not None]
        single = [piece if piece == "$A" else tokens.texts[ids[piece] or 0] for piece in pieces]
        fast.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    return fast


def _build_bpe(tokens: _Tokens, rule: _Rule) -> Tokenizer:
    vocabulary = {text: token_id for token_id, text in enumerate(tokens.texts)}
    divided = [merge.partition(" ") for merge in tokens.merges]
    merges = [(left, right) for left, _, right in divided]
    if not merges or not vocabulary.keys() >= {
        text for left, right in merges for text in (left, right, left + right)
    }:
        raise tokens.file.refusal("tokenizer.ggml.merges does not fit the tokens")
    fast = Tokenizer(BPE(vocab=vocabulary, merges=merges, ignore_merges=rule.ignores_merges))
    if rule.composes:
        fast.normalizer = normalizers.NFC()
    parts: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if rule.single_digits else []
    if rule.pattern is not None:
        parts.append(pre_tokenizers.Split(Regex(rule.pattern), "isolated"))
    parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.pattern is None))
    fast.pre_tokenizer = pre_tokenizers.Sequence(parts)
    fast.decoder = decoders.ByteLevel()
    return fast


def _build_sentencepiece(tokens: _Tokens, named: Mapping[str, int | None], *, add_space: bool) -> Tokenizer:
    file = tokens.file
    is_gemma = file.architecture.startswith("gemma")
    if len(tokens.scores) != len(tokens.texts):
        raise file.refusal(f"it has {len(tokens.texts)} tokens, but {len(tokens.scores)} scores of them")
    if is_gemma:
        # The converter writes the spaces of a token of spaces as they are.
        tokens.texts = [_SPACE * len(text) if text.strip(" ") == "" else text for text in tokens.texts]
        # Gemma's scores do not follow the order of its merges, but its vocabulary does.
        scores: list[float] = [float(-token_id) for token_id in range(len(tokens.texts))]
    else:
        scores = tokens.scores
    unknown = named["unknown"]
    if unknown is None:
        unknown = next(iter(tokens.of_type(_UNKNOWN)), None)
    fast = Tokenizer(
        BPE(
            vocab={text: token_id for token_id, text in enumerate(tokens.texts)},
            merges=_merges_of_scores(tokens.texts, scores),
            unk_token=None if unknown is None else tokens.texts[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", _SPACE)
    if is_gemma:
        fast.normalizer = spaces
        fast.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    elif file.architecture == "phi3" and add_space:
        fast.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
    else:
        scheme = "first" if add_space else "never"
        fast.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme=scheme, split=False)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if add_space and not is_gemma:
        steps.append(decoders.Strip(" ", 1, 0))
    fast.decoder = decoders.Sequence(steps)
    return fast


def _merges_of_scores(texts: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece merges the pair that makes the token with the highest score. BPE needs all pairs in that order."""
    ids = {text: token_id for token_id, text in enumerate(texts)}
    found = []
    for text, score in zip(texts, scores, strict=True):
        pairs = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        pairs = [pair for pair in pairs if pair[0] in ids and pair[1] in ids]
        pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        found += [(-score, -len(left), -len(right), left, right) for left, right in pairs]
    found.sort(key=lambda merge: merge[:3])
    return [(left, right) for *_, left, right in found]


def _add_special_tokens(fast: Tokenizer, tokens: _Tokens) -> None:
    # Phi-3's own tokenizer skips white space after its special tokens, which a GGUF file can't say.
    skips = tokens.file.architecture == "phi3" and bool(tokens.scores)
    added = []
    for token_id in tokens.of_type(_UNKNOWN, _CONTROL, _USER_DEFINED):
        text, is_special = tokens.texts[token_id], tokens.types[token_id] != _USER_DEFINED
        if not is_special and not text.strip(_SPACE):
            continue  # Spaces become a token by merges.
        skipped = skips and text.startswith("<|") and text != "<|endoftext|>"
        added.append(AddedToken(text, special=is_special, normalized=False, rstrip=skipped))
    fast.add_tokens(added)
