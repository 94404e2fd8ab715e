"""The listening socket of a server."""

import socket

from slora.core.errors import ConfigError

# Connections that may wait in the kernel to be accepted.
_BACKLOG = 2048
# The kernel's send buffer of one connection. By default it grows to 4 MiB. The server notices that a client does not
# read only when this buffer is full. 256 KiB allow 2.5 MB/s over a round trip of 100 ms.
_SEND_BUFFER_BYTES = 256 << 10


def open_listener(host: str, port: int) -> socket.socket:
    """Returns a socket that listens on the port. It is opened before the model is loaded, so that a port in use is
    reported at once. port: 0 selects a free one.

    Raises ConfigError.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        # `::` stands for every interface, also those with IPv4 addresses only.
        is_dual = host == "::" and socket.has_dualstack_ipv6()
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=is_dual)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port} ({error.strerror}); choose another --port"
        ) from error
    # Accepted connections inherit both options. asyncio sets TCP_NODELAY only on sockets created with IPPROTO_TCP
    # explicitly. Without TCP_NODELAY, each answer after the first one on a connection ends late: its last bytes wait
    # for the client's delayed ACK, 40 ms on Linux.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    return listener
