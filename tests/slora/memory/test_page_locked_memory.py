import gc
import mmap

import pytest
import torch

from slora.memory.host_memory import PageLockedMemory
from slora_adapters.loader.host_cache import HostCache


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
