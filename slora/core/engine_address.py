"""Where an engine listens, and how an API process connects to it: a Unix socket on the same host, or TCP between hosts.

Both carry the same frames. A TCP connection begins with a handshake. Both ends prove that they know the secret of the
cluster, and neither sends the secret:

    engine to API:  challenge (a nonce)
    API to engine:  proof (a nonce, and an HMAC of both nonces)
    engine to API:  proof (another HMAC of both nonces)

The handshake keeps strangers out. It does not encrypt the connection, so the network between the hosts must be private.
Unix sockets need no handshake: only the user of the server can open them.
"""

import asyncio
import hmac
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from slora.core.errors import SloraError
from slora_adapters.process.wire import BrokenFrame, read_message, write_message

_log = logging.getLogger(__name__)

MAX_SECRET_BYTES = 4096
# A stranger can make this process read one frame of this size, for this long.
_MAX_FRAME_BYTES = 256
_LIMIT_S = 5.0
# With more connections in their handshake, the oldest one is closed.
_MAX_PENDING = 64
# A stranger cannot fill the log: refused connections are counted and logged at most this often.
_LOG_PERIOD_S = 10.0
_NONCE_BYTES = 32

_Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class HandshakeFailed(SloraError):
    """The peer does not know the secret, or does not speak this protocol."""


async def prove_to_engine(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, place: str
) -> None:
    """The API's end of the handshake. place: the engine, for messages. Raises HandshakeFailed or ConnectionError."""
    refusal = (
        f"the engine at {place} and this process do not have the same secret: give both the same secret file, and "
        "start them from the same installation"
    )
    try:
        # There is no time limit. An engine that loads its model listens, but does not answer yet.
        challenge = await read_message(reader, _MAX_FRAME_BYTES)
        if challenge is None:
            raise ConnectionResetError("the engine closed the connection before the handshake")
        engine_nonce, own_nonce = _read_bytes(challenge, "nonce"), os.urandom(_NONCE_BYTES)
        proof = _prove(secret, b"api", engine_nonce, own_nonce)
        write_message(writer, {"op": "proof", "nonce": own_nonce, "proof": proof})
        async with asyncio.timeout(_LIMIT_S):
            answer = await read_message(reader, _MAX_FRAME_BYTES)
        expected = _prove(secret, b"engine", engine_nonce, own_nonce)
        if answer is None or not hmac.compare_digest(_read_bytes(answer, "proof"), expected):
            raise HandshakeFailed(refusal)
    except (BrokenFrame, TimeoutError) as error:
        raise HandshakeFailed(refusal) from error


class Doorkeeper:
    """The engine's end of the handshake. serve: called for each connection whose peer knows the secret. limit_s: time
    limit of a handshake.
    """

    def __init__(self, secret: bytes, serve: _Serve, limit_s: float = _LIMIT_S) -> None:
        self._secret = secret
        self._serve = serve
        self._limit_s = limit_s
        # A dict keeps the order of arrival.
        self._pending: dict[asyncio.StreamWriter, None] = {}
        self._num_refused = 0
        self._log_at = 0.0

    async def admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._pending[writer] = None
        if len(self._pending) > _MAX_PENDING:
            next(iter(self._pending)).transport.abort()
        try:
            async with asyncio.timeout(self._limit_s):
                await self._check(reader, writer)
        except (BrokenFrame, HandshakeFailed, TimeoutError, ConnectionError):
            self._note_refusal(writer.get_extra_info("peername"))
            writer.transport.abort()
            return
        finally:
            del self._pending[writer]
        await self._serve(reader, writer)

    async def _check(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        own_nonce = os.urandom(_NONCE_BYTES)
        write_message(writer, {"op": "challenge", "nonce": own_nonce})
        answer = await read_message(reader, _MAX_FRAME_BYTES)
        if answer is None:
            raise ConnectionResetError("the peer closed the connection")
        nonce, proof = _read_bytes(answer, "nonce"), _read_bytes(answer, "proof")
        if not hmac.compare_digest(proof, _prove(self._secret, b"api", own_nonce, nonce)):
            raise HandshakeFailed("the peer has another secret")
        write_message(writer, {"op": "proof", "proof": _prove(self._secret, b"engine", own_nonce, nonce)})

    def _note_refusal(self, peer: object) -> None:
        self._num_refused += 1
        if (now := time.monotonic()) >= self._log_at:
            _log.warning(
                "refused %d connections without the secret of this cluster, the last one from %s",
                self._num_refused,
                peer,
            )
            self._num_refused, self._log_at = 0, now + _LOG_PERIOD_S


def _prove(secret: bytes, role: bytes, engine_nonce: bytes, api_nonce: bytes) -> bytes:
    # Nonces have a fixed length, so no two inputs are equal. The role prevents that a proof is sent back as an answer.
    return hmac.digest(secret, role + engine_nonce + api_nonce, "sha256")


def _read_bytes(message: object, name: str) -> bytes:
    found = message.get(name) if isinstance(message, dict) else None
    if not isinstance(found, bytes) or len(found) != _NONCE_BYTES:
        raise HandshakeFailed(f"the peer sent no {name} of {_NONCE_BYTES} bytes")
    return found


_MAX_FRAME_BUFFER = 1 << 20
_CONNECT_S = 5.0
# A host that loses power or its network sends nothing. The kernel then closes the connection after about 6 seconds:
# probes begin after 2 s without data, and sent data must be acknowledged within 6 s.
_IDLE_S, _PROBE_S, _NUM_PROBES, _ACKNOWLEDGE_MS = 2, 1, 4, 6000


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """An engine on any host. secret: shared by all API processes and engines of the cluster."""

    host: str
    port: int
    secret: bytes = field(repr=False)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


EngineAddress = Path | TcpAddress


async def connect(address: EngineAddress) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Returns a connection to the engine. Raises OSError if no engine listens there, or HandshakeFailed.

    If the engine has not loaded its model yet, this waits until it has.
    """
    if isinstance(address, Path):
        return await asyncio.open_unix_connection(address, limit=_MAX_FRAME_BUFFER)
    async with asyncio.timeout(_CONNECT_S):  # TimeoutError is an OSError.
        reader, writer = await asyncio.open_connection(address.host, address.port, limit=_MAX_FRAME_BUFFER)
    try:
        detect_dead_peer(writer)
        await prove_to_engine(reader, writer, address.secret, str(address))
    except BaseException:
        writer.transport.abort()
        raise
    return reader, writer


def detect_dead_peer(writer: asyncio.StreamWriter) -> None:
    """Makes the kernel close a TCP connection whose other host is gone."""
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, _IDLE_S),
        (socket.TCP_KEEPINTVL, _PROBE_S),
        (socket.TCP_KEEPCNT, _NUM_PROBES),
        (socket.TCP_USER_TIMEOUT, _ACKNOWLEDGE_MS),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
