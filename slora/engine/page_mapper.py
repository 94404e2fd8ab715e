"""Draws the page pool.

A large pool is sampled, so that a drawing takes about a millisecond: a cell shows one of every `stride` pages.
"""

from array import array
from collections import defaultdict

from slora.core.page_map import PageMap, PageOwner
from slora.memory.residency import Resident
from slora.memory.tenant_account import TenantAccount
from slora.memory.unified_paging import UnifiedPaging

MAX_CELLS = 4096


class PageMapper:
    """Draws the pages of `paging`. It keeps the cells of resident adapters, because these do not change."""

    def __init__(self, paging: UnifiedPaging) -> None:
        self._paging = paging
        self._stride = -(-paging.pool.num_pages // MAX_CELLS)
        self._cells: dict[Resident, list[int]] = {}

    def draw(self) -> PageMap:
        accounts, references = self._paging.pool.sample(self._stride)
        # A tenant has two accounts, so two numbers may stand for the same owner.
        numbers: defaultdict[tuple[TenantAccount | None, bool], int] = defaultdict(lambda: len(numbers))
        free = numbers[None, False]
        found = [numbers[account, count > 0] for account, count in zip(accounts, references, strict=True)]
        assert free == 0, "number 0 is a free page"
        cells = array("H", found)
        owners = [
            PageOwner("kv" if is_held else "prefix", account.name)
            for account, is_held in numbers
            if account is not None
        ]
        self._cells = {resident: self._find_cells(resident) for resident in self._paging.residency}
        for resident, places in self._cells.items():
            if places:
                content = "adapter" if resident.num_users else "idle_adapter"
                owners.append(PageOwner(content, resident.version.tenant, resident.version.digest))
                for place in places:
                    cells[place] = len(owners)
        return PageMap(self._stride, cells.tobytes(), tuple(owners))

    def _find_cells(self, resident: Resident) -> list[int]:
        known = self._cells.get(resident)
        stride = self._stride
        return [page // stride for page in resident.pages if page % stride == 0] if known is None else known
