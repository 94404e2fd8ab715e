"""Where a server listens, for the server itself and for the commands and checks that look for it."""

import re
import socket
from collections.abc import Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit

from slora.core.errors import ConfigError

# Kubernetes describes each service of a namespace in variables of its pods. A service named `slora` sets SLORA_PORT.
_LINK_NAME = re.compile(
    r"SLORA_(.*_)?(SERVICE_(HOST|PORT)(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PORT|PROTO|ADDR))?)"
)
_LINK_PORT = re.compile(r"SLORA_(.*_)?PORT")
_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://\S+:\d+")
# An address that stands for all interfaces -> one at which this machine reaches itself.
_SELF = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
# Connections that may wait in the kernel to be accepted.
_BACKLOG = 2048

# The kernel's send buffer of one connection. By default it grows to 4 MiB. The server notices that a client does not
# read only when this buffer is full. 256 KiB allow 2.5 MB/s over a round trip of 100 ms.
_SEND_BUFFER_BYTES = 256 << 10


def own_url(host: str, port: int) -> str:
    """Returns the URL at which this machine reaches a server that listens on `host` and `port`."""
    host = _SELF.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


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


def is_loopback(url: str) -> bool:
    """Whether the URL names this machine, so that no proxy can reach the same server."""
    try:
        host = (urlsplit(url).hostname or "").rstrip(".")
        return host == "localhost" or host.endswith(".localhost") or _is_own(host)
    except ValueError:
        return False


def _is_own(host: str) -> bool:
    address = ip_address(host.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None) or address
    return mapped.is_loopback or mapped.is_unspecified


def without_service_links(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables without those that Kubernetes has set for a service."""
    return {name: value for name, value in environment.items() if not _is_link(name, value)}


def explain_service_links(environment: Mapping[str, str]) -> list[str]:
    """Returns a line if Kubernetes has set a variable that would be a setting."""
    name = "SLORA_PORT"
    value = environment.get(name, "")
    if not _is_link(name, value):
        return []
    return [
        f"{name}={value} is ignored, because it describes a service of Kubernetes; set enableServiceLinks: false in "
        "the pod to get rid of it"
    ]


def _is_link(name: str, value: str) -> bool:
    is_port = _LINK_PORT.fullmatch(name) is not None and _LINK_VALUE.fullmatch(value) is not None
    return is_port or _LINK_NAME.fullmatch(name) is not None
