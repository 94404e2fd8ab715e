"""Host memory: large tensors in huge pages of the operating system, pages for preempted KV, and page-locking.

Linux clears memory on first touch, 4 KiB at a time by default. On two cores of a virtual machine, touching 2 GB took
5.5 s in small pages and 1.5 s in huge pages. Reading weights took 1.2 s in small pages and 0.5 s in huge pages.
Decoding reads all weights in each step, and has fewer TLB misses with huge pages.
"""

import ctypes
import logging
import mmap
import os
import sys
from threading import Thread, get_native_id
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from slora_adapters.peft.packing import ByteArray

_log = logging.getLogger(__name__)

_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23  # Linux constants. The second one needs Linux 5.14.
_HUGE_PAGE_BYTES = 2 << 20
# While a part is populated, other threads cannot map memory. A part of this size takes only a few ms.
_PART_BYTES = 4 << 20


def empty_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Like torch.empty, for long-lived tensors. Without support for huge pages it returns an ordinary tensor."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if _is_large(tensor):
        start, num_bytes = _whole_pages(tensor)
        _madvise(ctypes.c_void_p(start), ctypes.c_size_t(num_bytes), _MADV_HUGEPAGE)
    return tensor


def prefault(tensor: Tensor) -> Thread | None:
    """Makes Linux clear the tensor's memory now, on a background thread, instead of at the first write.

    Data that is written meanwhile is not lost. Measured: loading an adapter of 20 MB into an untouched pool took 50 to
    80 ms, which delayed all decoding sequences. Loading it into a prefaulted pool took 2 ms.

    Returns None if the tensor is small or not in CPU memory. A system without support for this is not an error.
    """
    if not _is_large(tensor):
        return None
    thread = Thread(target=_populate, args=(tensor,), name="slora-prefault", daemon=True)
    thread.start()
    return thread


def _populate(tensor: Tensor) -> None:
    # Lowest priority for this thread: it uses only CPU time that requests leave idle.
    os.setpriority(os.PRIO_PROCESS, get_native_id(), 19)
    start, num_bytes = _whole_pages(tensor)
    for done in range(0, num_bytes, _PART_BYTES):
        count = min(_PART_BYTES, num_bytes - done)
        if _madvise(ctypes.c_void_p(start + done), ctypes.c_size_t(count), _MADV_POPULATE_WRITE):
            return


def _is_large(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and sys.platform == "linux" and tensor.nbytes >= 2 * _HUGE_PAGE_BYTES


def _whole_pages(tensor: Tensor) -> tuple[int, int]:
    """Returns the address and the length of the complete operating-system pages within the tensor."""
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    num_bytes = tensor.data_ptr() + tensor.nbytes - start
    return start, num_bytes // mmap.PAGESIZE * mmap.PAGESIZE


_madvise = ctypes.CDLL(None).madvise


# A slab is large enough for huge pages, and small enough to be page-locked within one step.
_SLAB_BYTES = 64 << 20


class HostPages:
    """Pages of host memory for the KV of preempted sequences: `num_pages` pages of `page_bytes` each. `SwapSpace`
    decides which sequence owns a page.

    The pages are allocated in slabs. Each slab is allocated when its first page is used. On a CPU, a single allocation
    would do, because untouched memory takes no physical memory in Linux. For a GPU the pages are page-locked, and
    page-locking takes the physical memory immediately. Locking tens of GiB at start would take seconds, and most of the
    memory might never be used. torch also rounds a page-locked size up to a power of two.

    is_page_locked: whether the pages are page-locked. A GPU then copies from and to them asynchronously.
    """

    def __init__(
        self, num_pages: int, page_bytes: int, *, is_page_locked: bool, slab_bytes: int = _SLAB_BYTES
    ) -> None:
        self._num_pages = num_pages
        self._page_bytes = page_bytes
        self._is_page_locked = is_page_locked
        self._slab_pages = max(1, slab_bytes // page_bytes)
        self._slabs: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return self._num_pages

    def __getitem__(self, page: int) -> Tensor:
        """Returns the page itself, uint8 [page_bytes]. Raises IndexError for a page that does not exist."""
        if not 0 <= page < self._num_pages:
            raise IndexError(f"host page {page} does not exist; there are {self._num_pages} host pages")
        slab, row = divmod(page, self._slab_pages)
        if slab not in self._slabs:
            self._slabs[slab] = self._take_slab(slab)
        return self._slabs[slab][row]

    def zero(self, pages: list[int]) -> None:
        """Overwrites pages with zeros. Skips pages in slabs that were never used."""
        for page in pages:
            if page // self._slab_pages in self._slabs:
                self[page].zero_()

    def _take_slab(self, slab: int) -> Tensor:
        shape = (min(self._slab_pages, self._num_pages - slab * self._slab_pages), self._page_bytes)
        if self._is_page_locked:
            return torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        return empty_tensor(shape, torch.uint8, torch.device("cpu"))


_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for all contexts of the process.


class PageLockedMemory:
    """Page-locks `memory`, which another object owns, for the lifetime of this object. Copies from it to a GPU then run
    in parallel with kernels.

    If the system refuses, a warning is logged and copies are slower.
    """

    def __init__(self, memory: ByteArray) -> None:
        refusal = _lock(memory)
        self.is_page_locked = refusal is None
        if self.is_page_locked:
            finalize(self, _unlock, memory)  # The reference to `memory` keeps it mapped until it is unlocked.
        else:
            _log.warning(
                "the host cache (%d bytes) is not page-locked for the GPU, so loading adapters takes longer: %s",
                memory.nbytes,
                refusal,
            )


def _lock(memory: ByteArray) -> str | None:
    """Page-locks the memory. Returns None, or the reason why it failed."""
    try:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:  # There is no driver, or torch was built without CUDA.
        return str(error)
    result = runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, _PORTABLE)
    return None if result == runtime.cudaError.success else str(result)


def _unlock(memory: ByteArray) -> None:
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    runtime.cudaHostUnregister(memory.ctypes.data)
