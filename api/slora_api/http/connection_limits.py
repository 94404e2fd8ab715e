"""The limits of HTTP connections, with their reasons."""

from dataclasses import dataclass

from slora_api.core.fair_slots import reserved_slots


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
