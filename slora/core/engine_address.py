"""Where an engine listens, and how an API process connects to it: a Unix socket on the same host, or TCP between hosts.

Both carry the same frames. A TCP connection begins with a handshake.
"""

import asyncio
import socket
from dataclasses import dataclass, field
from pathlib import Path

from slora.core.handshake import prove_to_engine

__all__ = ["EngineAddress", "TcpAddress", "connect", "detect_dead_peer"]

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
