"""The pool's bytes: one allocation for KV blocks and adapters alike, and the tables that find adapters in it.

`PagePool` says whose a page is; this module only holds and writes bytes. A KV block and a slice of an adapter are
found the same way, by page id through an int32 table.
"""

import numpy as np
import torch
from torch import Tensor

from slora.residency import Resident
from slora_adapters.packing import PackedAdapter
from slora_kernels.batch import AdapterTables, KVGeometry
from slora_kernels.layout import ModelShape


class PageMemory:
    """pages: uint8 [num_pages, num_layers * page_bytes]. tables: one row for each adapter slot."""

    def __init__(
        self,
        geometry: KVGeometry,
        shape: ModelShape,
        full_page_bytes: int,
        num_pages: int,
        num_slots: int,
        max_adapter_pages: int,
        device: torch.device,
    ) -> None:
        self.geometry = geometry
        self.full_page_bytes = full_page_bytes
        self.device = device
        self.pages = torch.empty((num_pages, full_page_bytes), dtype=torch.uint8, device=device)
        self.tables = _empty_tables(num_slots, shape, max_adapter_pages, device)
        self._generations = np.zeros(num_slots, np.int64)

    def load(self, resident: Resident, packed: PackedAdapter) -> None:
        """Copies a packed adapter into its pages and points its slot's tables at them."""
        page_ids = torch.tensor(resident.pages, dtype=torch.int32)
        self._copy_pages(resident.pages, packed)
        slot = resident.slot
        self.tables.page_table[slot, : len(page_ids)] = page_ids.to(self.device)
        self.tables.groups[slot] = torch.from_numpy(packed.layout.groups).to(self.device)
        self.tables.modules[slot] = torch.from_numpy(packed.layout.modules).to(self.device)
        self.tables.scales[slot] = torch.from_numpy(packed.scales).to(self.device)
        self._generations[slot] = resident.generation

    def copy(self, copies: list[tuple[int, int]]) -> None:
        """Copies whole pages (source, target). All sources are read before any target is written."""
        sources, targets = torch.tensor(copies, dtype=torch.int64).to(self.device).unbind(dim=1)
        self.pages.index_copy_(0, targets, self.pages.index_select(0, sources))

    def holds(self, slot: int, generation: int) -> bool:
        """Whether the slot still has the adapter that the work was planned for."""
        return bool(self._generations[slot] == generation)

    def _copy_pages(self, pages: list[int], packed: PackedAdapter) -> None:
        source = torch.from_numpy(packed.buffer)
        whole, rest = divmod(len(source), self.full_page_bytes)
        body = source[: whole * self.full_page_bytes].view(whole, self.full_page_bytes)
        for page, row in zip(pages, body, strict=False):
            self.pages[page].copy_(row, non_blocking=True)
        if rest:
            self.pages[pages[whole], :rest].copy_(source[whole * self.full_page_bytes :], non_blocking=True)


def _empty_tables(num_slots: int, shape: ModelShape, max_pages: int, device: torch.device) -> AdapterTables:
    def zeros(*sizes: int) -> Tensor:
        return torch.zeros((num_slots, *sizes), dtype=torch.int32, device=device)

    scales = torch.zeros((num_slots, shape.num_modules), dtype=torch.float32, device=device)
    return AdapterTables(zeros(max_pages), zeros(shape.num_sites, 2), zeros(shape.num_modules, 3), scales)
