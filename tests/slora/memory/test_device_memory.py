"""Copies between pool and host: pages that are swapped out and in, and adapters that are loaded slice by slice."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slora.memory.device_memory import DeviceMemory
from slora.memory.residency import AdapterLoad, Resident
from slora.memory.tenant_account import TenantAccount
from slora.models.model_spec import read_model_spec
from slora_adapters.peft.adapter import AdapterLimits
from slora_adapters.peft.packing import PackedAdapter, pack
from slora_adapters.peft.peft_directory import read_adapter
from slora_adapters.version import AdapterVersion
from slora_kernels.batch import KVGeometry
from slora_kernels.layout import ModelShape
from tests.support.model_kit import Kits

_BLOCK_TOKENS = 16
_NUM_PAGES = 400


@pytest.fixture(scope="module")
def shape(kits: Kits) -> ModelShape:
    return read_model_spec(kits("llama").directory).shape("float32")


@pytest.fixture(scope="module")
def packed(kits: Kits, shape: ModelShape) -> dict[str, PackedAdapter]:
    def read(directory: Path) -> PackedAdapter:
        return pack(read_adapter(directory, shape, AdapterLimits()), shape, "float32")

    return {kind: read(kits("llama").adapters[kind]) for kind in ("odd_rank", "rslora")}


def make_memory(shape: ModelShape, num_pages: int = _NUM_PAGES, num_host_pages: int = 0) -> DeviceMemory:
    geometry = KVGeometry(
        shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.head_dim, _BLOCK_TOKENS, torch.float32
    )
    page_bytes = shape.num_layers * shape.layer_page_bytes(_BLOCK_TOKENS)
    memory = DeviceMemory(
        geometry, shape, page_bytes, num_pages, 4, num_pages, torch.device("cpu"), num_host_pages
    )
    memory.pages.fill_(0xFF)
    return memory


def make_resident(packed: PackedAdapter, memory: DeviceMemory, generation: int = 1) -> Resident:
    """A resident in slot 2, in every second page, in descending order."""
    num_pages = -(-packed.layout.num_bytes // memory.full_page_bytes)
    pages = list(range(2 * num_pages - 1, 0, -2))
    assert 3 <= num_pages == len(pages)
    version, num_bytes = AdapterVersion("tenant", f"digest{generation}"), packed.layout.num_bytes
    return Resident(version, TenantAccount("tenant"), 2, generation, pages, num_bytes, packed.layout.targets)


def slices(resident: Resident, packed: PackedAdapter, length: int) -> list[AdapterLoad]:
    count = len(resident.pages)
    return [
        AdapterLoad(resident, packed, first, min(length, count - first)) for first in range(0, count, length)
    ]


def read_back(memory: DeviceMemory, resident: Resident, num_bytes: int) -> torch.Tensor:
    return memory.pages[resident.pages].flatten()[:num_bytes]


def tables(memory: DeviceMemory) -> list[torch.Tensor]:
    return [memory.tables.page_table, memory.tables.groups, memory.tables.modules, memory.tables.scales]


def test_swapped_pages_come_back_byte_for_byte_wherever_they_go(shape: ModelShape) -> None:
    memory = make_memory(shape, num_pages=12, num_host_pages=9)
    random = torch.Generator().manual_seed(0)
    memory.pages.copy_(torch.randint(0, 256, memory.pages.shape, dtype=torch.uint8, generator=random))
    before = memory.pages.clone()
    memory.swap_out([(3, 8), (11, 0), (4, 5)])
    memory.pages[[3, 11, 4]] = 0xAB  # other sequences use these pages in the meantime
    memory.swap_out([(3, 1)])
    memory.swap_in([(5, 2), (8, 11), (0, 4)])
    expected = before.clone()
    expected[3] = 0xAB
    expected[2], expected[11], expected[4] = before[4], before[3], before[11]
    assert torch.equal(memory.pages, expected)
    assert memory.host_pages[1].tolist() == [0xAB] * memory.full_page_bytes


def test_swapping_nothing_needs_no_host(shape: ModelShape) -> None:
    memory = make_memory(shape, num_pages=2)
    memory.swap_out([])
    memory.swap_in([])
    assert len(memory.host_pages) == 0
    with pytest.raises(IndexError, match="host page 0 does not exist; there are 0"):
        memory.swap_out([(0, 0)])


@settings(max_examples=20, deadline=None)
@given(length=st.integers(1, 60))
def test_loading_an_adapter_in_slices_equals_loading_it_at_once(
    shape: ModelShape, packed: dict[str, PackedAdapter], length: int
) -> None:
    adapter = packed["odd_rank"]
    whole, sliced = make_memory(shape), make_memory(shape)
    resident = make_resident(adapter, whole)
    whole.load(AdapterLoad(resident, adapter, 0, len(resident.pages)))
    for load in slices(resident, adapter, length):
        sliced.load(load)
    assert torch.equal(
        read_back(whole, resident, len(adapter.buffer)), torch.from_numpy(adapter.buffer.copy())
    )
    assert torch.equal(sliced.pages, whole.pages)
    assert all(torch.equal(a, b) for a, b in zip(tables(sliced), tables(whole), strict=True))
    assert sliced.holds({(2, 1)}) and whole.holds({(2, 1)})


def test_a_slot_holds_nothing_until_the_last_slice_is_there(
    shape: ModelShape, packed: dict[str, PackedAdapter]
) -> None:
    memory = make_memory(shape)
    first = make_resident(packed["odd_rank"], memory)
    memory.load(AdapterLoad(first, packed["odd_rank"], 0, len(first.pages)))
    assert memory.holds({(2, 1)}) and not memory.holds({(2, 2)}) and not memory.holds({(1, 1)})
    untouched = [table.clone() for table in tables(memory)]

    second = make_resident(packed["rslora"], memory, generation=2)
    *earlier, last = slices(second, packed["rslora"], 1)
    for load in earlier:
        memory.load(load)
        assert not memory.holds({(2, 2)}), "an adapter counts as loaded before all of it is there"
        assert not memory.holds({(2, 1)}), (
            "the adapter before counts as loaded although its slot was given away"
        )
        assert all(torch.equal(a, b) for a, b in zip(tables(memory), untouched, strict=True))
    memory.load(last)
    assert memory.holds({(2, 2)}) and not memory.holds({(2, 1)})
    assert memory.tables.page_table[2, : len(second.pages)].tolist() == second.pages


def test_a_slot_is_empty_before_its_first_load(shape: ModelShape) -> None:
    assert not make_memory(shape, num_pages=2).holds({(0, 0)})


@pytest.mark.parametrize("missing", ["all", "one", "another's"])
def test_a_slice_out_of_order_is_refused(
    shape: ModelShape, packed: dict[str, PackedAdapter], missing: str
) -> None:
    memory, adapter = make_memory(shape), packed["odd_rank"]
    resident = make_resident(adapter, memory, generation=7)
    loads = slices(resident, adapter, 1)
    if missing == "one":
        memory.load(loads[0])
    if missing == "another's":
        for load in slices(make_resident(adapter, memory, generation=6), adapter, 1)[:-1]:
            memory.load(load)
    with pytest.raises(RuntimeError, match=r"digest7.* were loaded into slot 2, but the pages before them"):
        memory.load(loads[-1])
    assert not memory.holds({(2, 7)})
    for load in loads:  # restarted from the first page
        memory.load(load)
    assert memory.holds({(2, 7)})


def test_a_failed_load_leaves_the_slot_empty(shape: ModelShape, packed: dict[str, PackedAdapter]) -> None:
    memory, adapter = make_memory(shape), packed["odd_rank"]
    first = make_resident(adapter, memory)
    memory.load(AdapterLoad(first, adapter, 0, len(first.pages)))
    second = make_resident(adapter, memory, generation=2)
    second.pages[1] = _NUM_PAGES
    with pytest.raises(IndexError):
        memory.load(AdapterLoad(second, adapter, 0, len(second.pages)))
    assert not memory.holds({(2, 1)}) and not memory.holds({(2, 2)})
