"""The limits of HTTP connections, each with its reason."""

from dataclasses import dataclass

from slora_api.fair_slots import reserved_slots

__all__ = ["ConnectionLimits"]


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """max_connections: open at once. max_per_address: of one client address; None keeps a quarter for other addresses.

    idle_s: how long a connection may stay open without a request. It is above the 60 s for which load balancers
    commonly keep an idle connection, so that they close it and not the server.
    head_s: from the first byte of a request to the end of its headers, which are at most 16 KiB.
    write_grace_s, min_read_bytes_per_s: the `Allowance` of a client that takes its answer, spent only while more than
    64 KiB wait for the client or the answer is complete. 16 KiB/s is slower than any link that can carry a stream.
    sweep_s: how often these times are compared with the clock.
    """

    max_connections: int = 4096
    max_per_address: int | None = None
    idle_s: float = 75.0
    head_s: float = 10.0
    write_grace_s: float = 20.0
    min_read_bytes_per_s: float = 16 << 10
    sweep_s: float = 1.0

    @property
    def per_address(self) -> int:
        """The largest number of connections of one address."""
        if self.max_per_address is not None:
            return min(self.max_per_address, self.max_connections)
        return self.max_connections - reserved_slots(self.max_connections)
