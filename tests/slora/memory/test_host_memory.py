import gc
import mmap
import os
import platform
from pathlib import Path

import pytest
import torch

from slora.memory.host_memory import HostPages, PageLockedMemory, empty_tensor, prefault
from slora_adapters.loader.host_cache import HostCache


def test_each_page_keeps_its_bytes_whichever_slab_it_lies_in() -> None:
    pages = HostPages(8, 256, is_page_locked=False, slab_bytes=3 * 256 + 100)
    for number in range(len(pages)):
        pages[number].fill_(number)
    for number in range(len(pages)):
        assert pages[number].tolist() == [number] * 256


def test_memory_is_taken_when_its_first_page_is_asked_for() -> None:
    pages = HostPages(1 << 40, 100, is_page_locked=False, slab_bytes=1000)
    last = pages[(1 << 40) - 1].fill_(7)
    assert last.untyped_storage().nbytes() == 600  # slabs have ten pages, and 2**40 % 10 == 6


def test_a_page_larger_than_a_slab_has_one_to_itself() -> None:
    pages = HostPages(2, 64, is_page_locked=False, slab_bytes=10)
    pages[0].fill_(1)
    pages[1].fill_(2)
    assert pages[0].dtype == torch.uint8
    assert pages[0].tolist() == [1] * 64 and pages[1].tolist() == [2] * 64


@pytest.mark.parametrize("page", [-1, 5])
def test_a_page_number_out_of_range_is_refused(page: int) -> None:
    with pytest.raises(IndexError, match=f"page {page} does not exist; there are 5"):
        HostPages(5, 16, is_page_locked=False)[page]


CPU = torch.device("cpu")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_prefaulting_maps_all_of_the_memory_and_changes_no_byte() -> None:
    tensor = empty_tensor((96 << 20,), torch.uint8, CPU)
    tensor[5 << 20] = 7
    before = resident_bytes()
    thread = prefault(tensor)
    assert thread is not None
    tensor[50 << 20] = 9  # written while the mapping runs
    thread.join()
    assert tensor[5 << 20] == 7 and tensor[50 << 20] == 9
    major, minor = map(int, platform.release().split(".")[:2])
    # Older kernels do not support this; they clear each page at its first write.
    if (major, minor) >= (5, 14):
        assert resident_bytes() - before > 60 << 20


def test_small_tensors_are_not_prefaulted() -> None:
    assert prefault(torch.empty(1000)) is None


@pytest.fixture
def cache():
    cache = HostCache(4 * mmap.PAGESIZE)
    yield cache
    cache.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to pin for")
def test_memory_that_cannot_be_page_locked_is_a_warning_and_works(
    cache: HostCache, caplog: pytest.LogCaptureFixture
) -> None:
    assert not PageLockedMemory(cache.memory).is_page_locked
    assert "not page-locked for the GPU" in caplog.text
    cache.memory[:] = 7
    assert int(cache.memory.sum()) == 7 * len(cache.memory)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_arena_is_page_locked_as_long_as_its_owner_lives(cache: HostCache) -> None:
    arena = torch.from_numpy(cache.memory)
    pinned = PageLockedMemory(cache.memory)
    assert pinned.is_page_locked and arena.is_pinned()
    arena.fill_(7)
    assert arena.to("cuda", non_blocking=True).sum().item() == 7 * len(arena)
    del pinned
    gc.collect()
    assert not arena.is_pinned()
