"""The statistics and the live state of several engines together, as if one engine had computed all of it.

This module does not import torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import reduce
from typing import Any

import numpy as np

from slora.core.engine_state import (
    AdapterWork,
    EngineInfo,
    EngineStats,
    HistogramCounts,
    LiveState,
    PageMap,
    PageOwner,
    Quantiles,
    TenantPurge,
    TenantState,
)
from slora_adapters.loader.cached_versions import CacheCounts

__all__ = ["explain_difference", "merge_infos", "merge_live_states", "merge_purges", "merge_stats"]

# Facts that may differ between the engines of one server. Each engine takes its share of the memory that is free.
_OWN_FACTS = ("num_pages", "device")


def explain_difference(expected: EngineInfo, found: EngineInfo) -> str | None:
    """Returns why an engine with `found` cannot serve beside an engine with `expected`; None if it can."""
    if _device_type(expected) != _device_type(found):
        return f"its device is {found.device}, but that of the other replicas is {expected.device}"
    for field in fields(EngineInfo):
        wanted, value = getattr(expected, field.name), getattr(found, field.name)
        if field.name not in _OWN_FACTS and wanted != value:
            return f"its {field.name} is {value}, but that of the other replicas is {wanted}"
    return None


def _device_type(info: EngineInfo) -> str:
    return info.device.partition(":")[0]


def merge_infos(infos: Sequence[EngineInfo]) -> EngineInfo:
    """Returns the facts on which a request can rely in every engine."""
    return replace(infos[0], num_pages=min(info.num_pages for info in infos))


def merge_stats(stats: Sequence[EngineStats]) -> EngineStats:
    """Adds up gauges and counters. The engines share one host cache and one set of pins.

    The paces and costs are those of the first engine.
    """
    first = stats[0]
    if len(stats) == 1:
        return first
    same = ("load_paces", "costs", "host_cache")
    merged = {
        field.name: reduce(_add, (getattr(one, field.name) for one in stats))
        for field in fields(EngineStats)
        if field.name not in same
    }
    merged["pinned_adapters"] = max(one.pinned_adapters for one in stats)
    merged["pinned_loaded"] = min(one.pinned_loaded for one in stats)
    labels = {label for one in stats for label in one.host_cache.labels}
    cache = max((one.host_cache for one in stats), key=_capacity)
    merged["host_cache"] = replace(cache, labels=tuple(sorted(labels)))
    return replace(first, **merged)


def _capacity(cache: CacheCounts) -> int:
    return cache.capacity_bytes


def _add(first: Any, second: Any) -> Any:
    if isinstance(first, Mapping):
        return {
            **first,
            **{name: _add(first[name], one) if name in first else one for name, one in second.items()},
        }
    if isinstance(first, tuple):
        return tuple(sorted({*first, *second}))
    if isinstance(first, HistogramCounts):
        counts = tuple(map(sum, zip(first.counts, second.counts, strict=True)))
        return HistogramCounts(first.bounds, counts, first.total + second.total)
    return first + second


def merge_purges(purges: Sequence[TenantPurge]) -> TenantPurge:
    return TenantPurge(
        sum(one.num_requests for one in purges),
        sum(one.num_adapters for one in purges),
        sum(one.num_pages for one in purges),
    )


def merge_live_states(states: Sequence[LiveState]) -> LiveState:
    """Draws the pools one after the other. Quantiles are those of the slowest engine."""
    first = states[0]
    if len(states) == 1:
        return first
    tenants: dict[str, TenantState] = {}
    adapters: dict[tuple[str, str], int] = {}
    for state in states:
        for name, one in state.tenants.items():
            tenants[name] = _add_tenants(tenants[name], one) if name in tenants else one
        for tenant, digest, num_tokens in state.adapters:
            adapters[tenant, digest] = adapters.get((tenant, digest), 0) + num_tokens
    steps_per_s = sum(state.steps_per_s for state in states)
    tokens_per_s = sum(state.steps_per_s * state.tokens_per_step for state in states)
    events = sorted(
        # Each engine numbers its own events. The times number the events of all engines in one order.
        (event._replace(number=int(event.time_s * 1e6)) for state in states for event in state.events),
        key=lambda event: event.number,
    )
    return replace(
        first,
        time_s=max(state.time_s for state in states),
        num_pages=sum(state.num_pages for state in states),
        page_map=_join_maps([state.page_map for state in states]),
        pages=reduce(_add, (state.pages for state in states)),
        awaiting_adapter=sum(state.awaiting_adapter for state in states),
        total=reduce(_add_tenants, (state.total for state in states)),
        tenants=tenants,
        adapters=tuple(AdapterWork(*key, count) for key, count in adapters.items()),
        work_tokens=sum(state.work_tokens for state in states),
        step=_slowest([state.step for state in states]),
        steps_per_s=steps_per_s,
        tokens_per_step=tokens_per_s / steps_per_s if steps_per_s else 0.0,
        events=tuple(events),
    )


def _add_tenants(first: TenantState, second: TenantState) -> TenantState:
    return TenantState(
        first.pages + second.pages,
        first.running + second.running,
        first.waiting + second.waiting,
        first.tokens_per_s + second.tokens_per_s,
        _slowest([first.first_token, second.first_token]),
        _slowest([first.interval, second.interval]),
    )


def _slowest(quantiles: Sequence[Quantiles | None]) -> Quantiles | None:
    return max((one for one in quantiles if one is not None), key=lambda one: one.p99, default=None)


def _join_maps(maps: Sequence[PageMap]) -> PageMap:
    """Draws the maps one after the other, with as many cells in all as one map has."""
    stride = len(maps) * max(one.stride for one in maps)
    numbers: dict[PageOwner, int] = {}
    cells = b""
    for one in maps:
        owners = [numbers.setdefault(owner, len(numbers) + 1) for owner in one.owners]
        table = np.array([0, *owners], np.uint16)
        cells += table[np.frombuffer(one.cells, np.uint16)[:: stride // one.stride]].tobytes()
    return PageMap(stride, cells, tuple(numbers))
