"""Tracks the open connections of a server and closes idle ones to make room for new ones.

A connection without a request uses a descriptor and serves no client, so it is closed first. A connection is idle until
the whole head of a request has arrived. It is idle again when the answer is complete, or while the server only drops
the rest of the body. So a client without an API key cannot keep a connection busy, and cannot keep other clients out.

If the server is full when a new connection arrives, a batch of idle connections is closed. The batch is taken from the
address with the most connections, longest idle first. An address at its own limit replaces only its own idle
connections. If no connection is idle, the new one is refused.

The limit of an address holds for all API processes of the host. A process closes only its own idle connections, so an
address at its limit may be refused while another process has an idle one.

This module does not depend on sockets or HTTP. It runs on one event loop and needs no lock.

`MinRateTimeout` limits the time for which a peer may keep the server waiting, depending on the bytes that it sends or
receives.
"""

import ipaddress
from collections import Counter
from dataclasses import dataclass
from heapq import nsmallest
from typing import Protocol

from slora_api.core.fair_slots import reserved_slots
from slora_api.core.host_board import HostBoard, Tally
from slora_api.core.rate_limited_log import get_rate_limited_logger

_log = get_rate_limited_logger(__name__)

# A batch closes 1 in 64 connections. Connections are closed in batches, because each search for idle ones visits all
# connections. That takes 5 ms for 4,096 connections.
_BATCHES = 64
# A process waits only if it has at least an eighth more connections than another process. Without this margin,
# processes would wait for one another when many clients connect at once.
_FAIR_MARGIN = 8
# A home network usually has its own /64 prefix of IPv6, so all addresses of a /64 count as one client.
_IPV6_PREFIX = 64


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The limits of one API process.

    max_connections: the maximum number of open connections of the process.
    max_per_address: the maximum number of open connections of one client address to all processes. None: three quarters
    of the connections of all processes together.
    num_processes: API processes of the host.
    idle_s: how long a connection may stay open without a request. Load balancers commonly keep idle connections for 60
    s. The default is longer, so that the load balancer closes the connection first.
    head_s: the time limit from the first byte of a request to the end of its headers.
    write_grace_s, min_read_bytes_per_s: how slowly a client may read its answer (see `MinRateTimeout`). Time counts
    only while more than 64 KiB wait to be sent, or while the rest of a complete answer is sent. The default rate, 16
    KiB/s, is slower than any link that can carry a stream.
    sweep_s: how often these limits are checked.
    """

    max_connections: int = 4096
    max_per_address: int | None = None
    num_processes: int = 1
    idle_s: float = 75.0
    head_s: float = 10.0
    write_grace_s: float = 20.0
    min_read_bytes_per_s: float = 16 << 10
    sweep_s: float = 1.0

    @property
    def per_address(self) -> int:
        """The maximum number of open connections of one client address."""
        num_connections = self.num_processes * self.max_connections
        if self.max_per_address is not None:
            return min(self.max_per_address, num_connections)
        return num_connections - reserved_slots(num_connections)


class Connection(Protocol):
    """One open connection."""

    @property
    def idle_since(self) -> float | None:
        """Monotonic time in seconds at which the connection became idle; None while it has a request."""

    def close_now(self) -> None:
        """Closes the connection without waiting for its client."""

    def sweep(self, now_s: float) -> None:
        """Closes the connection if its client has kept the server waiting for too long."""


class Connections:
    """Counts connections by client address and makes room for new ones. board: None if this process is the only one."""

    def __init__(self, limits: ConnectionLimits, board: HostBoard | None = None) -> None:
        self.limits = limits
        self._board = board
        self._on_host = Tally() if board is None else board.tally("connections")
        self._addresses: dict[Connection, str] = {}
        self._num_of: Counter[str] = Counter()
        # Addresses for which a search found no idle connection; None stands for all addresses. The next sweep clears
        # the set.
        self._without_idle: set[str | None] = set()

    def __len__(self) -> int:
        return len(self._addresses)

    def has_more_than_another(self) -> bool:
        """Whether another API process that is ready has clearly fewer connections."""
        least = None if self._board is None else self._board.least_connections_elsewhere()
        return least is not None and len(self) > least + least // _FAIR_MARGIN

    def make_room(self, host: str) -> str | None:
        """Makes room for a connection from `host`, if necessary by closing idle ones. Returns the reason if the
        connection must be refused, else None.
        """
        address, per_address = _group(host), self.limits.per_address
        num_open = self._on_host.count_of(address)
        if num_open >= per_address and not self.close_idle(address):
            return (
                f"Your address has {num_open} connections to this server, all with "
                f"requests in progress. The limit is {per_address} (max_connections_per_address). "
                "Reuse connections, or close some."
            )
        if len(self) >= self.limits.max_connections and not self.close_idle():
            _log.warning(
                "all %d connections have requests in progress; new connections are refused", len(self)
            )
            return (
                f"All {len(self)} connections of this server have requests in progress (max_connections). Connect "
                "again shortly."
            )
        return None

    def add(self, connection: Connection, host: str) -> None:
        """Counts a connection from `host`."""
        address = _group(host)
        self._addresses[connection] = address
        self._num_of[address] += 1
        self._share(address, 1)

    def discard(self, connection: Connection) -> None:
        """Removes a closed connection. Does nothing if the connection is unknown."""
        address = self._addresses.pop(connection, None)
        if address is not None:
            self._num_of[address] -= 1
            if not self._num_of[address]:
                del self._num_of[address]
            self._share(address, -1)

    def close_idle(self, address: str | None = None) -> int:
        """Closes a batch of idle connections of `address`, or of all addresses. Returns how many it closed."""
        if address in self._without_idle:
            return 0
        count = 1 + (len(self) if address is None else self._num_of[address]) // _BATCHES
        idle = [
            (-self._num_of[own], since, connection)
            for connection, own in self._addresses.items()
            if address in (None, own) and (since := connection.idle_since) is not None
        ]
        chosen = nsmallest(count, idle, key=lambda entry: entry[:2])
        if not chosen:
            self._without_idle.add(address)
        for _, _, connection in chosen:
            self.discard(connection)
            connection.close_now()
        return len(chosen)

    def sweep(self, now_s: float) -> None:
        """Closes connections whose clients have kept the server waiting for too long."""
        self._without_idle.clear()
        for connection in list(self._addresses):
            connection.sweep(now_s)

    def _share(self, address: str, count: int) -> None:
        self._on_host.add(address, count)
        if self._board is not None:
            self._board.set_connections(len(self))


def _group(host: str) -> str:
    """Returns the address or the network whose connections are counted together."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if address.version == 4:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, _IPV6_PREFIX), strict=False))


class MinRateTimeout:
    """A timeout with a minimum rate: `left_s` is the time for which a slow peer may still keep the server waiting.

    `left_s` starts at `grace_s`. Waiting for the peer reduces it. Each byte that moves gives back 1 / `bytes_per_s`
    seconds, but `left_s` never exceeds `grace_s`. Three bounds follow. A peer that stops is disconnected after
    `grace_s`. A peer that is slower than `bytes_per_s` is disconnected somewhat later. N bytes never take more than
    `grace_s + N / bytes_per_s` seconds of waiting.

    Example with 20 s and 128 KiB/s: 512 MiB may take 20 + 4096 s. A client that sends 64 KiB/s is disconnected after 40
    s.
    """

    __slots__ = ("_bytes_per_s", "_grace_s", "left_s")

    def __init__(self, grace_s: float, bytes_per_s: float) -> None:
        self.left_s = grace_s
        self._grace_s = grace_s
        self._bytes_per_s = bytes_per_s

    def charge(self, waited_s: float, num_bytes: int) -> None:
        """Charges a wait of `waited_s` seconds in which `num_bytes` moved."""
        self.left_s = min(self._grace_s, self.left_s - waited_s + num_bytes / self._bytes_per_s)

    def credit(self, seconds: float) -> None:
        """Gives back `seconds` during which the server did not wait for the peer."""
        self.left_s = min(self._grace_s, self.left_s + seconds)
