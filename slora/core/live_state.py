"""The engine's current state, for the console. The API reads it, so this module does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from slora.core.page_counts import PageCounts
from slora.core.page_map import PageMap


class Quantiles(NamedTuple):
    """The median and the 99th percentile of recent times in seconds, and the number of these times."""

    p50: float
    p99: float
    num_times: int


@dataclass(frozen=True, slots=True)
class TenantState:
    """The state of one tenant, or of all tenants together.

    running, waiting: numbers of sequences. tokens_per_s: rate of generated tokens in the last seconds.
    first_token: times from the arrival in the engine to the first token; None without recent first tokens.
    interval: times between two tokens; None without recent intervals.
    """

    pages: PageCounts = field(default_factory=PageCounts)
    running: int = 0
    waiting: int = 0
    tokens_per_s: float = 0.0
    first_token: Quantiles | None = None
    interval: Quantiles | None = None


class AdapterWork(NamedTuple):
    """The number of tokens that were computed with an adapter in the last seconds, prompts included.

    A token that uses several adapters counts for each adapter. digest: empty for the base model.
    """

    tenant: str
    digest: str
    num_tokens: int


class PoolEvent(NamedTuple):
    """An event in the pool while the engine is observed.

    number: grows by one with each event. time_s: Unix time.
    kind: "load" or "eviction" of an adapter, "prefix_eviction", or "preemption". digest: the digest of the adapter.
    num_times: number of such events since the last observation.
    """

    number: int
    time_s: float
    kind: str
    tenant: str
    digest: str
    num_times: int


class EngineState(NamedTuple):
    """One of the engines of a server.

    problem: why it gets no new requests; None if it serves. device: None before its first connection.
    live: None while it does not answer.
    """

    name: str
    problem: str | None
    device: str | None
    live: "LiveState | None"


@dataclass(frozen=True, slots=True)
class LiveState:
    """One observation of the engine.

    time_s: Unix time. num_pages: size of the pool. pages: what the pages hold.
    awaiting_adapter: number of sequences whose adapter is being fetched.
    total: all tenants together. tenants: the tenants with the most pages, and the watched tenants.
    adapters: the adapters with the most computed tokens, and adapters of the watched tenants.
    work_tokens: tokens that were computed with any adapter, including adapters that are not listed.
    step: times of recent steps. steps_per_s, tokens_per_step: rates of the last seconds, prompts included.
    events: the most recent events, oldest first.
    engines: the engines of a server, if this is their state together; otherwise empty.
    """

    time_s: float
    num_pages: int
    page_map: PageMap
    pages: PageCounts
    awaiting_adapter: int
    total: TenantState
    tenants: Mapping[str, TenantState]
    adapters: tuple[AdapterWork, ...]
    work_tokens: int
    step: Quantiles | None
    steps_per_s: float
    tokens_per_step: float
    events: tuple[PoolEvent, ...]
    engines: tuple[EngineState, ...] = ()
