"""The handshake of TCP connections between API processes and engines, against peers without the secret."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from slora.client.client import RemoteEngine
from slora.core.engine_address import Doorkeeper, HandshakeFailed, TcpAddress, connect
from slora_adapters.process.wire import encode, read_message, write_message
from tests.support.engine_stack import wait_until

SECRET = b"k" * 64

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    write_message(writer, {"op": "welcome"})
    await read_message(reader)
    writer.close()


@asynccontextmanager
async def listening(serve: Serve, listener: socket.socket | None = None) -> AsyncIterator[int]:
    """Listens, and yields the port. At the end, all connections are closed."""
    handlers: set[asyncio.Task[None] | None] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.add(asyncio.current_task())
        await serve(reader, writer)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    listener = listener or socket.create_server(("127.0.0.1", 0))
    server = await asyncio.start_server(handle, sock=listener)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await asyncio.gather(*(handler for handler in handlers if handler is not None))


def test_a_client_with_another_secret_gets_nothing_and_is_told_why(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with listening(Doorkeeper(SECRET, greet).admit) as port:
            with pytest.raises(
                HandshakeFailed, match=f"the engine at 127.0.0.1:{port} and this process do not have"
            ):
                await connect(TcpAddress("127.0.0.1", port, b"x" * 64))
            await wait_until(lambda: "refused 1 connections without the secret" in caplog.text)

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())


def test_a_client_does_not_trust_an_engine_that_cannot_prove_the_secret() -> None:
    """Neither a wrong proof nor the client's own proof sent back is accepted."""
    heard: list[object] = []

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        write_message(writer, {"op": "challenge", "nonce": b"n" * 32})
        answer = await read_message(reader)
        write_message(writer, {"op": "proof", "proof": answer["proof"]})
        heard.append(await read_message(reader))
        writer.close()

    async def main() -> None:
        async with listening(impostor) as port:
            with pytest.raises(HandshakeFailed, match="do not have the same secret"):
                await connect(TcpAddress("127.0.0.1", port, SECRET))
            await wait_until(lambda: bool(heard))

    asyncio.run(main())
    assert heard == [None]


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100,
        b"\x00\x00\x01\x01",  # a frame of 257 bytes
        b"\xff\xff\xff\xff",
        encode({"op": "proof", "nonce": b"n" * 32}),
        encode({"op": "proof", "nonce": b"n" * 32, "proof": b"p" * 32}),
        encode({"op": "proof", "nonce": 1, "proof": "text"}),
        encode([1, 2]),
        encode({"op": "add", "id": "1"}),
    ],
)
def test_a_stranger_never_reaches_the_engine(sent: bytes) -> None:
    served: list[object] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(writer)

    async def main() -> None:
        async with listening(Doorkeeper(SECRET, serve).admit) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            challenge = await read_message(reader)
            assert challenge.keys() == {"op", "nonce"}
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)
            writer.close()

    asyncio.run(main())
    assert not served


def test_a_stranger_that_says_nothing_is_closed_after_a_while() -> None:
    async def main() -> None:
        async with listening(Doorkeeper(SECRET, greet, limit_s=0.05).admit) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            await read_message(reader)
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)
            writer.close()

    asyncio.run(main())


def test_silent_strangers_do_not_keep_out_a_client_with_the_secret() -> None:
    async def main() -> None:
        async with listening(Doorkeeper(SECRET, greet).admit) as port:
            strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(100)]
            reader, writer = await connect(TcpAddress("127.0.0.1", port, SECRET))
            assert await read_message(reader) == {"op": "welcome"}
            for _, stranger in (*strangers, (reader, writer)):
                stranger.close()

    asyncio.run(main())


def test_a_client_waits_for_an_engine_that_listens_but_has_not_loaded_its_model() -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = TcpAddress("127.0.0.1", listener.getsockname()[1], SECRET)
            connecting = asyncio.create_task(connect(address))
            await asyncio.sleep(0.05)
            assert not connecting.done()
            async with listening(Doorkeeper(SECRET, greet).admit, listener):
                reader, writer = await connecting
                assert await read_message(reader) == {"op": "welcome"}
                writer.close()

    asyncio.run(main())


def test_the_client_explains_a_wrong_secret_once_and_connects_when_it_is_corrected(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slora.client.client._REFUSED_S", 0.01)
    doorkeepers = [Doorkeeper(b"y" * 64, greet)]
    served: list[object] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(writer)
        await read_message(reader)

    async def admit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await doorkeepers[-1].admit(reader, writer)

    async def main() -> None:
        async with listening(admit) as port:
            client = RemoteEngine(TcpAddress("127.0.0.1", port, SECRET))
            running = asyncio.create_task(client.run())
            await wait_until(lambda: "do not have the same secret" in caplog.text)
            await asyncio.sleep(0.1)
            doorkeepers.append(Doorkeeper(SECRET, serve))
            await wait_until(lambda: bool(served))
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(main())
    assert caplog.text.count("do not have the same secret") == 1


def test_the_secret_is_in_no_text_form_of_an_address() -> None:
    address = TcpAddress("::1", 5, SECRET)
    assert str(address) == "[::1]:5" and "kkk" not in repr(address)


def test_a_host_that_vanishes_is_noticed_by_the_kernel() -> None:
    """A test cannot unplug a host, so this one checks what the kernel was told."""

    async def main() -> None:
        async with listening(Doorkeeper(SECRET, greet).admit) as port:
            _, writer = await connect(TcpAddress("127.0.0.1", port, SECRET))
            plug = writer.get_extra_info("socket")
            assert plug.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert plug.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 6000
            writer.close()

    asyncio.run(main())
