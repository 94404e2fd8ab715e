"""Pages of host memory for the KV of preempted sequences. `SwapSpace` decides which sequence owns a page.

The pages are allocated in slabs. Each slab is allocated when its first page is used. On a CPU, a single allocation
would do, because untouched memory takes no physical memory in Linux. For a GPU the pages are page-locked, and
page-locking takes the physical memory immediately. Locking tens of GiB at start would take seconds, and most of the
memory might never be used. torch also rounds a page-locked size up to a power of two.
"""

import torch
from torch import Tensor

from slora.memory.huge_pages import empty_tensor

__all__ = ["HostPages"]

# A slab is large enough for huge pages, and small enough to be page-locked within one step.
_SLAB_BYTES = 64 << 20


class HostPages:
    """`num_pages` pages of `page_bytes` each.

    is_page_locked: whether the pages are page-locked. A GPU then copies from and to them asynchronously.
    """

    def __init__(self, num_pages: int, page_bytes: int, *, is_page_locked: bool) -> None:
        self._num_pages = num_pages
        self._page_bytes = page_bytes
        self._is_page_locked = is_page_locked
        self._slab_pages = max(1, _SLAB_BYTES // page_bytes)
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
