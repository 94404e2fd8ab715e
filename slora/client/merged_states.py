"""The statistics and the live state of several engines together, as if one engine had computed all of it.

This module does not import torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, fields, replace
from functools import reduce
from typing import Any

import numpy as np

from slora.core.engine_state import (
    AdapterWork,
    EngineInfo,
    EngineStats,
    LiveState,
    PageMap,
    PageOwner,
    Quantiles,
    TenantPurge,
    TenantState,
)

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
    """Adds the statistics up, as the fields of EngineStats say."""
    if len(stats) == 1:
        return stats[0]
    merges = {field.name: field.metadata.get("merge", _add_all) for field in fields(EngineStats)}
    return EngineStats(
        **{name: merge([getattr(engine, name) for engine in stats]) for name, merge in merges.items()}
    )


def _add_all(values: Sequence[Any]) -> Any:
    return reduce(_add, values)


def _add(first: Any, second: Any) -> Any:
    """Adds maps by their keys, joins tuples, and adds other values."""
    if isinstance(first, Mapping):
        new = {key: _add(first[key], value) if key in first else value for key, value in second.items()}
        return {**first, **new}
    if isinstance(first, tuple):
        return tuple(sorted({*first, *second}))
    return first + second


def merge_purges(purges: Sequence[TenantPurge]) -> TenantPurge:
    return TenantPurge(*map(sum, zip(*map(astuple, purges), strict=True)))


def merge_live_states(states: Sequence[LiveState]) -> LiveState:
    """Draws the pools one after the other. Quantiles are those of the slowest engine."""
    first = states[0]
    if len(states) == 1:
        return first
    tenants: dict[str, TenantState] = {}
    adapters: dict[tuple[str, str], int] = {}
    for state in states:
        for name, tenant in state.tenants.items():
            tenants[name] = _add_tenants(tenants[name], tenant) if name in tenants else tenant
        for owner, digest, num_tokens in state.adapters:
            adapters[owner, digest] = adapters.get((owner, digest), 0) + num_tokens
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
    return max(filter(None, quantiles), key=lambda times: times.p99, default=None)


def _join_maps(maps: Sequence[PageMap]) -> PageMap:
    """Draws the maps one after the other, with as many cells in all as one map has."""
    stride = len(maps) * max(drawn.stride for drawn in maps)
    numbers: dict[PageOwner, int] = {}
    cells = b""
    for drawn in maps:
        owners = [numbers.setdefault(owner, len(numbers) + 1) for owner in drawn.owners]
        table = np.array([0, *owners], np.uint16)
        cells += table[np.frombuffer(drawn.cells, np.uint16)[:: stride // drawn.stride]].tobytes()
    return PageMap(stride, cells, tuple(numbers))
