"""The adapters of a simulation, which have sizes but no weights. Each adapter is made at its first use."""

from functools import cache

import numpy as np

from bench.simulation.machine import Machine
from slora_adapters.peft.packing import PackedAdapter
from slora_adapters.version import AdapterVersion


class AdapterFleet:
    """Makes the adapters of a simulation. Adapter i has rank `ranks[i % len(ranks)]`.

    It belongs to tenant `i % num_tenants`. If num_tenants is None, each adapter has a tenant of its own.
    """

    def __init__(self, machine: Machine, ranks: tuple[int, ...], num_tenants: int | None = None) -> None:
        self._ranks = ranks
        self._num_tenants = num_tenants
        self._ranks_of: dict[AdapterVersion, int] = {}
        self._pack = cache(lambda rank: _weightless(machine, rank))
        self.version = cache(self._make_version)

    def packed(self, version: AdapterVersion) -> PackedAdapter:
        return self._pack(self._ranks_of[version])

    def num_bytes(self, version: AdapterVersion) -> int:
        return self.packed(version).layout.num_bytes

    def _make_version(self, index: int) -> AdapterVersion:
        tenant = index if self._num_tenants is None else index % self._num_tenants
        version = AdapterVersion(f"tenant-{tenant}", f"{index:064x}")
        self._ranks_of[version] = self._ranks[index % len(self._ranks)]
        return version


def _weightless(machine: Machine, rank: int) -> PackedAdapter:
    """Returns a packed adapter without bytes. A scheduler reads only its layout."""
    layout = machine.adapter_layout(rank)
    return PackedAdapter(layout, np.zeros(0, np.float32), np.zeros(0, np.uint8))
