import gc
import mmap

import pytest
import torch

from slora.device.pinned_memory import PinnedMemory
from slora_adapters.loader.host_cache import HostCache


@pytest.fixture
def cache():
    cache = HostCache(4 * mmap.PAGESIZE)
    yield cache
    cache.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to pin for")
def test_memory_that_cannot_be_pinned_is_a_warning_and_works(
    cache: HostCache, caplog: pytest.LogCaptureFixture
) -> None:
    assert not PinnedMemory(cache.memory).is_pinned
    assert "not pinned for the GPU" in caplog.text
    cache.memory[:] = 7
    assert int(cache.memory.sum()) == 7 * len(cache.memory)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_arena_is_pinned_for_as_long_as_somebody_keeps_it(cache: HostCache) -> None:
    arena = torch.from_numpy(cache.memory)
    pinned = PinnedMemory(cache.memory)
    assert pinned.is_pinned and arena.is_pinned()
    arena.fill_(7)
    assert arena.to("cuda", non_blocking=True).sum().item() == 7 * len(arena)
    del pinned
    gc.collect()
    assert not arena.is_pinned()
