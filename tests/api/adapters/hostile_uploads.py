"""Uploads that must be refused, each made by code, with the status and the words that its refusal must have.

`kinds(shape)` makes them for a base model of that shape. Nothing here is an adapter but `proper`, which is accepted, so
that what is refused is refused for its one fault.
"""

import gzip
import io
import json
import pickle
import random
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from safetensors.numpy import save

from slora_kernels.layout import ModelShape

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
RANK = 2
# The corpus' server takes no more.
MAX_UPLOAD = 16 << 20
MAX_RANK = 16

Tensors = dict[str, np.ndarray]
Members = dict[str, bytes]


@dataclass(frozen=True)
class Hostile:
    """words: in the error's message, and of this kind alone. code: of the error, or of one of its reasons.

    parts: (field, file name, content) of a multipart body. raw: instead of them, headers and body as they are.
    inspected: the refusal comes from the inspection, not from the API around it.
    """

    words: str
    code: str
    parts: list[tuple[str, str, bytes]] = field(default_factory=list)
    status: int = 422
    name: str = "bad"
    inspected: bool = True
    raw: tuple[dict[str, str], bytes | Callable[[], Iterator[bytes]]] | None = None


class Maker:
    """Makes adapters of one base model, proper or with a fault."""

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        self.config: dict[str, Any] = {
            "peft_type": "LORA",
            "r": RANK,
            "lora_alpha": 4,
            "target_modules": ["q_proj", "down_proj"],
        }
        self.tensors = self._make_tensors()
        self.weights = save(self.tensors)
        size = int.from_bytes(self.weights[:8], "little")
        self.header: dict[str, Any] = json.loads(self.weights[8 : 8 + size])
        self.body = self.weights[8 + size :]
        self.size = size
        self.q, self.q_b = self.factor(0, 0, "A"), self.factor(0, 0, "B")
        self.in_width = shape.linears[0].in_width

    def factor(self, layer: int, linear: int, factor: str) -> str:
        path = self.shape.linears[linear].path
        return f"base_model.model.model.layers.{layer}.{path}.lora_{factor}.weight"

    def _make_tensors(self) -> Tensors:
        values = np.random.default_rng(7)
        tensors: Tensors = {}
        for layer in range(self.shape.num_layers):
            for linear in (0, 6):
                module = self.shape.linears[linear]
                for factor, size in (("A", (RANK, module.in_width)), ("B", (module.out_width, RANK))):
                    tensors[self.factor(layer, linear, factor)] = values.standard_normal(size, np.float32)
        return tensors

    def members(
        self,
        config: Mapping[str, object] | bytes | None = None,
        weights: bytes | None = None,
        **extras: str | bytes,
    ) -> Members:
        raw = config if isinstance(config, bytes) else json.dumps(config or self.config).encode()
        members = {CONFIG: raw, WEIGHTS: self.weights if weights is None else weights}
        texts = {name: text.encode() if isinstance(text, str) else text for name, text in extras.items()}
        return members | {name.replace("_dot_", "."): text for name, text in texts.items()}

    def file(self, header: object, body: bytes | None = None) -> bytes:
        """A safetensors file with whatever header."""
        raw = header if isinstance(header, bytes) else json.dumps(header).encode()
        return struct.pack("<Q", len(raw)) + raw + (self.body if body is None else body)

    def entry(self, **changes: object) -> bytes:
        """The file with the first query projection's header entry changed; None takes a field out."""
        entry = {**self.header[self.q], **changes}
        return self.file({**self.header, self.q: {k: v for k, v in entry.items() if v is not None}})

    def with_tensor(self, name: str, value: np.ndarray | None) -> bytes:
        tensors = dict(self.tensors)
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
        return save(tensors)

    def last(self, value: float, dtype: type = np.float32) -> bytes:
        """The file with one bad number: the very last that it holds."""
        name = max(self.header, key=lambda n: self.header[n]["data_offsets"][1])
        changed = self.tensors[name].astype(dtype)
        changed[-1, -1] = value
        return save({**self.tensors, name: changed})

    def bfloat16_nan(self) -> bytes:
        """The query projection's A in bfloat16, all ones but for the NaN at its end."""
        header: dict[str, Any] = {}
        body = b""
        for name, tensor in self.tensors.items():
            bits = np.full(tensor.shape, 0x3F80, np.uint16)
            if name == self.q:
                bits[-1, -1] = 0x7FC1
            raw = bits.tobytes()
            header[name] = {
                "dtype": "BF16",
                "shape": list(tensor.shape),
                "data_offsets": [len(body), len(body) + len(raw)],
            }
            body += raw
        return self.file(header, body)


FIELDS = {
    CONFIG: "config",
    WEIGHTS: "weights",
    "tokenizer_config.json": "tokenizer_config",
    "chat_template.jinja": "chat_template",
    "generation_config.json": "generation_config",
}


def as_parts(members: Members) -> list[tuple[str, str, bytes]]:
    return [(FIELDS[name], name, raw) for name, raw in members.items()]


def _files(members: Members, words: str, code: str) -> Hostile:
    return Hostile(words, code, as_parts(members))


def _archived(raw: bytes, words: str, code: str) -> Hostile:
    return Hostile(words, code, [("archive", "adapter.zip", raw)])


def kinds(shape: ModelShape) -> dict[str, Hostile]:
    """Every kind by its name."""
    make = Maker(shape)
    forms = {name: replace(one, inspected=False) for name, one in (_forms(make) | _outsiders(make)).items()}
    return {
        **_tensor_files(make),
        **_tensor_values(make),
        **_tensor_names(make),
        **_configs(make),
        **_texts(make),
        **_zips(make),
        **_tars(make),
        **forms,
    }


def proper(shape: ModelShape) -> Members:
    """The files of an adapter that is accepted."""
    return Maker(shape).members()


def _tensor_files(make: Maker) -> dict[str, Hostile]:
    """Files that are not safetensors, or are so in a way that two readers would understand differently."""
    weights, header, size, q = make.weights, make.header, make.size, make.q
    whole = len(make.body)
    spans = sorted(entry["data_offsets"] for entry in header.values())
    second = spans[1][0]
    start, end = header[q]["data_offsets"]
    # The header's text, with an entry that is there already once more.
    doubled = json.dumps(header)[:-1] + f", {json.dumps(q)}: {json.dumps(header[q])}}}"
    twice_inside = json.dumps(header).replace('"dtype"', '"dtype": "F16", "dtype"', 1)
    shifted = {**header, q: {**header[q], "data_offsets": [start - 4, end - 4]}}
    order = sorted(header, key=lambda name: header[name]["data_offsets"])
    if start == 0:
        shifted = {
            **header,
            order[1]: {**header[order[1]], "data_offsets": [spans[1][0] - 4, spans[1][1] - 4]},
        }
    hole = {
        name: {
            **entry,
            "data_offsets": [at + 4 * (entry["data_offsets"][0] >= second) for at in entry["data_offsets"]],
        }
        for name, entry in header.items()
    }
    # 2 ** 47 * 2 ** 17 is 2 ** 64, which is nothing in 64 bits.
    wrapping = {**header, q: {"dtype": "F32", "shape": [1 << 47, 1 << 17], "data_offsets": [0, 0]}}
    files: dict[str, tuple[bytes, str]] = {
        "an empty file": (b"", "is 0 bytes long, too short"),
        "cut within the length of the header": (weights[:7], "is 7 bytes long, too short"),
        "cut before the header": (weights[:8], f"claims {size} bytes, but the file ends after 0"),
        "cut within the header": (weights[: 8 + size // 2], f"but the file ends after {size // 2}"),
        "cut behind the header": (weights[: 8 + size], f"describes {whole} bytes of tensors, it has 0"),
        "cut between two tensors": (weights[: 8 + size + second], f"of tensors, it has {second}"),
        "cut before the last byte": (weights[:-1], f"of tensors, it has {whole - 1}"),
        "a byte behind the end": (weights + b"x", "goes on after the last tensor"),
        "another file behind the end": (weights + weights, f"it has {whole + len(weights)}"),
        "no header": (struct.pack("<Q", 0) + make.body, "Expecting value: line 1 column 1"),
        "a header of spaces": (make.file(b" " * 64), "Expecting value: line 1 column 65"),
        "a header that claims 100 MB": (struct.pack("<Q", 10**8) + weights[8:], "claims 100000000 bytes"),
        "a header that has 10 MB": (
            make.file(json.dumps(header).encode() + b" " * (10 << 20), b""),
            f"claims {len(json.dumps(header)) + (10 << 20)} bytes; at most 1048576",
        ),
        "a header that claims 2 ** 64 - 1": (b"\xff" * 8 + weights[8:], "claims 18446744073709551615 bytes"),
        "a header that claims 2 ** 63": (
            struct.pack("<Q", 1 << 63) + weights[8:],
            "claims 9223372036854775808",
        ),
        "a header that is not UTF-8": (make.file(b'{"\xff": 1}'), "'utf-8' codec can't decode byte 0xff"),
        "a header with a lone surrogate": (
            make.file({**header, "\ud800": header[q]}),
            "the header is not valid JSON: it holds the lone surrogate U+D800",
        ),
        "a header with a byte order mark": (
            make.file(b"\xef\xbb\xbf" + json.dumps(header).encode()),
            "Unexpected UTF-8 BOM",
        ),
        "a header that is a list": (make.file([header]), "a JSON list, not an object"),
        "a header that is nested too deep": (
            make.file(b"[" * 500_000),
            "the header is not valid JSON: maximum recursion",
        ),
        "a header with NaN": (make.entry(shape=[float("nan"), 2]), "the header is not valid JSON: NaN"),
        "one tensor twice": (make.file(doubled.encode()), "lora_A.weight' appears twice"),
        "one field twice": (make.file(twice_inside.encode()), "key 'dtype' appears twice"),
        "tensors that overlap": (make.file(shifted), "overlaps the tensor before it"),
        "a hole between tensors": (
            make.file(hole, make.body[:second] + b"gap!" + make.body[second:]),
            "leaves a hole",
        ),
        "offsets the wrong way round": (
            make.entry(data_offsets=[end, start]),
            f"data_offsets [{end}, {start}]",
        ),
        "offsets as texts": (make.entry(data_offsets=["0", "384"]), "data_offsets ['0', '384']"),
        "three offsets": (
            make.entry(data_offsets=[start, end, end]),
            f"data_offsets [{start}, {end}, {end}]",
        ),
        "a negative offset": (make.entry(data_offsets=[-end, 0]), f"data_offsets [-{end}, 0]"),
        "a negative size": (make.entry(shape=[-2, -make.in_width]), f"shape [-2, -{make.in_width}]"),
        "a broken size": (make.entry(shape=[2.0, make.in_width]), f"shape [2.0, {make.in_width}]"),
        "a boolean size": (make.entry(shape=[True, 2 * make.in_width]), f"shape [True, {2 * make.in_width}]"),
        "a size beyond int64": (make.entry(shape=[1 << 63, 2]), "shape [9223372036854775808, 2]"),
        "a shape whose size overflows int64": (
            make.entry(shape=[1 << 40, 1 << 40]),
            "takes 4835703278458516698824704 bytes",
        ),
        "a shape whose size is zero in int64": (make.file(wrapping), "takes 73786976294838206464 bytes"),
        "nine dimensions": (make.entry(shape=[1] * 9), "shape [1, 1, 1, 1, 1, 1, 1, 1, 1]"),
        "a shape that is a number": (make.entry(shape=96), "shape 96 or"),
        "numbers of 64 bits": (make.entry(dtype="F64"), "has dtype 'F64'"),
        "whole numbers": (make.entry(dtype="I32"), "has dtype 'I32'"),
        "numbers of 8 bits": (make.entry(dtype="F8_E4M3"), "has dtype 'F8_E4M3'"),
        "a dtype that is a list": (make.entry(dtype=["F32"]), "has dtype ['F32']"),
        "a dtype that nobody knows": (make.entry(dtype="F32\0"), "has dtype 'F32\\x00'"),
        "an entry without a shape": (make.entry(shape=None), "must hold dtype, shape and data_offsets"),
        "an entry with a field more": (
            make.file({**header, "more": {**header[q], "x": 1}}),
            "tensor 'more': the header entry must hold",
        ),
        "an entry that is a number": (
            make.file({**header, "number": 1}),
            "tensor 'number': the header entry",
        ),
        "metadata that are no texts": (
            make.file({**header, "__metadata__": {"a": {}}}),
            "__metadata__ is not",
        ),
    }
    found = {
        name: _files(make.members(weights=raw), words, "tensors_malformed")
        for name, (raw, words) in files.items()
    }
    checkpoint = make_zip({"archive/data.pkl": pickle.dumps({"a": 1}), "archive/version": b"3"})
    return found | {
        "a pickle under the name of safetensors": _files(
            make.members(weights=pickle.dumps({"lora_A": [1.0] * 10})),
            "a pickle under another name",
            "pickle",
        ),
        "a torch checkpoint under the name of safetensors": _files(
            make.members(weights=checkpoint), "never loaded; save the adapter with save_pretrained", "pickle"
        ),
    }


def _tensor_values(make: Maker) -> dict[str, Hostile]:
    """Numbers and shapes that no adapter of this base may have."""
    last = max(make.header, key=lambda name: make.header[name]["data_offsets"][1])
    out_width = make.shape.linears[0].out_width
    wide = np.ones((RANK, make.in_width + 1), np.float32)
    nothing = save(
        {name: np.zeros_like(value) if "lora_B" in name else value for name, value in make.tensors.items()}
    )
    wants = f"config and base need [{RANK}, {make.in_width}]"
    return {
        name: _files(make.members(weights=weights), words, code)
        for name, (weights, words, code) in {
            "NaN as the last number": (make.last(np.nan), f"tensor {last!r} holds NaN", "non_finite"),
            "infinity as the last number": (make.last(np.inf), f"{last!r} holds NaN or inf", "non_finite"),
            "minus infinity in half precision": (
                make.last(-np.inf, np.float16),
                f"{last!r} holds NaN or infinity",
                "non_finite",
            ),
            "NaN in bfloat16": (make.bfloat16_nan(), f"tensor {make.q!r} holds NaN", "non_finite"),
            "a base that is wider": (
                make.with_tensor(make.q, wide),
                f"shape [2, {make.in_width + 1}]",
                "shape_mismatch",
            ),
            "a factor the wrong way round": (
                make.with_tensor(make.q_b, make.tensors[make.q_b].T.copy()),
                f"shape [2, {out_width}]",
                "shape_mismatch",
            ),
            "a factor in one dimension": (
                make.with_tensor(make.q, np.ones(2 * make.in_width, np.float32)),
                f"[{2 * make.in_width}]; {wants}",
                "shape_mismatch",
            ),
            "a factor without numbers": (
                make.with_tensor(make.q, np.ones((0, make.in_width), np.float32)),
                f"shape [0, {make.in_width}]",
                "shape_mismatch",
            ),
            "a rank that the config does not name": (
                make.with_tensor(make.q, np.ones((3, make.in_width), np.float32)),
                f"shape [3, {make.in_width}]",
                "shape_mismatch",
            ),
            "B all zeros, as before training": (
                nothing,
                "no effect and would answer like the base",
                "no_effect",
            ),
        }.items()
    }


def _tensor_names(make: Maker) -> dict[str, Hostile]:
    """Tensors that belong to nothing, or not enough of them."""
    a, some = make.tensors[make.q], np.ones((2, make.in_width), np.float32)
    layers = make.shape.num_layers
    first = {n: t for n, t in make.tensors.items() if ".layers.0." in n}
    cyrillic = make.q.replace("q_proj", "q_pr\u043ej")
    beyond = make.q.replace(".0.", f".{layers}.")
    named: dict[str, tuple[str, np.ndarray, str, str]] = {
        "a tensor named like a path": (
            "../../etc/passwd",
            some,
            "tensor '../../etc/passwd' belongs",
            "unknown_tensor",
        ),
        "a tensor with NUL in its name": (make.q + "\0", some, "weight\\x00' belongs", "unknown_tensor"),
        "a tensor without a name": ("", some, "tensor '' belongs", "unknown_tensor"),
        "a tensor with a Cyrillic letter in its name": (
            cyrillic,
            some,
            "q_pr\u043ej.lora_A",
            "unknown_tensor",
        ),
        "a tensor of a layer beyond the last": (beyond, some, f"layers.{layers}.self", "unknown_tensor"),
        "a tensor of layer 00": (make.q.replace(".0.", ".00."), some, "layers.00.self", "unknown_tensor"),
        "a tensor of another model": (
            "transformer.h.0.attn.c_attn.lora_A.weight",
            some,
            "c_attn",
            "unknown_tensor",
        ),
        "one weight in two spellings": (
            make.q.removeprefix("base_model.model."),
            a,
            "are the same weight",
            "duplicate_tensor",
        ),
        "a tensor that the config does not target": (
            make.q.replace("q_proj", "k_proj"),
            some,
            "which the config does not adapt",
            "untargeted_tensors",
        ),
        "magnitudes of DoRA": (
            make.q.replace("lora_A.weight", "lora_magnitude_vector"),
            some,
            "is DoRA magnitudes",
            "use_dora",
        ),
        "a trained bias": (make.q_b.replace("weight", "bias"), some, "is a trained bias", "bias"),
        "a norm": (
            "base_model.model.model.norm.weight",
            some,
            "model.norm.weight' belongs",
            "unknown_tensor",
        ),
        "a matrix of embeddings": (
            "base_model.model.model.embed_tokens.weight",
            some,
            "resized embeddings are not served",
            "embeddings",
        ),
        "a wholly trained module": (
            "base_model.model.lm_head.modules_to_save.weight",
            some,
            "is a wholly trained module",
            "modules_to_save",
        ),
    }
    found = {
        name: _files(make.members(weights=make.with_tensor(tensor, value)), words, code)
        for name, (tensor, value, words, code) in named.items()
    }
    lacking: dict[str, tuple[bytes, str]] = {
        "no tensors at all": (save({}), "and 1 more, but there are no tensors"),
        "tensors of one layer only": (save(first), "config adapts model.layers.1.self_attn.q_proj"),
        "half a pair": (make.with_tensor(make.q_b, None), "q_proj has no lora_B"),
    }
    return found | {
        name: _files(make.members(weights=raw), words, "missing_tensors")
        for name, (raw, words) in lacking.items()
    }


def _configs(make: Maker) -> dict[str, Hostile]:
    """Configs that are no JSON, or ask for what is not served."""
    text = json.dumps(make.config)
    texts: dict[str, tuple[bytes, str]] = {
        "an empty config": (b"", "adapter_config.json is not valid JSON: Expecting value"),
        "a config that is cut": (
            text[:-1].encode(),
            "adapter_config.json is not valid JSON: Expecting ',' delimiter",
        ),
        "a config that is a list": (b"[1]", "adapter_config.json holds a JSON list"),
        "a config that is not UTF-8": (
            text.encode("utf-16"),
            "adapter_config.json is not valid JSON: 'utf-8' codec",
        ),
        "a config with one key twice": ((text[:-1] + ', "r": 2}').encode(), "key 'r' appears twice"),
        "a config that is nested too deep": (
            b'{"r":' * 100_000,
            "adapter_config.json is not valid JSON: maximum recursion",
        ),
        "a config of 2 MiB": (text.encode() + b" " * (2 << 20), "bytes long; at most 1048576 are accepted"),
        "alpha NaN": (
            text.replace('"lora_alpha": 4', '"lora_alpha": NaN').encode(),
            "JSON: NaN is not a JSON number",
        ),
        "alpha infinite": (
            text.replace('"lora_alpha": 4', '"lora_alpha": Infinity').encode(),
            "JSON: Infinity is not a JSON number",
        ),
        "a number of 5000 digits": (
            text.replace('"lora_alpha": 4', '"lora_alpha": ' + "9" * 5000).encode(),
            "Exceeds the limit",
        ),
    }
    found = {
        name: _files(make.members(raw), words, "config_malformed") for name, (raw, words) in texts.items()
    }
    overflowing = text.replace('"lora_alpha": 4', '"lora_alpha": 1e400').encode()
    found["alpha that overflows"] = _files(make.members(overflowing), "lora_alpha is inf", "alpha")
    rank9 = {**make.config, "r": MAX_RANK + 1}
    changes: dict[str, tuple[dict[str, object], str, str]] = {
        "alpha of 1e308": ({"lora_alpha": 1e308}, "lora_alpha is 1e+308", "alpha"),
        "alpha zero": ({"lora_alpha": 0}, "lora_alpha is 0,", "alpha"),
        "alpha as a text": ({"lora_alpha": "16"}, "lora_alpha is '16'", "alpha"),
        "alpha true": ({"lora_alpha": True}, "lora_alpha is True", "alpha"),
        "a scale that only overflows": ({"lora_alpha": 1e9}, "is scaled by 5e+08", "scale_too_high"),
        "rank zero": ({"r": 0}, "r is 0, expected", "rank"),
        "rank below zero": ({"r": -1}, "r is -1, expected", "rank"),
        "a rank that is no whole number": ({"r": 2.0}, "r is 2.0, expected", "rank"),
        "a rank that is true": ({"r": True}, "r is True, expected", "rank"),
        "a rank of 10 ** 30": ({"r": 10**30}, "r is 1000000000000000000000000000000,", "rank"),
        "a rank of 1000000": (
            {"r": 1_000_000},
            "has rank 1000000; this server accepts at most",
            "rank_too_high",
        ),
        "a rank over the limit": (
            rank9,
            f"has rank {MAX_RANK + 1}; this server accepts at most",
            "rank_too_high",
        ),
        "a rank over the limit by a pattern": (
            {"rank_pattern": {"down_proj": 5000}},
            "has rank 5000; this server",
            "rank_too_high",
        ),
        "5000 patterns": (
            {"rank_pattern": {f"m{i}": 2 for i in range(5000)}},
            "rank_pattern must be a table of at most",
            "rank_pattern",
        ),
        "a pattern that is no regular expression": (
            {"alpha_pattern": {"(": 1}},
            "alpha_pattern: ",
            "alpha_pattern",
        ),
        "a pattern that refers back": (
            {"rank_pattern": {r"(a)\1": 2}},
            "rank_pattern: the regular expression",
            "rank_pattern",
        ),
        "a pattern of 60 groups": (
            {"exclude_modules": "(" * 60 + "a" + ")" * 60},
            "nests groups deeper than 50",
            "exclude_modules",
        ),
        "patterns that take for ever": (
            {"rank_pattern": {f"(.*a.*b.*c.*{i}.*)" + "{1,50}": 2 for i in range(2000)}},
            "the pattern takes too long to match",
            "rank_pattern",
        ),
        "no targets": ({"target_modules": []}, "target_modules is missing or empty", "target_modules"),
        "targets that are a number": (
            {"target_modules": 7},
            "target_modules must be a list",
            "target_modules",
        ),
        "10000 targets": (
            {"target_modules": [f"m{i}" for i in range(10_000)]},
            "target_modules must be a list of at most 8192 names",
            "target_modules",
        ),
        "targets that the base lacks": (
            {"target_modules": ["fc1"]},
            "target_modules names 'fc1'",
            "unknown_module",
        ),
        "targets that match nothing": (
            {"target_modules": ".*nothing"},
            "adapts no module",
            "matches_nothing",
        ),
        "everything excluded": (
            {"exclude_modules": ".*"},
            "the config adapts no module of",
            "matches_nothing",
        ),
        "layers beyond the last": ({"layers_to_transform": [99]}, "names layer 99", "unknown_module"),
        "layers below zero": (
            {"layers_to_transform": [-1]},
            "layers_to_transform is [-1]",
            "layers_to_transform",
        ),
        "a layer pattern that is an expression": (
            {"layers_to_transform": [0], "layers_pattern": ".*"},
            "layers_pattern is '.*'",
            "layers_pattern",
        ),
        "DoRA": ({"use_dora": True}, "use_dora is set", "use_dora"),
        "biases": ({"bias": "all"}, "bias is 'all'", "bias"),
        "whole modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save is set", "modules_to_save"),
        "layers run several times": (
            {"layer_replication": [[0, 2]]},
            "layer_replication is set",
            "layer_replication",
        ),
        "another method": ({"peft_type": "IA3"}, "peft_type is 'IA3'", "peft_type"),
        "a method that is an object": ({"peft_type": {"x": 1}}, "peft_type is {'x': 1}", "peft_type"),
        "an initialisation that changes the base": (
            {"init_lora_weights": "pissa"},
            "init_lora_weights is 'pissa'",
            "init_lora_weights",
        ),
        "a switch that nobody knows": ({"use_magic": True}, "sets 'use_magic'", "config_unknown_key"),
        "a switch that is a text": ({"use_rslora": "yes"}, "use_rslora is 'yes'", "use_rslora"),
    }
    return found | {
        name: _files(make.members({**make.config, **change}), words, code)
        for name, (change, words, code) in changes.items()
    }


def _texts(make: Maker) -> dict[str, Hostile]:
    """What may lie beside the weights."""
    token = {"added_tokens_decoder": {"999": {"content": "<x>"}}}
    texts: dict[str, tuple[dict[str, str | bytes], str, str]] = {
        "a chat template of 300 KiB": (
            {"chat_template_dot_jinja": "x" * (300 << 10)},
            "chat_template.jinja takes 307200 bytes",
            "extra_too_long",
        ),
        "a chat template that is not UTF-8": (
            {"chat_template_dot_jinja": b"\xff\xfe"},
            "chat_template.jinja is not UTF-8 text",
            "extra_malformed",
        ),
        "sampling defaults that are a list": (
            {"generation_config_dot_json": "[]"},
            "generation_config.json holds a JSON list",
            "extra_malformed",
        ),
        "sampling defaults with NaN": (
            {"generation_config_dot_json": '{"temperature": NaN}'},
            "generation_config.json is not valid JSON: NaN",
            "extra_malformed",
        ),
        "a tokenizer with a lone surrogate in its chat template": (
            {"tokenizer_config_dot_json": '{"chat_template": "x\\ud800"}'},
            "tokenizer_config.json is not valid JSON: it holds the lone surrogate U+D800",
            "extra_malformed",
        ),
        "a tokenizer with added tokens": (
            {"tokenizer_config_dot_json": json.dumps(token)},
            "adds 1 tokens (id 999)",
            "added_tokens",
        ),
        "a tokenizer config of nothing but brackets": (
            {"tokenizer_config_dot_json": '{"a":' + "[" * 200_000},
            "tokenizer_config.json is not valid JSON: maximum",
            "extra_malformed",
        ),
    }
    return {
        name: _files(make.members(**extras), words, code) for name, (extras, words, code) in texts.items()
    }


def _outsiders(make: Maker) -> dict[str, Hostile]:
    """What no reading of the files finds: the API knows it, or the engine."""
    scaled = {
        scale: save({name: tensor * np.float32(scale) for name, tensor in make.tensors.items()})
        for scale in (1e-15, 1e18)
    }
    template, sampling, stop_token = (
        {"chat_template_dot_jinja": "{% for"},
        {"generation_config_dot_json": '{"num_beams": 4}'},
        {"generation_config_dot_json": '{"eos_token_id": 18446744073709551616}'},
    )
    return {
        "a chat template that is none": _files(
            make.members(**template), "the chat template cannot be read: line 1", "chat_template_malformed"
        ),
        "sampling that is not honoured": _files(
            make.members(**sampling), "sets num_beams to 4", "generation_config_unsupported"
        ),
        "a stop token beyond 64 bits": _files(
            make.members(**stop_token),
            "eos_token_id is 18446744073709551616; the model's token ids are 0 to",
            "generation_config_malformed",
        ),
        "numbers too small to matter": _files(
            make.members(weights=scaled[1e-15]),
            "log-probabilities differs from the base model's",
            "no_effect",
        ),
        "numbers too large to compute with": _files(
            make.members(weights=scaled[1e18]), "the adapter breaks the model's arithmetic", "not_finite"
        ),
    }


def _part(field: str, content: bytes, file_name: str = "") -> bytes:
    file = f'; filename="{file_name}"' if file_name else ""
    return f'--b\r\nContent-Disposition: form-data; name="{field}"{file}\r\n\r\n'.encode() + content + b"\r\n"


def _forms(make: Maker) -> dict[str, Hostile]:
    """Bodies and names that are refused before anything is opened."""
    members = make.members()
    parts = as_parts(members)
    form = {"Content-Type": "multipart/form-data; boundary=b"}
    start = (
        _part("name", b"bad")
        + _part("config", members[CONFIG], "c")
        + _part("weights", members[WEIGHTS], "w")
    )

    def endless() -> Iterator[bytes]:
        yield start[:-2]
        for _ in range(20):
            yield b"x" * (1 << 20)

    def raw(
        words: str, code: str, body: bytes | Callable[[], Iterator[bytes]], status: int = 400, **headers: str
    ) -> Hostile:
        return Hostile(
            words,
            code,
            status=status,
            raw=(form | {k.replace("_", "-"): v for k, v in headers.items()}, body),
        )

    def named(name: str) -> Hostile:
        words = f"{name[:140]!r} cannot be the name of an adapter"
        return Hostile(words, "invalid_name", parts, status=400, name=name)

    def field_called(name: str) -> Hostile:
        return Hostile(
            f"`{name}` is not a multipart field", "unknown_parameter", [*parts, (name, "x", b"x")], status=400
        )

    def pickled(name: str) -> Hostile:
        return Hostile(f"{name!r} is a pickle", "pickle", [parts[0], ("weights", name, b"\x80\x04.")])

    names = {
        "empty": "",
        "one that leads elsewhere": "../bad",
        "a path": "a/b",
        "one with NUL": "a\0b",
        "a Cyrillic letter": "b\u0430d",
        "an accent composed": "caf\u00e9",
        "an accent decomposed": "cafe\u0301",
        "letters from right to left": "a\u202eb",
        "a full-width letter": "\uff41dapter",
        "a line of its own": "a\nb",
        "one too long": "a" * 129,
        "one of dots": "..",
        "a version's": "bad@3",
    }
    return {
        **{f"an adapter's name: {what}": named(name) for what, name in names.items()},
        **{
            f"weights called {name}": pickled(name)
            for name in ("adapter_model.bin", "model.PT", "a.pkl", "x.ckpt")
        },
        "a field named like a path": field_called("../../etc/passwd"),
        "a field named like a homoglyph of config": field_called("c\u043enfig"),
        "config sent twice": Hostile("`config` is there twice", "", [*parts, parts[0]], status=400),
        "no weights": Hostile("`weights` is missing", "missing_parameter", parts[:1], status=400),
        "files and an archive": Hostile(
            "or the multipart field `archive`, not both",
            "",
            [*parts, ("archive", "a.zip", b"PK")],
            status=400,
        ),
        "a config of 5 MiB": Hostile(
            "`config` is larger than 4194304 bytes",
            "",
            [("config", "c", b" " * (5 << 20)), parts[1]],
            status=400,
        ),
        "a body that is cut": raw("The body ends in the middle", "", start + b"--b"),
        "a body that is no form": raw("The body is not valid multipart", "", b"PK\x03\x04" * 10),
        "no boundary": raw(
            "Send the adapter as multipart/form-data", "", start, Content_Type="multipart/form-data"
        ),
        "a header of a part without end": raw("header", "", b"--b\r\nX: " + b"x" * 5000),
        "a body over the limit, as declared": raw(
            f"larger than {MAX_UPLOAD} bytes, this server's limit (max_upload_bytes)",
            "body_too_large",
            b"x" * (MAX_UPLOAD + 1),
            413,
        ),
        "a header of 100 MB": Hostile(
            "The body is larger than 16777216",
            "body_too_large",
            [parts[0], ("weights", "w", bytes(100 << 20))],
            413,
        ),
        "a body over the limit, as it comes": raw("The body is larger than", "body_too_large", endless, 413),
    }


def make_zip(
    members: Mapping[str | zipfile.ZipInfo, bytes] | list[tuple[str | zipfile.ZipInfo, bytes]],
) -> bytes:
    entries = list(members.items()) if isinstance(members, Mapping) else members
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, raw in entries:
            archive.writestr(name, raw)
    return buffer.getvalue()


def _commented(name: str, num_bytes: int) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.comment = b"x" * num_bytes
    return info


def _moded(name: str, mode: int) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.create_system, info.external_attr = 3, mode << 16
    return info


def _zips(make: Maker) -> dict[str, Hostile]:
    members = make.members()
    proper = make_zip(members)

    def also(name: str, raw: bytes = b"x") -> bytes:
        return make_zip({**members, name: raw})

    def method(number: int) -> bytes:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", number) as archive:
            for name, raw in members.items():
                archive.writestr(name, raw)
        return buffer.getvalue()

    def with_nul() -> bytes:
        return make_zip({**members, "adapter_config.jsonXevil": b"x"}).replace(b"jsonXevil", b"json\0evil")

    def directory_entry(at: int, replacement: bytes) -> bytes:
        """The archive with bytes of the weights' entry in its central directory replaced."""
        start = proper.rindex(b"PK\x01\x02")
        return proper[: start + at] + replacement + proper[start + at + len(replacement) :]

    def doubled() -> bytes:
        names = [
            (CONFIG, members[CONFIG]),
            (WEIGHTS, members[WEIGHTS]),
            ("adapter_confih.json", members[CONFIG]),
        ]
        return make_zip(names).replace(b"adapter_confih.json", CONFIG.encode())

    noise = random.Random(1).randbytes(1 << 20)
    pictured = {
        "a name that leads elsewhere": ("../adapter_config.json", "leads out of the archive"),
        "a name that leads elsewhere in the middle": ("a/../../x", "'a/../../x' leads out"),
        "an absolute path": ("/etc/cron.d/x", "'/etc/cron.d/x' is an absolute path"),
        "a drive": ("C:/x", "'C:/x' is an absolute path"),
        "a backslash": ("..\\x", "has a backslash in its name"),
        "a Cyrillic homoglyph": ("\u0430dapter_config.json", "U+0430 (CYRILLIC SMALL LETTER A)"),
        "full-width letters": ("\uff41dapter_config.json", "FULLWIDTH LATIN SMALL LETTER A"),
        "a composed accent": ("caf\u00e9.json", "LATIN SMALL LETTER E WITH ACUTE"),
        "a decomposed accent": ("cafe\u0301.json", "COMBINING ACUTE ACCENT"),
        "letters from right to left": ("adapter\u202egnoj.json", "RIGHT-TO-LEFT OVERRIDE"),
        "a space of no width": ("adapter_config\u200b.json", "ZERO WIDTH SPACE"),
        "a line feed": ("a\nb", "U+000A (a control character"),
        "a name of 300 characters": ("n" * 300, "has a name of 300 characters"),
        "capitals": ("Adapter_Config.JSON", "must be spelt 'adapter_config.json'"),
        "a space behind the name": (
            "adapter_model.safetensors ",
            "must be spelt 'adapter_model.safetensors'",
        ),
    }
    found = {
        f"zip: {what}": _archived(also(name), words, "archive_name")
        for what, (name, words) in pictured.items()
    }
    bomb = make_zip({CONFIG: members[CONFIG], WEIGHTS: bytes(MAX_UPLOAD + (1 << 20))})
    assert len(bomb) * 900 < MAX_UPLOAD
    return found | {
        "zip: NUL in a name": _archived(with_nul(), "U+0000", "archive_name"),
        "zip: a symbolic link": _archived(
            make_zip({**members, _moded("README.md", 0o120777): b"/etc/passwd"}),
            "'README.md' is a symbolic link",
            "archive_member",
        ),
        "zip: the config as a link": _archived(
            make_zip({_moded(CONFIG, 0o120777): b"/etc/passwd", WEIGHTS: members[WEIGHTS]}),
            "'adapter_config.json' is a symbolic link",
            "archive_member",
        ),
        "zip: a device": _archived(
            make_zip({**members, _moded("null", 0o020666): b""}), "'null' is a special file", "archive_member"
        ),
        "zip: encrypted": _archived(directory_entry(8, b"\x01"), "is encrypted", "archive_member"),
        "zip: bzip2 inside": _archived(
            method(zipfile.ZIP_BZIP2), "compressed by method 12", "archive_member"
        ),
        "zip: lzma inside": _archived(method(zipfile.ZIP_LZMA), "compressed by method 14", "archive_member"),
        "zip: one name twice": _archived(
            doubled(), "'adapter_config.json' is in the archive twice", "archive_duplicate"
        ),
        "zip: one name twice by a dot": _archived(
            also("./adapter_config.json"),
            "'./adapter_config.json' is in the archive twice",
            "archive_duplicate",
        ),
        "zip: an archive inside": _archived(
            also("more.zip", proper), "'more.zip' is an archive within", "archive_nested"
        ),
        "zip: a pickle inside": _archived(
            also("optimizer.pt"), "'optimizer.pt' is a pickle, which is never loaded", "pickle"
        ),
        "zip: pickled weights": _archived(
            make_zip({CONFIG: members[CONFIG], "adapter_model.bin": b"\x80\x04."}),
            "'adapter_model.bin' is a pickle, which",
            "pickle",
        ),
        "zip: a bomb of 1000 to 1": _archived(
            bomb, f"adapter_model.safetensors unpacks to more than {MAX_UPLOAD} bytes", "archive_too_large"
        ),
        "zip: a bomb for a config": _archived(
            make_zip({CONFIG: b" " * (64 << 20), WEIGHTS: members[WEIGHTS]}),
            "adapter_config.json unpacks to more than",
            "archive_too_large",
        ),
        "zip: a size that is too small": _archived(
            directory_entry(24, struct.pack("<L", len(make.weights) - 100)),
            "Bad CRC-32 for file",
            "archive_malformed",
        ),
        "zip: a size that is too large": _archived(
            directory_entry(24, struct.pack("<L", len(make.weights) + 100)),
            f"the archive says {len(make.weights) + 100}",
            "archive_malformed",
        ),
        "zip: another name in the local header": _archived(
            proper.replace(CONFIG.encode(), b"adapter_confih.json", 1),
            "and header b'adapter_confih.json' differ",
            "archive_malformed",
        ),
        "zip: damaged bytes": _archived(
            _flip_stored(members), "Bad CRC-32 for file 'adapter_model", "archive_malformed"
        ),
        "zip: cut": _archived(proper[:-30], "File is not a zip file", "archive_malformed"),
        "zip: cut in the middle": _archived(
            proper[: len(proper) // 2], "broken: File is not a zip", "archive_malformed"
        ),
        "zip: two folders": _archived(
            make_zip({f"a/{CONFIG}": members[CONFIG], f"b/{WEIGHTS}": members[WEIGHTS]}),
            "lies in another folder",
            "archive_place",
        ),
        "zip: deep folders": _archived(
            make_zip({f"a/b/{name}": raw for name, raw in members.items()}),
            "lies 2 folders deep",
            "archive_place",
        ),
        "zip: 2000 members": _archived(
            make_zip({**members, **{f"{i}.txt": b"" for i in range(2000)}}),
            "more than 1024 members",
            "archive_members",
        ),
        "zip: a list of members of 2 MB": _archived(
            make_zip([(_commented(f"{i}.txt", 60_000), b"") for i in range(35)]),
            "the archive's list of members takes 21",
            "archive_members",
        ),
        "zip: no config": _archived(
            make_zip({WEIGHTS: members[WEIGHTS]}), "adapter_config.json is missing", "missing_file"
        ),
        "zip: no weights": _archived(
            make_zip({CONFIG: members[CONFIG]}), "safetensors is missing", "missing_file"
        ),
        "zip: nothing in it": _archived(
            make_zip({}),
            "adapter_config.json is missing; adapter_model.safetensors is missing",
            "missing_file",
        ),
        "zip: nothing but noise behind its first bytes": _archived(
            b"PK\x03\x04" + noise, "the archive is broken: File is not", "archive_malformed"
        ),
        "archive: seven-zip": _archived(
            b"7z\xbc\xaf\x27\x1c" + noise, "begins with 37 7a bc af", "archive_format"
        ),
        "archive: xz": _archived(b"\xfd7zXZ\0" + noise, "begins with fd 37 7a 58", "archive_format"),
        "archive: empty": _archived(b"", "the archive begins with nothing", "archive_format"),
        "archive: the weights alone": _archived(
            make.weights, f"begins with {make.weights[:4].hex(' ')}", "archive_format"
        ),
    }


def _flip_stored(members: Members) -> bytes:
    """A zip without compression, one bit of whose weights is another."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, raw in members.items():
            archive.writestr(name, raw)
    raw = bytearray(buffer.getvalue())
    raw[raw.index(members[WEIGHTS]) + len(members[WEIGHTS]) - 1] ^= 1
    return bytes(raw)


def make_tar(entries: list[tuple[tarfile.TarInfo | str, bytes]], form: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
        for entry, raw in entries:
            info = tarfile.TarInfo(entry) if isinstance(entry, str) else entry
            info.size = info.size or len(raw)
            archive.addfile(info, io.BytesIO(raw))
    return buffer.getvalue()


def _typed(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def _tars(make: Maker) -> dict[str, Hostile]:
    members: list[tuple[tarfile.TarInfo | str, bytes]] = list(make.members().items())
    proper = make_tar(members)
    packed = gzip.compress(proper, 1)

    def also(entry: tarfile.TarInfo | str, raw: bytes = b"") -> bytes:
        return make_tar([*members, (entry, raw)])

    def negative() -> bytes:
        """A member whose size is -512 in the base-256 form."""
        raw = bytearray(make_tar([("README.md", b"")]))
        raw[124:136] = b"\xff" * 10 + b"\xfe\x00"
        raw[148:156] = b" " * 8
        raw[148:156] = b"%06o\0 " % sum(raw[:512])
        return bytes(raw)

    second = proper.index(WEIGHTS.encode())
    odd = {
        "a symbolic link": (tarfile.SYMTYPE, "'x' is a symbolic link"),
        "a hard link": (tarfile.LNKTYPE, "'x' is a hard link"),
        "a character device": (tarfile.CHRTYPE, "'x' is a character device"),
        "a block device": (tarfile.BLKTYPE, "'x' is a block device"),
        "a named pipe": (tarfile.FIFOTYPE, "'x' is a named pipe"),
    }
    found = {
        f"tar: {what}": _archived(also(_typed("x", kind, CONFIG)), words, "archive_member")
        for what, (kind, words) in odd.items()
    }
    hidden = _typed("README.md", tarfile.REGTYPE)
    hidden.pax_headers = {"path": "../../escaped"}

    def described(name: str = "README.md", **headers: str) -> tarfile.TarInfo:
        """A member with a pax header."""
        info = _typed(name, tarfile.REGTYPE)
        info.pax_headers = {key.replace("_", "."): value for key, value in headers.items()}
        return info

    def extended(kind: bytes, content: bytes) -> bytes:
        """A header before the members that extends one of theirs."""
        return make_tar([(_typed("extended", kind), content)])[: 512 + -(-len(content) // 512) * 512]

    long_name = extended(tarfile.GNUTYPE_LONGNAME, b"name\0")
    attributes: list[tuple[tarfile.TarInfo | str, bytes]] = [
        (described(f"{i}.txt", a="x" * 60_000), b"") for i in range(20)
    ]
    # A file with a hole, as GNU tar writes it.
    sparse = described(GNU_sparse_major="1", GNU_sparse_minor="0")
    return found | {
        "tar: the weights as a link to the config": _archived(
            make_tar([members[0], (_typed(WEIGHTS, tarfile.LNKTYPE, CONFIG), b"")]),
            "'adapter_model.safetensors' is a hard link",
            "archive_member",
        ),
        "tar: a name that leads elsewhere": _archived(also("../../x"), "'../../x' leads out", "archive_name"),
        "tar: a name that leads elsewhere by a pax header": _archived(
            also(hidden), "'../../escaped' leads out", "archive_name"
        ),
        "tar: 3000 long names in a row": _archived(
            long_name * 3000 + proper, "more than 8 extended headers in a row", "archive_header"
        ),
        "tar.gz: a pax header of 8 MB": _archived(
            gzip.compress(also(described(comment="x" * (8 << 20))), 1),
            "an extended header of 8388625 bytes",
            "archive_header",
        ),
        "tar.gz: a megabyte of small pax headers": _archived(
            gzip.compress(make_tar(attributes), 1),
            "at most 65536 each and 1048576 in all are accepted",
            "archive_header",
        ),
        "tar: a pax header that is none": _archived(
            extended(tarfile.XHDTYPE, b"7 a=bc\nd=e") + proper,
            "an invalid pax header at byte 7",
            "archive_malformed",
        ),
        "tar: a pax header with a size that is no number": _archived(
            extended(tarfile.XHDTYPE, b"11 size=-1\n") + proper,
            "a pax header with an invalid size",
            "archive_malformed",
        ),
        "tar: one name for all members": _archived(
            extended(tarfile.XGLTYPE, b"10 path=x\n") + proper,
            "a global header gives all members one name",
            "archive_malformed",
        ),
        "tar: a sparse file": _archived(also(sparse), "'README.md' is a sparse file", "archive_member"),
        "tar: a member of an unknown kind": _archived(
            also(_typed("x", b"V")), "'x' is of an unknown kind", "archive_member"
        ),
        "tar: an absolute path": _archived(
            also("/root/.ssh/x"), "'/root/.ssh/x' is an absolute", "archive_name"
        ),
        "tar: one name twice": _archived(
            make_tar([*members, (f"./{WEIGHTS}", b"")]),
            "'./adapter_model.safetensors' is in the archive twice",
            "archive_duplicate",
        ),
        "tar: a size below zero": _archived(
            negative(), "broken: a member of -512 bytes", "archive_malformed"
        ),
        "tar: a pickle inside": _archived(also("rng_state.pth"), "'rng_state.pth' is a pickle", "pickle"),
        "tar: an archive inside": _archived(
            also("a.tar.gz"), "'a.tar.gz' is an archive within", "archive_nested"
        ),
        "tar: cut within a member": _archived(
            proper[: second + 1000], "broken: unexpected end of data", "archive_malformed"
        ),
        "tar: cut between members": _archived(
            proper[:second], f"after {second} bytes there is neither", "archive_malformed"
        ),
        "tar: a header that is damaged": _archived(
            proper[: second + 5] + b"?" + proper[second + 6 :],
            "there is neither a member nor the end",
            "archive_malformed",
        ),
        "tar: something behind the end": _archived(
            proper + b"more", "bytes there is neither a member", "archive_malformed"
        ),
        "tar.gz: a bomb of 1000 to 1": _archived(
            _bomb(members[0]),
            f"safetensors unpacks to more than {MAX_UPLOAD} bytes (max_upload",
            "archive_too_large",
        ),
        "tar.gz: a bomb in what is left out": _archived(
            gzip.compress(make_tar([("README.md", bytes(MAX_UPLOAD + (66 << 20)))]), 1),
            f"the archive unpacks to more than {MAX_UPLOAD + (64 << 20)} bytes",
            "archive_too_large",
        ),
        "tar.gz: cut": _archived(packed[:-9], "Compressed file ended before", "archive_malformed"),
        "tar.gz: a wrong checksum": _archived(
            packed[:-8] + bytes(4) + packed[-4:], "CRC check failed", "archive_malformed"
        ),
        "tar.gz: noise behind the end": _archived(
            packed + b"noise", "Not a gzipped file", "archive_malformed"
        ),
        "tar.gz: no tar inside": _archived(
            gzip.compress(make.weights), "broken: invalid header", "archive_malformed"
        ),
    }


def _bomb(config: tuple[tarfile.TarInfo | str, bytes]) -> bytes:
    raw = gzip.compress(make_tar([config, (WEIGHTS, bytes(MAX_UPLOAD + (1 << 20)))]), 9)
    assert len(raw) * 900 < MAX_UPLOAD
    return raw
