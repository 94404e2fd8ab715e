"""Makes the frames of the console. A frame shows the part of a snapshot of the engine that one viewer may see.

An operator sees all tenants. A tenant sees its own pages, adapters and requests by name. For all other tenants
together, it sees the number of their pages and their share of the work. A tenant also sees the times of the engine's
steps.
"""

import base64
from array import array
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NotRequired

from typing_extensions import TypedDict

from slora.core.engine_state import EngineState, EngineStats, PageCounts, PageOwner, Quantiles, TenantState
from slora_adapters.version import AdapterVersion

# A frame has at most this many owners, because a cell is one byte. Owners beyond the limit share one number.
_MAX_OWNERS = 250
_OTHER = PageOwner("other", "")
_DIGEST_CHARS = 12


@dataclass(frozen=True, slots=True)
class Names:
    """The known names of adapter versions, and of tenants by id. An unknown name is shown as the digest or the id."""

    adapters: Mapping[AdapterVersion, str]
    tenants: Mapping[str, str]

    def adapter(self, tenant: str, digest: str) -> str:
        return self.adapters.get(AdapterVersion(tenant, digest)) or digest[:_DIGEST_CHARS]

    def tenant(self, tenant: str) -> str:
        return self.tenants.get(tenant, tenant)


class QuantilesObject(TypedDict):
    """The median and the 99th percentile of measured times. p50, p99: in seconds. count: the number of measurements."""

    p50: float
    p99: float
    count: int


class OwnerObject(TypedDict):
    """The content of a page, and its tenant. content: the kind of content. tenant: null for pages of other tenants and
    for public prefixes. adapter: the adapter's name, or the beginning of its digest.
    """

    content: Literal["kv", "prefix", "adapter", "idle_adapter", "other"]
    tenant: str | None
    adapter: NotRequired[str]


class CountsObject(TypedDict):
    """The number of pages for each kind of content. prefixes: cached prefixes. other: pages of other tenants."""

    free: int
    kv: int
    prefixes: int
    adapters: int
    idle_adapters: int
    other: int


class PoolObject(TypedDict):
    """The page pool as a map of cells. stride: cell C shows the page with the number C × stride. cells: one byte for
    each cell, in base64: 0 is a free page, and N is the N-th of `owners`.
    """

    num_pages: int
    stride: int
    cells: str
    owners: list[OwnerObject]
    counts: CountsObject


class LiveTenantObject(TypedDict):
    """The requests and the pages of one tenant. tenant: null for all other tenants together. first_token, interval: as
    in `TrafficObject`.
    """

    tenant: str | None
    kv: int
    prefixes: int
    adapters: int
    idle_adapters: int
    running: int
    waiting: int
    tokens_per_s: float
    first_token: QuantilesObject | None
    interval: QuantilesObject | None


class TrafficObject(TypedDict):
    """The traffic of the viewer's tenant, or of all tenants for an operator. The step statistics cover the whole
    engine.

    tokens_per_s: generated tokens. first_token: times from the arrival in the engine to the first token. interval:
    times between two tokens. awaiting_adapter: sequences whose adapter is being fetched; null for tenants.
    """

    tokens_per_s: float
    running: int
    waiting: int
    awaiting_adapter: int | None
    first_token: QuantilesObject | None
    interval: QuantilesObject | None
    step: QuantilesObject | None
    steps_per_s: float
    tokens_per_step: float


class WorkObject(TypedDict):
    """The work of one adapter. share: fraction of the recently computed tokens. tenant: null for the sum of all tenants
    that are not listed. adapter: null for the base model.
    """

    tenant: str | None
    adapter: str | None
    share: float


class EventObject(TypedDict):
    """An event in the page pool. number: grows with each event until the engine restarts or is no longer watched.
    times: how often the event happened.
    """

    number: int
    time: float
    kind: Literal["load", "eviction", "prefix_eviction", "preemption"]
    tenant: str
    adapter: str | None
    times: int


class EngineObject(TypedDict):
    """One of the engines of the host. Numbers are null while it does not answer.

    detail: why it gets no new requests; null while it serves. device: null before the engine has started once.
    used_pages: pages of its pool that are not free. tokens_per_s: generated tokens.
    """

    name: str
    serving: bool
    detail: str | None
    device: str | None
    num_pages: int | None
    used_pages: int | None
    running: int | None
    waiting: int | None
    tokens_per_s: float | None
    steps_per_s: float | None


class FrameObject(TypedDict):
    """The present state of the engine, as one viewer may see it. time: Unix time. engines: empty for tenants."""

    object: Literal["live.frame"]
    time: float
    pool: PoolObject
    tenants: list[LiveTenantObject]
    traffic: TrafficObject
    adapters: list[WorkObject]
    engines: list[EngineObject]
    events: list[EventObject]


class FrameMaker:
    """Makes the frames of one snapshot with a live state.

    The parts that all viewers need are computed once, because the frames are made on the event loop.
    """

    def __init__(self, stats: EngineStats, names: Names) -> None:
        assert stats.live is not None, "nothing was observed for a console"
        self._stats, self._live = stats, stats.live
        self._names = names
        self._cells = array("H", self._live.page_map.cells)
        # Tenant -> the numbers of its owners, beginning with the owners that have the most cells. The key None has the
        # owners of all tenants.
        self._drawn: defaultdict[str | None, list[int]] = defaultdict(list)
        for number, _ in Counter(self._cells).most_common():
            if number:
                self._drawn[None].append(number)
                self._drawn[self._live.page_map.owners[number - 1].tenant].append(number)

    def make(self, tenant: str | None) -> FrameObject:
        """Makes the frame of one viewer. tenant: the id of the viewer's tenant; None for an operator."""
        live = self._live
        engines = self._stats.engines if tenant is None else ()
        return {
            "object": "live.frame",
            "time": live.time_s,
            "pool": self._draw_pool(tenant),
            "tenants": self._list_tenants(tenant),
            "traffic": self._describe_traffic(tenant),
            "adapters": self._list_work(tenant),
            "engines": [describe_engine(engine) for engine in engines],
            "events": [
                {
                    "number": one.number,
                    "time": one.time_s,
                    "kind": one.kind,  # type: ignore[typeddict-item]
                    "tenant": self._names.tenant(one.tenant),
                    "adapter": self._names.adapter(one.tenant, one.digest) if one.digest else None,
                    "times": one.num_times,
                }
                for one in live.events
                if tenant in (None, one.tenant)
            ],
        }

    def _draw_pool(self, tenant: str | None) -> PoolObject:
        pages, num_pages, drawn = self._stats.pages, self._stats.pages_total, self._live.page_map
        shown = self._drawn.get(tenant, [])[:_MAX_OWNERS]
        owners = [drawn.owners[number - 1] for number in shown]
        table = [0] * (len(drawn.owners) + 1)
        if len(shown) < len(self._drawn[None]):
            owners.append(_OTHER)
            table[1:] = [len(owners)] * len(drawn.owners)
        for position, number in enumerate(shown, start=1):
            table[number] = position
        own = pages if tenant is None else self._state_of(tenant).pages
        return {
            "num_pages": num_pages,
            "stride": drawn.stride,
            "cells": base64.b64encode(bytes(map(table.__getitem__, self._cells))).decode(),
            "owners": [_describe_owner(owner, self._names) for owner in owners],
            "counts": {
                "free": num_pages - pages.total,
                "kv": own.kv,
                "prefixes": own.prefixes,
                "adapters": own.adapters,
                "idle_adapters": own.idle_adapters,
                "other": pages.total - own.total,
            },
        }

    def _list_tenants(self, tenant: str | None) -> list[LiveTenantObject]:
        live = self._live
        listed = [
            _describe_tenant(self._names.tenant(owner), of_owner)
            for owner, of_owner in live.tenants.items()
            if tenant in (None, owner)
        ]
        if tenant is not None:
            return listed
        seen = live.tenants.values()
        rest = TenantState(
            self._stats.pages - sum((one.pages for one in seen), PageCounts()),
            live.total.running - sum(one.running for one in seen),
            live.total.waiting - sum(one.waiting for one in seen),
            max(0.0, live.total.tokens_per_s - sum(one.tokens_per_s for one in seen)),
        )
        if rest.pages.total or rest.running or rest.waiting:
            listed.append(_describe_tenant(None, rest))
        return listed

    def _describe_traffic(self, tenant: str | None) -> TrafficObject:
        live, seen = self._live, self._state_of(tenant)
        return {
            "tokens_per_s": seen.tokens_per_s,
            "running": seen.running,
            "waiting": seen.waiting,
            "awaiting_adapter": self._stats.awaiting_adapter if tenant is None else None,
            "first_token": _quantiles(seen.first_token),
            "interval": _quantiles(seen.interval),
            "step": _quantiles(live.step),
            "steps_per_s": live.steps_per_s,
            "tokens_per_step": live.tokens_per_step,
        }

    def _list_work(self, tenant: str | None) -> list[WorkObject]:
        names, total = self._names, self._live.work_tokens
        seen = [one for one in self._live.adapters if tenant in (None, one.tenant)]
        listed: list[WorkObject] = [
            {
                "tenant": names.tenant(one.tenant),
                "adapter": names.adapter(one.tenant, one.digest) if one.digest else None,
                "share": one.num_tokens / total,
            }
            for one in seen
        ]
        rest = total - sum(one.num_tokens for one in seen)
        if rest:
            listed.append({"tenant": None, "adapter": None, "share": rest / total})
        return listed

    def _state_of(self, tenant: str | None) -> TenantState:
        live = self._live
        return live.total if tenant is None else live.tenants.get(tenant, TenantState())


def _describe_owner(owner: PageOwner, names: Names) -> OwnerObject:
    tenant = names.tenant(owner.tenant) or None
    described: OwnerObject = {"content": owner.content, "tenant": tenant}  # type: ignore[typeddict-item]
    if owner.digest:
        described["adapter"] = names.adapter(owner.tenant, owner.digest)
    return described


def _describe_tenant(name: str | None, state: TenantState) -> LiveTenantObject:
    return {
        "tenant": name,
        "kv": state.pages.kv,
        "prefixes": state.pages.prefixes,
        "adapters": state.pages.adapters,
        "idle_adapters": state.pages.idle_adapters,
        "running": state.running,
        "waiting": state.waiting,
        "tokens_per_s": state.tokens_per_s,
        "first_token": _quantiles(state.first_token),
        "interval": _quantiles(state.interval),
    }


def describe_engine(engine: EngineState) -> EngineObject:
    stats = engine.stats
    live = None if stats is None else stats.live
    return {
        "name": engine.name,
        "serving": engine.problem is None,
        "detail": engine.problem,
        "device": engine.device,
        "num_pages": None if stats is None else stats.pages_total,
        "used_pages": None if stats is None else stats.pages.total,
        "running": None if stats is None else stats.running,
        "waiting": None if stats is None else stats.waiting,
        "tokens_per_s": None if live is None else live.total.tokens_per_s,
        "steps_per_s": None if live is None else live.steps_per_s,
    }


def _quantiles(found: Quantiles | None) -> QuantilesObject | None:
    return None if found is None else {"p50": found.p50, "p99": found.p99, "count": found.num_times}
