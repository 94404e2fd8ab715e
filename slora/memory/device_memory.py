"""The bytes of the page pool: one allocation for KV blocks and adapters, and the tables that locate adapters in it.

`PagePool` decides which owner has a page; this module only stores and writes bytes. KV blocks and slices of adapters
are both located by page id, through an int32 table.

An adapter may be loaded in slices, one per step, so that a large adapter does not stall other requests. Until its last
slice is loaded, its slot holds no adapter: neither the new one nor the previous one.
"""

from collections.abc import Collection, Iterable, Set
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slora.memory.host_memory import HostPages, empty_tensor
from slora.memory.residency import AdapterLoad
from slora_adapters.peft.packing import ByteArray
from slora_adapters.version import AdapterVersion
from slora_kernels.batch import AdapterTables, KVGeometry, TokenRows
from slora_kernels.host_copies import upload
from slora_kernels.layout import AdapterLayout, ModelShape
from slora_kernels.torch.lora_matmuls import read_rows, write_rows


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """The pages of one adapter in the pool, in order, and where its tensors lie in them."""

    pages: list[int]
    layout: AdapterLayout
    scales: npt.NDArray[np.float32]


class _OwnNorms(NamedTuple):
    """An adapter with norms of its own. views: the tensors that lie in one page, by norm, from their first use on."""

    adapter: LoadedAdapter
    views: dict[int, Tensor]


@dataclass(frozen=True, slots=True)
class AdapterSlice:
    """The bytes of one rank for an `AdapterLoad`. pages: all pages of the adapter. content: uint8 [n]."""

    version: AdapterVersion
    slot: int
    generation: int
    pages: list[int]
    first_page: int
    num_pages: int
    content: ByteArray
    layout: AdapterLayout
    scales: npt.NDArray[np.float32]

    @staticmethod
    def cut(load: AdapterLoad, full_page_bytes: int, rank: int) -> "AdapterSlice":
        resident, packed, end = load.resident, load.packed, load.first_page + load.num_pages
        content = packed.part(rank)[load.first_page * full_page_bytes : end * full_page_bytes]
        return AdapterSlice(
            resident.version,
            resident.slot,
            resident.generation,
            resident.pages,
            load.first_page,
            load.num_pages,
            content,
            packed.layout,
            packed.scales,
        )


class DeviceMemory:
    """The pool's pages and the adapters' tables on one device.

    pages: uint8 [num_pages, num_layers * layer_page_bytes]. tables: one row per adapter slot.
    num_state_pages: number of pages with the recurrent state of a sequence. 0 if the model has none.
    continues_states: whether a chunk of several tokens continues from this state in one call of a layer.
    host_pages: `num_host_pages` pages of the same size in host memory, page-locked if `device` is a GPU.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        shape: ModelShape,
        full_page_bytes: int,
        num_pages: int,
        num_slots: int,
        max_adapter_pages: int,
        device: torch.device,
        num_host_pages: int = 0,
        num_state_pages: int = 0,
        *,
        continues_states: bool = True,
    ) -> None:
        self.num_state_pages = num_state_pages
        self.continues_states = continues_states
        self.geometry = geometry
        self.full_page_bytes = full_page_bytes
        self.device = device
        self.pages = empty_tensor((num_pages, full_page_bytes), torch.uint8, device)
        self.tables = _empty_tables(num_slots, shape, max_adapter_pages, device)
        self.host_pages = HostPages(num_host_pages, full_page_bytes, is_page_locked=device.type == "cuda")
        # The generation of the adapter that a slot holds, which counts the adapters of the slot. Until all of it is
        # loaded, the generation and the number of its pages that are.
        self._complete: dict[int, int] = {}
        self._incomplete: dict[int, tuple[int, int]] = {}
        # Loaded adapters with magnitudes or biases that have no final scales and offsets yet, by slot.
        self._unfinished: dict[int, LoadedAdapter] = {}
        # Loaded adapters with rows of the embedding or of a head, by slot.
        self._with_rows: dict[int, LoadedAdapter] = {}
        # Loaded adapters with norms of their own, by slot.
        self._with_norms: dict[int, _OwnNorms] = {}

    def load(self, load: AdapterLoad) -> None:
        """Copies a slice of rank 0's part of an adapter. See `load_slice`."""
        self.load_slice(AdapterSlice.cut(load, self.full_page_bytes, rank=0))

    def load_slice(self, part: AdapterSlice) -> None:
        """Copies a slice of an adapter into its pages. After the last slice, points the slot's tables at the pages.

        Raises RuntimeError for a slice that does not follow the previous one.
        """
        end = part.first_page + part.num_pages
        self._complete.pop(part.slot, None)
        before = self._incomplete.pop(part.slot, None)
        self._unfinished.pop(part.slot, None)
        self._with_rows.pop(part.slot, None)
        self._with_norms.pop(part.slot, None)
        if part.first_page and before != (part.generation, part.first_page):
            raise RuntimeError(
                f"pages of {part.version} from {part.first_page} on were loaded into slot "
                f"{part.slot}, but the pages before them were not"
            )
        self.write(part.pages[part.first_page : end], torch.from_numpy(part.content))
        is_last = end == len(part.pages)
        if is_last:
            self._write_tables(part)
            loaded, targets = LoadedAdapter(part.pages, part.layout, part.scales), part.layout.targets
            if targets.affine:
                self._unfinished[part.slot] = loaded
            if targets.norms:
                self._with_norms[part.slot] = _OwnNorms(loaded, {})
            if targets.rows:
                self._with_rows[part.slot] = loaded
            self._complete[part.slot] = part.generation
        else:
            self._incomplete[part.slot] = part.generation, end

    def write(self, pages: list[int], content: Tensor) -> None:
        """Copies `content`, uint8 [n] in host memory, into the pages in order. The last page may be filled in part.

        A GPU copies from page-locked memory asynchronously. Call `wait` before the memory of `content` is reused.
        """
        whole, rest = divmod(len(content), self.full_page_bytes)
        body = content[: whole * self.full_page_bytes].view(whole, self.full_page_bytes)
        for page, row in zip(pages, body, strict=False):
            self.pages[page].copy_(row, non_blocking=True)
        if rest:
            self.pages[pages[whole], :rest].copy_(content[whole * self.full_page_bytes :], non_blocking=True)

    def wait(self) -> None:
        """Waits until a GPU has finished all launched work, on all streams."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @torch.inference_mode()
    def zero(self, pages: list[int], host_pages: list[int]) -> None:
        """Overwrites free pages of the pool and of the host with zeros."""
        self.wait()  # Copies from and to these pages may still be running.
        if pages:
            self.pages.index_fill_(0, torch.tensor(pages, device=self.device), 0)
        self.host_pages.zero(host_pages)
        self.wait()

    def copy(self, copies: list[tuple[int, int]]) -> None:
        """Copies whole pages. copies: (source, target). All sources are read before any target is written."""
        sources, targets = upload(np.array(copies, np.int64), self.device).unbind(dim=1)
        self.pages.index_copy_(0, targets, self.pages.index_select(0, sources))

    def swap_out(self, pairs: list[tuple[int, int]]) -> None:
        """Copies pages to the host, each with all of its layers. pairs: (page, host page). On a GPU the copies are
        asynchronous, in stream order.

        Pages are copied one by one, because each page is contiguous. Gathering many pages would need a second buffer.
        """
        for page, host_page in pairs:
            self.host_pages[host_page].copy_(self.pages[page], non_blocking=True)

    def swap_in(self, pairs: list[tuple[int, int]]) -> None:
        """Copies pages back. pairs: (host page, page). See `swap_out`."""
        for host_page, page in pairs:
            self.pages[page].copy_(self.host_pages[host_page], non_blocking=True)

    def holds(self, adapters: Set[tuple[int, int]]) -> bool:
        """Whether slots hold all pages of adapters. adapters: the slot of each, and its generation."""
        return self._complete.items() >= adapters

    def find_rows(self, slot: int, place: int) -> TokenRows | None:
        """Returns the rows of a slot's adapter for the embedding (place 0) or for the head (place 1), or those of its
        head that classifies texts (place 2).
        """
        adapter = self._with_rows.get(slot)
        if adapter is None or not adapter.layout.rows[place, 0]:
            return None
        layout = adapter.layout
        count, first_id, first_row = layout.rows[place].tolist()
        return TokenRows(self.pages, adapter.pages, count, first_id, first_row, layout.num_added)

    def has_norms(self, slot: int) -> bool:
        """Whether the slot's adapter replaces the weight of a norm."""
        return slot in self._with_norms

    def find_norm(self, slot: int, norm_id: int, width: int, *, has_bias: bool = False) -> Tensor | None:
        """Returns the weight of a norm in a slot's adapter, float32 [1, width]; with its bias, [2, width].

        None if the adapter does not replace the norm. norm_id: index in `ModelShape.norms`.
        """
        own = self._with_norms.get(slot)
        if own is None or not own.adapter.layout.norms[norm_id, 0]:
            return None
        if norm_id not in own.views:
            segment, rows = int(own.adapter.layout.norms[norm_id, 1]), 1 + has_bias
            found = read_rows(self.pages, own.adapter.pages, segment, rows, width, torch.float32)
            if found.untyped_storage().data_ptr() != self.pages.untyped_storage().data_ptr():
                return found
            own.views[norm_id] = found
        return own.views[norm_id]

    @property
    def has_unfinished(self) -> bool:
        """Whether a loaded adapter needs `finish`."""
        return bool(self._unfinished)

    def find_unfinished(self, slots: Collection[int]) -> dict[int, LoadedAdapter]:
        """Returns the adapters of these slots that need `finish`, in the order of the slots."""
        return {slot: self._unfinished[slot] for slot in sorted(self._unfinished.keys() & set(slots))}

    def finish(self, slot: int, affine: Iterable[tuple[int, Tensor]]) -> None:
        """Writes the final scales and offsets of an adapter.

        affine: for each module that has them, the first segment, and float32 [2, width]: scales, then offsets.
        """
        for segment, rows in affine:
            write_rows(self.pages, self._unfinished[slot].pages, segment, rows)
        del self._unfinished[slot]

    def _write_tables(self, part: AdapterSlice) -> None:
        page_ids = np.array(part.pages, np.int32)
        self.tables.page_table[part.slot, : len(page_ids)] = upload(page_ids, self.device)
        self.tables.groups[part.slot] = upload(part.layout.groups, self.device)
        self.tables.modules[part.slot] = upload(part.layout.modules, self.device)
        self.tables.scales[part.slot] = upload(part.scales, self.device)
        self.tables.affine[part.slot] = upload(part.layout.affine, self.device)


def _empty_tables(num_slots: int, shape: ModelShape, max_pages: int, device: torch.device) -> AdapterTables:
    def zeros(*sizes: int) -> Tensor:
        return torch.zeros((num_slots, *sizes), dtype=torch.int32, device=device)

    scales = torch.zeros((num_slots, shape.num_modules), dtype=torch.float32, device=device)
    groups, modules, affine = (
        zeros(shape.num_sites, 2),
        zeros(shape.num_modules, 3),
        zeros(shape.num_modules, 4),
    )
    return AdapterTables(zeros(max_pages), groups, modules, scales, affine)
