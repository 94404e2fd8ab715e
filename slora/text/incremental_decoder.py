"""Decodes tokens as they arrive. The joined text equals the text of decoding all tokens at once.

A decoder of the `tokenizers` library is a chain of steps over the strings of all tokens. Here each step is a stage that
reads the strings piece by piece and passes on the part that no later token can change. It passes on one string per
token, in order, even if the string is empty. The cost of a token does not grow with the number of earlier tokens.

Three stages hold text back. `ByteLevel` holds the bytes of an incomplete character. `ByteFallback` holds a run of byte
tokens until another token ends it, because one invalid byte turns every byte of its run into U+FFFD. `BPEDecoder` holds
one token, because it decodes the last token differently.

`tokenizers.decoders.DecodeStream` costs half as much for a token, 1 to 3 us less, but it raises an error or gives
other text for invalid bytes of a tokenizer with byte fallback, its cost grows with the text if the decoder does not
support streaming, and it knows neither the width nor the bytes of a token.
"""

import codecs
import json
import logging
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from functools import lru_cache
from typing import Any, Protocol

from tokenizers import Regex
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import BPEDecoder, Decoder, Metaspace, Replace, Strip, WordPiece

_log = logging.getLogger(__name__)

_REPLACEMENT = "\ufffd"
# The pattern by which `ByteFallback` recognizes a byte token. Rust's hexadecimal parser accepts a plus sign.
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")

Spec = dict[str, Any]


class _Stage(Protocol):
    """A copy of a stage is independent of it."""

    def push(self, pieces: Iterable[str]) -> list[str]:
        """Adds strings and returns the strings that are now certain."""

    def finish(self, *, drop_incomplete: bool) -> list[str]:
        """Returns the strings that were held back. drop_incomplete leaves out an incomplete character at the end."""

    def spell(self, piece: str | bytes, *, is_first: bool) -> str | bytes | None:
        """Returns the string that one token becomes, as the first token of a text or as a later token.

        Returns None if the result depends on further tokens.
        """


class _EachToken:
    """Maps every string independently. The first string may be mapped differently from the others."""

    def __init__(self, first: Callable[[str], str], later: Callable[[str], str]) -> None:
        self._first = first
        self._later = later
        self._is_first = True

    def push(self, pieces: Iterable[str]) -> list[str]:
        mapped = []
        for piece in pieces:
            mapped.append(self._first(piece) if self._is_first else self._later(piece))
            self._is_first = False
        return mapped

    def finish(self, *, drop_incomplete: bool) -> list[str]:
        return []

    def spell(self, piece: str | bytes, *, is_first: bool) -> str | bytes | None:
        if isinstance(piece, bytes):
            return piece
        return self._first(piece) if is_first else self._later(piece)


class _AllButLast:
    """Maps every string independently. The last string is mapped differently, so each string waits for the next one."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._waiting: str | None = None

    def push(self, pieces: Iterable[str]) -> list[str]:
        mapped = []
        for piece in pieces:
            if self._waiting is not None:
                mapped.append(self._decoder.decode([self._waiting, ""]))
            self._waiting = piece
        return mapped

    def finish(self, *, drop_incomplete: bool) -> list[str]:
        return [] if self._waiting is None else [self._decoder.decode([self._waiting])]

    def spell(self, piece: str | bytes, *, is_first: bool) -> None:
        return None


class _ByteRuns:
    """`ByteFallback`: a run of byte tokens becomes its UTF-8 text, or one U+FFFD per byte if it is invalid."""

    def __init__(self, run: bytes | bytearray = b"") -> None:
        self._run = bytearray(run)

    def push(self, pieces: Iterable[str]) -> list[str]:
        certain = []
        for piece in pieces:
            match = _BYTE_TOKEN.fullmatch(piece)
            if match is not None:
                self._run.append(int(match[1], 16))
                continue
            certain += [*_decode_run(self._run), piece]
            self._run.clear()
        return certain

    def finish(self, *, drop_incomplete: bool) -> list[str]:
        return list(_decode_run(_complete(self._run) if drop_incomplete else self._run))

    def __copy__(self) -> "_ByteRuns":
        return _ByteRuns(self._run)

    def spell(self, piece: str | bytes, *, is_first: bool) -> str | bytes:
        match = _BYTE_TOKEN.fullmatch(piece) if isinstance(piece, str) else None
        return piece if match is None else bytes([int(match[1], 16)])


class _ByteLevel:
    """`ByteLevel`: each character of a token is one byte, and all bytes together are UTF-8 text."""

    def __init__(self) -> None:
        self._incomplete = b""

    def push(self, pieces: Iterable[str]) -> list[str]:
        texts = []
        for piece in pieces:
            raw = self._incomplete + _bytes_of(piece)
            text, length = codecs.utf_8_decode(raw, "replace", False)
            self._incomplete = raw[length:]
            texts.append(text)
        return texts

    def finish(self, *, drop_incomplete: bool) -> list[str]:
        return [] if drop_incomplete else [self._incomplete.decode("utf-8", "replace")]

    def spell(self, piece: str | bytes, *, is_first: bool) -> bytes:
        return _bytes_of(piece) if isinstance(piece, str) else piece


class _StripStart:
    """`Strip` after a step that joins all strings: removes up to `count` times `char` from the start of the text."""

    def __init__(self, char: str, count: int) -> None:
        self._char = char
        self._count = count

    def push(self, pieces: Iterable[str]) -> list[str]:
        return [self._strip(piece) if self._count else piece for piece in pieces]

    def finish(self, *, drop_incomplete: bool) -> list[str]:
        return []

    def _strip(self, text: str) -> str:
        num_leading = len(text) - len(text.lstrip(self._char))
        num_removed = min(num_leading, self._count)
        self._count = 0 if num_leading < len(text) else self._count - num_removed
        return text[num_removed:]

    def spell(self, piece: str | bytes, *, is_first: bool) -> str | bytes | None:
        if self._count > 1:  # How much is removed from a token depends on the tokens before it.
            return None
        char = self._char if isinstance(piece, str) else self._char.encode()
        return piece.removeprefix(char) if is_first else piece  # type: ignore[arg-type]


class _WholeText:
    """Replaces the stages of a decoder that does not support streaming: collects all tokens, then decodes them."""

    def __init__(self, decoder: Decoder, pieces: Iterable[str] = ()) -> None:
        self._decoder = decoder
        self._pieces = list(pieces)

    def push(self, pieces: Iterable[str]) -> list[str]:
        self._pieces.extend(pieces)
        return []

    def finish(self, *, drop_incomplete: bool) -> list[str]:
        if not self._pieces:
            return []
        return [*[""] * (len(self._pieces) - 1), self._decoder.decode(self._pieces)]

    def __copy__(self) -> "_WholeText":
        return _WholeText(self._decoder, self._pieces)

    def spell(self, piece: str | bytes, *, is_first: bool) -> None:
        return None


class DecoderChain:
    """The stages of one tokenizer's decoder, in their initial state. special: the strings of its special tokens."""

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder().values()
        self.special = frozenset(token.content for token in added if token.special)
        self._stages = _make_stages(tokenizer.decoder)

    def start(
        self, *, skip_special_tokens: bool = True, shown: frozenset[str] = frozenset()
    ) -> "IncrementalDecoder":
        """Returns a decoder for a new text. shown: special tokens that are not skipped."""
        stages = list(map(copy, self._stages))
        skipped = self.special if skip_special_tokens else frozenset()
        return IncrementalDecoder(self, stages, skipped - shown if shown else skipped)

    def read_pieces(self, token_ids: Sequence[int], skipped: frozenset[str]) -> list[str]:
        """The strings of the tokens. Skipped tokens and ids outside the vocabulary are left out."""
        pieces = map(self._tokenizer.id_to_token, token_ids)
        return [piece for piece in pieces if piece is not None and piece not in skipped]

    def spell(self, token_id: int, *, is_first: bool) -> bytes | None:
        """Returns the bytes that a token adds to a text, as its first token or a later token; b"" for a special token.

        Returns None if the bytes depend on further tokens.
        """
        spelled: str | bytes | None = "".join(self.read_pieces([token_id], self.special))
        for stage in self._stages if spelled else ():
            if spelled is not None:
                spelled = stage.spell(spelled, is_first=is_first)
        return spelled.encode() if isinstance(spelled, str) else spelled


class IncrementalDecoder:
    """Decodes one text.

    The joined results of `push` and the final `finish` equal the result of decoding all tokens at once, without the
    skipped tokens.
    """

    def __init__(self, chain: DecoderChain, stages: list[_Stage], skipped: frozenset[str]) -> None:
        self._chain = chain
        self._stages = stages
        self._skipped = skipped

    def push(self, token_ids: Sequence[int]) -> str:
        """Adds tokens and returns the text that is now certain."""
        pieces = self._chain.read_pieces(token_ids, self._skipped)
        for stage in self._stages:
            pieces = stage.push(pieces)
        return "".join(pieces)

    def read_pieces(self, token_ids: Sequence[int]) -> list[str]:
        """The strings of the tokens that belong to the text."""
        return self._chain.read_pieces(token_ids, self._skipped)

    def push_pieces(self, pieces: list[str]) -> list[str]:
        """Like `push`, for the strings of `read_pieces`.

        Returns one string for each token whose text is now certain, in order.
        """
        for stage in self._stages:
            pieces = stage.push(pieces)
        return pieces

    def finish(self) -> str:
        """Called after the last token. Returns the text that was held back."""
        return "".join(self.finish_pieces())

    def finish_pieces(self) -> list[str]:
        """Like `finish`, but returns one string per token that was held back.

        The last string may hold an incomplete character.
        """
        return _finish(self._stages, drop_incomplete=False)

    def count_complete(self) -> int:
        """Number of characters that are held back although all of their bytes have arrived."""
        return sum(map(len, _finish(list(map(copy, self._stages)), drop_incomplete=True)))


class TokenWidths:
    """Divides one text among its tokens: the number of characters of each token, in order, as soon as it is certain.

    A token that the text leaves out has no characters. If several tokens form one character, the last of them gets it.
    """

    def __init__(self, decoder: IncrementalDecoder) -> None:
        self._decoder = decoder
        self._is_visible: deque[bool] = deque()

    def push(self, token_ids: Sequence[int]) -> list[int]:
        """Adds tokens and returns the widths that are now certain. They may belong to tokens of earlier calls."""
        pieces = []
        for token_id in token_ids:
            own = self._decoder.read_pieces([token_id])
            self._is_visible.append(bool(own))
            pieces += own
        return self._take(self._decoder.push_pieces(pieces))

    def finish(self) -> list[int]:
        """Returns the widths of the remaining tokens. An incomplete character at the end belongs to no token."""
        return self._take(self._decoder.finish_pieces())

    def _take(self, pieces: Iterable[str]) -> list[int]:
        widths, certain = [], deque(pieces)
        while self._is_visible and (certain or not self._is_visible[0]):
            widths.append(len(certain.popleft()) if self._is_visible.popleft() else 0)
        return widths


def _finish(stages: list[_Stage], *, drop_incomplete: bool) -> list[str]:
    pieces: list[str] = []
    for stage in stages:
        pieces = stage.push(pieces) + stage.finish(drop_incomplete=drop_incomplete)
    return pieces


def _make_stages(decoder: Decoder | None) -> list[_Stage]:
    if decoder is None:  # Without a decoder, the library puts a space between any two tokens.
        return [_EachToken(str, lambda piece: f" {piece}")]
    stages: list[_Stage] = []
    is_one_string = False
    for spec in _flatten(json.loads(decoder.__getstate__())):
        kind = spec["type"]
        if kind == "Fuse":
            is_one_string = True
            continue
        if kind == "ByteLevel" and not is_one_string:
            is_one_string = True
            stages.append(_ByteLevel())
            continue
        stage = _follow_one_string(spec) if is_one_string else _follow_tokens(spec)
        if stage is None:
            _log.warning(
                "the decoder step %s of the tokenizer does not support streaming, so a stream gets "
                "its whole text at the end",
                kind,
            )
            return [_WholeText(decoder)]
        stages.append(stage)
    return stages


def _flatten(spec: Spec) -> Iterable[Spec]:
    if spec["type"] != "Sequence":
        return [spec]
    return [step for part in spec["decoders"] for step in _flatten(part)]


def _follow_one_string(spec: Spec) -> _Stage | None:
    if spec["type"] == "Strip" and spec["stop"] == 0:
        return _StripStart(spec["content"], spec["start"])
    return None


def _follow_tokens(spec: Spec) -> _Stage | None:
    match spec["type"]:
        case "ByteFallback":
            return _ByteRuns()
        case "Replace":
            return _by_token(Replace(_pattern(spec["pattern"]), spec["content"]))
        case "Strip":
            return _by_token(Strip(spec["content"], spec["start"], spec["stop"]))
        case "Metaspace":
            return _by_token(Metaspace(spec["replacement"], spec["prepend_scheme"]))
        case "WordPiece":
            return _by_token(WordPiece(spec["prefix"], spec["cleanup"]))
        case "BPEDecoder":
            return _AllButLast(BPEDecoder(spec["suffix"]))
        case _:
            return None


def _pattern(spec: Spec) -> str | Regex:
    return Regex(spec["Regex"]) if "Regex" in spec else str(spec["String"])


def _by_token(decoder: Decoder) -> _EachToken:
    """Wraps a decoder step of the library that maps each token by itself, and the first token differently."""
    return _EachToken(lambda piece: decoder.decode([piece]), lambda piece: decoder.decode(["", piece]))


def _decode_run(run: bytes | bytearray) -> Iterator[str]:
    """Yields the text of each byte. The last byte of a character yields the character, the others an empty string."""
    try:
        text = run.decode("utf-8")
    except UnicodeDecodeError:
        yield from _REPLACEMENT * len(run)
        return
    for char in text:
        yield from [""] * (len(char.encode()) - 1)
        yield char


def _complete(run: bytes | bytearray) -> bytes | bytearray:
    """Returns the run without the incomplete character at its end, if any."""
    _, length = codecs.utf_8_decode(run, "replace", False)
    return run[:length]


def _make_byte_table() -> dict[str, int]:
    """GPT-2's byte table. Printable bytes map to their Latin-1 character, other bytes to U+0100, U+0101 and so on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _make_byte_table()


# Most tokens of texts are among a few thousand.
@lru_cache(1 << 14)
def _bytes_of(piece: str) -> bytes:
    """The bytes of a token. A token with a character outside the byte table, such as an added token, is plain text."""
    try:
        return bytes([_BYTE_OF[char] for char in piece])
    except KeyError:
        return piece.encode()
