import pytest
import torch

from slora.memory import host_memory
from slora.memory.host_memory import HostPages


def test_each_page_keeps_its_bytes_whichever_slab_it_lies_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_SLAB_BYTES", 3 * 256 + 100)
    pages = HostPages(8, 256, is_page_locked=False)
    for number in range(len(pages)):
        pages[number].fill_(number)
    for number in range(len(pages)):
        assert pages[number].tolist() == [number] * 256


def test_memory_is_taken_when_its_first_page_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_SLAB_BYTES", 1000)
    pages = HostPages(1 << 40, 100, is_page_locked=False)
    pages[(1 << 40) - 1].fill_(7)
    assert sum(len(slab) for slab in pages._slabs.values()) == 6  # slabs have ten pages, and 2**40 % 10 == 6


def test_a_page_larger_than_a_slab_has_one_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_SLAB_BYTES", 10)
    pages = HostPages(2, 64, is_page_locked=False)
    pages[0].fill_(1)
    pages[1].fill_(2)
    assert pages[0].dtype == torch.uint8
    assert pages[0].tolist() == [1] * 64 and pages[1].tolist() == [2] * 64


@pytest.mark.parametrize("page", [-1, 5])
def test_a_page_number_out_of_range_is_refused(page: int) -> None:
    with pytest.raises(IndexError, match=f"page {page} does not exist; there are 5"):
        HostPages(5, 16, is_page_locked=False)[page]
