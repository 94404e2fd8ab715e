"""Writes JSON. A long answer is written in slices, so that several megabytes do not block the event loop.

`PartedResponse` sends an answer of known length in parts. The parts are not joined, so back-pressure applies to each
part.
"""

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import islice
from typing import Any

from fastapi.responses import Response
from starlette.types import Message, Receive, Scope, Send

from slora_api.core.fair_slots import FairSlots

# Events are pure ASCII, because some clients also end a line at U+2028 or U+0085.
encode_ascii = json.JSONEncoder(separators=(",", ":")).encode
_dump = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode

# This many characters are written without yielding to the event loop. Writing them takes 0.2 to 1 ms.
_SLICE_CHARS = 1 << 14
# This many items of a long list are made and written at once. One item takes 50 microseconds if it is a token with its
# 20 most probable alternatives.
_ITEMS = 16


class PartedResponse(Response):
    """A response with a JSON body in parts. It subclasses Response because FastAPI requires it, but uses only the
    header handling of Response.
    """

    media_type = "application/json"

    def __init__(self, parts: Sequence[bytes], headers: Mapping[str, str]) -> None:
        super().__init__(headers={**headers, "content-length": str(sum(map(len, parts)))})
        self.parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start: Message = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        for position, part in enumerate(self.parts):
            more = position < len(self.parts) - 1
            await send({"type": "http.response.body", "body": part, "more_body": more})


@dataclass(frozen=True, slots=True, eq=False)
class LongList:
    """A list whose items are made only when they are written. If the list occurs several times in a value, it is
    written once and its text is reused.
    """

    items: Callable[[], Iterable[Any]]


class Once:
    """A value that several JSON texts contain. It is written once, and its text is reused."""

    __slots__ = ("_texts", "_value")

    def __init__(self, value: Any) -> None:
        self._value = value
        self._texts: list[str] | None = None

    def write(self, write: Callable[[Any], Iterator[str]]) -> Iterator[str]:
        if self._texts is not None:
            yield from self._texts
            return
        texts = []
        for text in write(self._value):
            texts.append(text)
            yield text
        self._texts = texts


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """A value whose JSON is already written, in parts without the outer marks. marks: the outer quotes or brackets."""

    parts: Sequence[str]
    marks: str


def slice_ascii(value: Any) -> Iterator[bytes]:
    """Yields the JSON of `value` in parts, in pure ASCII. Each part is made only when the caller takes it."""
    return _slices(_write(value, {}, encode_ascii))


async def write_json(value: Any, tenant: str, slots: FairSlots) -> list[bytes]:
    """Returns the JSON of `value` in parts. Takes a slot only if the JSON is long."""
    parts: list[bytes] = []
    async with AsyncExitStack() as stack:
        for part in _slices(_write(value, {}, _dump)):
            if len(parts) == 1:
                await stack.enter_async_context(slots.hold(tenant, ends_request=True))
            parts.append(part)
            if len(parts) > 1:
                await asyncio.sleep(0)
    return parts


def _slices(texts: Iterable[str]) -> Iterator[bytes]:
    held: list[str] = []
    num_chars = 0
    for text in texts:
        held.append(text)
        num_chars += len(text)
        if num_chars >= _SLICE_CHARS:
            yield "".join(held).encode()
            held, num_chars = [], 0
    if held:
        yield "".join(held).encode()


def _write(value: Any, written: dict[LongList, list[str]], dump: Callable[[Any], str]) -> Iterator[str]:
    """Yields the JSON of a value in pieces. Splits dicts, lists and strings, because each of them may be long."""
    if isinstance(value, LongList):
        if value not in written:
            written[value] = []
            for text in _write_items(value, dump):
                written[value].append(text)
                yield text
        else:
            yield from written[value]
    elif isinstance(value, Written):
        yield value.marks[0]
        yield from value.parts
        yield value.marks[1]
    elif isinstance(value, Once):
        yield from value.write(lambda inner: _write(inner, written, dump))
    elif isinstance(value, dict):
        for position, (name, item) in enumerate(value.items()):
            yield f"{',' if position else '{'}{dump(name)}:"
            yield from _write(item, written, dump)
        yield "}" if value else "{}"
    elif isinstance(value, list):
        for position, item in enumerate(value):
            yield "," if position else "["
            yield from _write(item, written, dump)
        yield "]" if value else "[]"
    elif isinstance(value, str):
        yield '"'
        for start in range(0, len(value), _SLICE_CHARS):
            yield dump(value[start : start + _SLICE_CHARS])[1:-1]
        yield '"'
    else:
        yield dump(value)


def _write_items(value: LongList, dump: Callable[[Any], str]) -> Iterator[str]:
    items = iter(value.items())
    mark = "["
    while some := list(islice(items, _ITEMS)):
        yield mark + dump(some)[1:-1]
        mark = ","
    yield "]" if mark == "," else "[]"
