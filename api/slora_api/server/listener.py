"""The socket that a server takes connections from."""

import socket

from slora.errors import ConfigError

__all__ = ["BACKLOG", "open_listener"]

BACKLOG = 2048


def open_listener(host: str, port: int) -> socket.socket:
    """Opens the port now, so that one that is taken is known before anything is loaded. port: 0 for any that is free.

    Raises ConfigError.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port} ({error.strerror}); choose another --port"
        ) from error
    # Connections inherit it. asyncio would set it only if the socket had been made with IPPROTO_TCP by name; without it
    # the end of each answer but a connection's first waits for the client's delayed ACK, which takes 40 ms on Linux.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
