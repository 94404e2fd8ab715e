"""The listening socket of a server."""

import socket

from slora.errors import ConfigError

__all__ = ["open_listener"]

# Connections that the kernel keeps until they are accepted.
_BACKLOG = 2048
# What the kernel buffers of an answer that its client does not read. By default it grows to 4 MiB for each connection,
# and the server learns that late that a client does not read. 256 KiB carry 2.5 MB/s over a round trip of 100 ms.
_SEND_BUFFER_BYTES = 256 << 10


def open_listener(host: str, port: int) -> socket.socket:
    """Opens the port, so that a taken port is known before anything is loaded. port: 0 for any free one.

    Raises ConfigError.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port} ({error.strerror}); choose another --port"
        ) from error
    # Connections inherit both options. asyncio would set TCP_NODELAY only on sockets made with IPPROTO_TCP by name.
    # Without it the end of each answer but a connection's first waits for the client's delayed ACK, 40 ms on Linux.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    return listener
