"""Pages of the host's memory, for the KV of sequences that gave way. Bytes only: whose they are, `SwapSpace` says.

Taken from the system in slabs, each when one of its pages is first asked for. A CPU would get by with one allocation,
since Linux gives untouched memory no frames. Memory that is pinned for a GPU costs all of its frames at once, though,
much of it for who never swaps; seconds of waiting if it is tens of GiB; and torch rounds it up to a power of two.
"""

import torch
from torch import Tensor

from slora.device.huge_pages import empty_tensor

__all__ = ["HostPages"]

# Long enough for huge pages, short enough to be pinned within one step.
_SLAB_BYTES = 64 << 20


class HostPages:
    """`num_pages` pages of `page_bytes`. is_pinned: for copies from and to a GPU, which then need not wait."""

    def __init__(self, num_pages: int, page_bytes: int, *, is_pinned: bool) -> None:
        self._num_pages = num_pages
        self._page_bytes = page_bytes
        self._is_pinned = is_pinned
        self._slab_pages = max(1, _SLAB_BYTES // page_bytes)
        self._slabs: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return self._num_pages

    def __getitem__(self, page: int) -> Tensor:
        """uint8 [page_bytes], the page itself. Raises IndexError beyond the last one."""
        if not 0 <= page < self._num_pages:
            raise IndexError(f"page {page} of the host; there are {self._num_pages}")
        slab, row = divmod(page, self._slab_pages)
        if slab not in self._slabs:
            self._slabs[slab] = self._take_slab(slab)
        return self._slabs[slab][row]

    def _take_slab(self, slab: int) -> Tensor:
        shape = (min(self._slab_pages, self._num_pages - slab * self._slab_pages), self._page_bytes)
        if self._is_pinned:
            return torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        return empty_tensor(shape, torch.uint8, torch.device("cpu"))
