import asyncio
import socket
import struct
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slora_adapters.process.wire import (
    MAX_FRAME_BYTES,
    BrokenFrame,
    MessageReader,
    encode,
    read_message,
    receive,
    send,
    write_message,
)

# Clients may send lone surrogates, which a sandbox gets.
texts = st.text(st.characters(exclude_categories=()))
messages = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | texts
    | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(texts, inner),
    max_leaves=20,
)


@given(st.lists(messages.filter(lambda message: message is not None), max_size=5))
def test_messages_arrive_in_order_and_then_the_end(sent: list) -> None:
    left, right = socket.socketpair()
    with left, right:
        for message in sent:
            send(left, message)
        left.shutdown(socket.SHUT_WR)
        assert [receive(right.recv) for _ in sent] == sent
        assert receive(right.recv) is None


@given(st.lists(messages, max_size=5), st.lists(st.integers(0, 200), max_size=5), st.booleans())
def test_a_reader_of_many_frames_gets_them_wherever_the_bytes_are_cut(
    sent: list, cuts: list[int], is_torn: bool
) -> None:
    raw = b"".join(map(encode, sent)) + (b"\x00\x00\x00\x09ab" if is_torn else b"")
    ends = sorted({min(cut, len(raw)) for cut in cuts} | {len(raw)})

    async def read() -> list:
        reader, found = asyncio.StreamReader(), []

        async def feed() -> None:
            for start, end in zip([0, *ends], ends, strict=False):
                reader.feed_data(raw[start:end])
                await asyncio.sleep(0)
            reader.feed_eof()

        feeding = asyncio.create_task(feed())
        try:
            async for frames in MessageReader(reader):
                found += frames
        except BrokenFrame:
            assert is_torn
        else:
            assert not is_torn
        await feeding
        return found

    assert asyncio.run(read()) == sent


def test_a_frame_larger_than_any_buffer_arrives_whole() -> None:
    left, right = socket.socketpair()
    with left, right:
        message = {"x": bytes(5 << 20)}
        sender = threading.Thread(target=send, args=(left, message))
        sender.start()
        assert receive(right.recv) == message
        sender.join()


def test_asyncio_streams_speak_the_same_frames() -> None:
    async def talk() -> list:
        left, right = socket.socketpair()
        _, writer = await asyncio.open_unix_connection(sock=left)
        reader, other = await asyncio.open_unix_connection(sock=right)
        write_message(writer, {"a": [1, b"x"]})
        writer.write_eof()
        received = [await read_message(reader), await read_message(reader)]
        for each in (writer, other):
            each.close()
            await each.wait_closed()
        return received

    assert asyncio.run(talk()) == [{"a": [1, b"x"]}, None]


BROKEN = {
    "inside the length": (b"\0\0", "inside a frame's length"),
    "inside the frame": (encode({"a": 1})[:-1], "ended"),
    "over the cap": (struct.pack(">I", MAX_FRAME_BYTES + 1), f"the limit is {MAX_FRAME_BYTES}"),
    "not msgpack": (struct.pack(">I", 1) + b"\xc1", "not msgpack"),
    "two values": (struct.pack(">I", 2) + b"\x01\x02", "not msgpack"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_frame_is_reported_on_both_kinds_of_socket(what: str) -> None:
    raw, message = BROKEN[what]
    left, right = socket.socketpair()
    with right:
        with left:
            left.sendall(raw)
        with pytest.raises(BrokenFrame, match=message):
            receive(right.recv)

    async def read() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(raw)
        reader.feed_eof()
        await read_message(reader)

    with pytest.raises(BrokenFrame, match=message):
        asyncio.run(read())


def test_a_message_over_the_cap_is_refused_before_it_is_sent() -> None:
    with pytest.raises(BrokenFrame, match="the limit is"):
        encode(bytes(MAX_FRAME_BYTES))
