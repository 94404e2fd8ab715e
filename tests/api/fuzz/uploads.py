"""Strategies for uploads: adapter files with faults in their contents, archives, and multipart bodies."""

import gzip
import json
import struct
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from hypothesis.vendor.pretty import RepresentationPrinter

from tests.api.adapters.hostile_uploads import CONFIG, FIELDS, WEIGHTS, make_tar, make_zip
from tests.api.fuzz.json_texts import odd_json

__all__ = ["Upload", "uploads"]

TEMPLATE, GENERATION, TOKENIZER = ("chat_template.jinja", "generation_config.json", "tokenizer_config.json")
_CONFIG_FIELDS = (
    "r", "lora_alpha", "target_modules", "rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern",
    "use_rslora", "bias", "modules_to_save", "peft_type", "exclude_modules", "fan_in_fan_out",
)  # fmt: skip
_GENERATION_FIELDS = (
    "eos_token_id", "temperature", "top_k", "top_p", "max_new_tokens", "repetition_penalty", "stop_strings",
    "do_sample", "min_new_tokens",
)  # fmt: skip
_pieces = st.sampled_from(
    [
        "{% for m in messages %}", "{% endfor %}", "{{ m.content }}", "{{ messages[-1].content }}",
        "{{ 'a' * 1000000 }}", "{{ 10 ** 100000 }}", "{% set a = a ~ a %}", "{{ raise_exception('no') }}",
        "{{ self.__init__.__globals__ }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{% for i in range(10000000) %}{% endfor %}",
        "{{ [1, 2] | map('upper') | list }}", "{% if", "\x00", "é👩‍👩‍👧", "{{ tojson(messages) }}",
        "{{ ''.join(['a'] * 100000) }}", "{{ messages | tojson }}",
    ]
)  # fmt: skip


@dataclass(frozen=True)
class Upload:
    """parts: (field, file name, content). raw: a complete multipart body, used instead of `parts`."""

    parts: tuple[tuple[str, str, bytes], ...] = ()
    raw: bytes | None = None

    def __repr__(self) -> str:
        shown = [(field, content[:300]) for field, _, content in self.parts]
        return f"Upload({shown}, raw={None if self.raw is None else self.raw[:300]!r})"

    def _repr_pretty_(self, printer: RepresentationPrinter, cycle: bool) -> None:
        printer.text(repr(self))


def _damaged(raw: bytes) -> st.SearchStrategy[bytes]:
    """The bytes with one part removed, inserted or changed."""
    return st.builds(
        lambda at, removed, inserted: raw[:at] + inserted + raw[at + removed :],
        st.integers(0, len(raw)),
        st.sampled_from([0, 1, 8, 100, len(raw)]),
        st.sampled_from([b"", b"\x00", b"\xff" * 8, b"PK\x03\x04", b"{", b"9" * 20]),
    )


def _changed(config: dict[str, Any], names: tuple[str, ...]) -> st.SearchStrategy[bytes]:
    changes = st.dictionaries(st.sampled_from([*names, "unknown"]), odd_json, min_size=1, max_size=2)
    written = {name: json.dumps(value) for name, value in config.items()}

    def write(changed: dict[str, str]) -> bytes:
        whole = {**written, **changed}
        return ("{" + ", ".join(f"{json.dumps(name)}: {text}" for name, text in whole.items()) + "}").encode()

    return changes.map(write)


def _weights(raw: bytes) -> st.SearchStrategy[bytes]:
    """The file with another header, or with damage anywhere."""
    size = struct.unpack("<Q", raw[:8])[0]
    header, body = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    name = sorted(key for key in header if key != "__metadata__")[0]
    entry = header[name]

    def write(changed: dict[str, str]) -> bytes:
        fields = {key: json.dumps(value) for key, value in entry.items()} | changed
        text = "{" + ", ".join(f"{json.dumps(key)}: {value}" for key, value in fields.items()) + "}"
        rest = {key: value for key, value in header.items() if key != name}
        whole = json.dumps(rest)[:-1] + f", {json.dumps(name)}: {text}}}"
        return struct.pack("<Q", len(whole.encode())) + whole.encode() + body

    odd = st.dictionaries(
        st.sampled_from(["dtype", "shape", "data_offsets", "more"]), odd_json, min_size=1, max_size=1
    )
    lengths = st.sampled_from([0, 1, 7, 1 << 20, 1 << 63, (1 << 64) - 1])
    return st.one_of(odd.map(write), _damaged(raw), lengths.map(lambda n: struct.pack("<Q", n) + raw[8:]))


def _archives(members: dict[str, bytes]) -> st.SearchStrategy[bytes]:
    tar = make_tar(list(members.items()))
    return st.one_of(*(_damaged(raw) for raw in (make_zip(members), tar, gzip.compress(tar))))


def uploads(config: bytes, weights: bytes) -> st.SearchStrategy[Upload]:
    """config, weights: files of an adapter that is accepted."""
    proper = {CONFIG: config, WEIGHTS: weights}

    def files(**changed: bytes) -> Upload:
        members = proper | {name.replace("_dot_", "."): raw for name, raw in changed.items()}
        return Upload(tuple((FIELDS[name], name, raw) for name, raw in members.items()))

    def with_file(name: str, contents: st.SearchStrategy[bytes]) -> st.SearchStrategy[Upload]:
        return contents.map(lambda raw: files(**{name: raw}))

    templates = st.lists(_pieces, max_size=5).map(lambda pieces: "".join(pieces).encode())
    body = b"".join(
        b'--b\r\nContent-Disposition: form-data; name="%s"; filename="f"\r\n\r\n%s\r\n'
        % (FIELDS[name].encode(), raw)
        for name, raw in proper.items()
    )
    body = b'--b\r\nContent-Disposition: form-data; name="name"\r\n\r\nfuzzed\r\n' + body + b"--b--\r\n"
    return st.one_of(
        _damaged(body).map(lambda raw: Upload(raw=raw)),
        with_file(CONFIG, _changed(json.loads(config), _CONFIG_FIELDS)),
        with_file(WEIGHTS, _weights(weights)),
        with_file(TEMPLATE, templates),
        with_file(GENERATION, _changed({"temperature": 1.0}, _GENERATION_FIELDS)),
        with_file(TOKENIZER, _changed({}, ("chat_template", "added_tokens_decoder", "eos_token"))),
        _archives(proper).map(lambda raw: Upload((("archive", "a.zip", raw),))),
    )
