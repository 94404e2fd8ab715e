"""The drawing of the page pool agrees with the counts of its pages."""

from array import array
from collections import Counter

from slora.core.engine_config import KVFootprint, SchedulerConfig
from slora.engine.observer import MAX_CELLS, PageMapper
from slora.memory.unified_paging import UnifiedPaging
from slora_adapters.version import AdapterVersion
from slora_kernels.layout import LoraTargets

TARGETS = LoraTargets(16, 4, embedding=False, head=False, kv=False)


def make_paging(num_pages: int) -> UnifiedPaging:
    config = SchedulerConfig(
        num_pages,
        num_slots=8,
        full_page_bytes=1024,
        footprint=KVFootprint(16),
        max_num_seqs=8,
        max_num_batched_tokens=64,
    )
    return UnifiedPaging(config)


def count_cells(paging: UnifiedPaging, mapper: PageMapper) -> Counter[str]:
    """The number of cells by content and tenant; free cells are left out."""
    drawn = mapper.draw()
    owners = [None, *drawn.owners]
    found = Counter(owners[number] for number in array("H", drawn.cells))
    return Counter({f"{one.content} {one.tenant}": count for one, count in found.items() if one is not None})


def test_each_page_shows_its_content_and_its_tenant() -> None:
    paging = make_paging(100)
    mapper = PageMapper(paging)
    assert count_cells(paging, mapper) == {}
    a, b = paging.tenants.find("a"), paging.tenants.find("b")
    resident = paging.residency.allocate(AdapterVersion("a", "d" * 64), a, 10, 10_000, TARGETS)
    paging.kv.allocate(7, b)
    kept = paging.kv.allocate(3, b)
    paging.kv.allocate(2, paging.tenants.find("b", is_background=True))
    assert count_cells(paging, mapper) == {"adapter a": 10, "kv b": 12}
    for at, page in enumerate(kept):
        paging.kv.insert(page, b"key%d" % at, None, ())
    paging.kv.release(kept)
    paging.residency.advance_load(resident, 10)  # the load was its only user
    assert count_cells(paging, mapper) == {"idle_adapter a": 10, "kv b": 9, "prefix b": 3}
    paging.residency.remove(resident.version)
    assert count_cells(paging, mapper) == {"kv b": 9, "prefix b": 3}


def test_a_large_pool_is_sampled_into_a_bounded_number_of_cells() -> None:
    paging = make_paging(100_000)
    mapper = PageMapper(paging)
    tenant = paging.tenants.find("a")
    paging.residency.allocate(AdapterVersion("a", "d" * 64), tenant, 40_000, 10_000, TARGETS)
    paging.kv.allocate(30_000, tenant)
    cells = count_cells(paging, mapper)
    drawn = mapper.draw()
    assert len(drawn.cells) // 2 == -(-100_000 // drawn.stride) <= MAX_CELLS
    assert cells == {"adapter a": 40_000 // drawn.stride, "kv a": 30_000 // drawn.stride}
