"""What a router knows: the state of each replica, and the request to place."""

from collections.abc import Set
from dataclasses import dataclass

from slora_adapters.version import AdapterVersion


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """The last report of one replica. It may be stale.

    resident: adapters in the page pool. on_host: adapters in the host cache.
    load: estimated seconds of work of all requests that wait or run on the replica.
    is_serving: False while the replica starts, drains or is lost.
    """

    name: str
    resident: Set[AdapterVersion]
    on_host: Set[AdapterVersion]
    num_waiting: int
    num_running: int
    load: float
    is_serving: bool = True


@dataclass(frozen=True, slots=True)
class RoutedWork:
    """The properties of a request that routing depends on.

    versions: all adapters that the request combines; empty for the base model.
    prefix_key: identifies tenant, adapter and the first block of the prompt. None: no prefix affinity.
    tokens: prompt tokens and the expected number of output tokens.
    """

    tenant: str
    versions: tuple[AdapterVersion, ...]
    prefix_key: bytes | None
    tokens: int
