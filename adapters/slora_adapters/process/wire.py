"""Frames between processes of one installation: four bytes of length, then one msgpack value, over stream sockets and
pipes.

A stream socket detects a dead peer at once, keeps frames in order, loses no frames, and applies back-pressure if the
reader is slow. ZeroMQ would need a router flag, high-water marks and heartbeats for the same guarantees. Both ends
trust each other, except for sandboxes: the limit on frame size protects against bugs. Texts may have lone surrogates.
"""

import asyncio
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Any, Self

import msgpack

from slora_adapters.errors import SloraError

# The largest legitimate frame is 5 MiB: a prompt of a million token ids.
MAX_FRAME_BYTES = 64 << 20
_LENGTH = struct.Struct(">I")
_READ_BYTES = 1 << 16
_row_makers: dict[type, Callable[[Any], object]] = {}


class BrokenFrame(SloraError):
    """The peer sent an invalid frame, or the stream ended inside a frame. The connection must not be used again."""


def encode(message: Any) -> bytes:
    """Returns the frame of a message. Raises BrokenFrame if the message is larger than MAX_FRAME_BYTES.

    Besides the types of msgpack, a message may hold dataclasses, which arrive as lists of their fields, sets, which
    arrive as lists, and exceptions, which arrive as [name of the class, text, attributes].
    """
    body: bytes = msgpack.packb(message, default=_to_row, unicode_errors="surrogatepass")
    _check_length(len(body))
    return _LENGTH.pack(len(body)) + body


def write_message(writer: asyncio.StreamWriter, message: Any) -> None:
    """Queues a frame. To apply back-pressure, the caller must also await `writer.drain()`."""
    writer.write(encode(message))


async def read_message(reader: asyncio.StreamReader, max_bytes: int = MAX_FRAME_BYTES) -> Any:
    """Returns the next message; None if the peer closed the connection between frames. Raises BrokenFrame.

    max_bytes: the largest accepted frame. Give less for a peer that is not trusted yet.
    """
    try:
        header = await reader.readexactly(_LENGTH.size)
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise BrokenFrame("the connection ended inside a frame's length") from error
        return None
    length = _check_length(_LENGTH.unpack(header)[0], max_bytes)
    try:
        return _decode(await reader.readexactly(length))
    except asyncio.IncompleteReadError as error:
        raise BrokenFrame(
            f"the connection ended {length - len(error.partial)} bytes before a frame's end"
        ) from error


class MessageReader:
    """Iterates over the messages of a connection with many small frames, in groups of those that have arrived. This
    takes half the time of `read_message`. Nothing else may read from `reader`.

    The messages of a group are decoded as they are taken. Raises BrokenFrame.
    """

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._received = bytearray()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Iterator[Any]:
        while not (end := self._find_end()):
            part = await self._reader.read(_READ_BYTES)
            if not part:
                if self._received:
                    raise BrokenFrame("the connection ended inside a frame")
                raise StopAsyncIteration
            self._received += part
        frames = bytes(self._received[:end])
        del self._received[:end]
        return _decode_frames(frames)

    def _find_end(self) -> int:
        """Returns where the last whole frame ends; 0 if there is no whole frame."""
        end = 0
        while (body := end + _LENGTH.size) <= len(self._received):
            (length,) = _LENGTH.unpack_from(self._received, end)
            if not end:
                _check_length(length)
            if body + length > len(self._received):
                break
            end = body + length
        return end


def _decode_frames(frames: bytes) -> Iterator[Any]:
    end = 0
    while end < len(frames):
        body = end + _LENGTH.size
        end = body + _LENGTH.unpack_from(frames, end)[0]
        yield _decode(frames[body:end])


def send(connection: socket.socket, message: Any) -> None:
    """Sends a message. Blocks until the kernel has accepted the frame."""
    connection.sendall(encode(message))


def receive(read: Callable[[int], bytes]) -> Any:
    """Waits for the next message and returns it; None if the peer closed the connection between frames. Raises
    BrokenFrame.

    read: returns up to that many bytes, such as `socket.recv` or the `read` of a pipe; nothing at the end.
    """
    header = _receive_exactly(read, _LENGTH.size, "a frame's length", at_start=True)
    if header is None:
        return None
    length = _check_length(_LENGTH.unpack(header)[0])
    body = _receive_exactly(read, length, "a frame")
    return _decode(body or b"")


def _receive_exactly(
    read: Callable[[int], bytes], count: int, what: str, *, at_start: bool = False
) -> bytearray | None:
    received = bytearray()
    while len(received) < count:
        part = read(count - len(received))
        if not part:
            if at_start and not received:
                return None
            raise BrokenFrame(f"the connection ended inside {what}")
        received += part
    return received


def _to_row(value: Any) -> object:
    kind = type(value)
    if kind not in _row_makers:
        _row_makers[kind] = _find_row_maker(kind)
    return _row_makers[kind](value)


def _find_row_maker(kind: type) -> Callable[[Any], object]:
    if is_dataclass(kind):
        names = [field.name for field in fields(kind)]
        if len(names) > 1:
            return attrgetter(*names)
        return lambda value: [getattr(value, name) for name in names]
    if issubclass(kind, set | frozenset):
        return list
    if issubclass(kind, Exception):
        return lambda error: (kind.__name__, str(error), vars(error) if isinstance(error, SloraError) else {})
    raise TypeError(f"a frame cannot hold a {kind.__name__}")


def _check_length(length: int, limit: int = MAX_FRAME_BYTES) -> int:
    if length > limit:
        raise BrokenFrame(f"a frame has {length} bytes; the limit is {limit}")
    return length


def _decode(body: bytes | bytearray) -> Any:
    try:
        return msgpack.unpackb(body, strict_map_key=False, unicode_errors="surrogatepass")
    except (ValueError, msgpack.UnpackException) as error:
        raise BrokenFrame(f"a frame is not msgpack: {error}") from error
