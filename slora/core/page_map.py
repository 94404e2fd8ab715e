"""A drawing of the page pool: what each page holds and for which tenant."""

from dataclasses import dataclass
from typing import NamedTuple


class PageOwner(NamedTuple):
    """The content and the owner of a page, as a cell of a map shows them.

    content: "kv", "prefix", "adapter" or "idle_adapter", as in PageCounts.
    tenant: the owner of the page; empty for a public prefix.
    digest: the digest of an adapter; empty for other content.
    """

    content: str
    tenant: str
    digest: str = ""


@dataclass(frozen=True, slots=True)
class PageMap:
    """The cells of a drawing. stride: cell C shows page C * stride. cells: one uint16 for each cell; 0 is a free page,
    N is owners[N - 1].
    """

    stride: int
    cells: bytes
    owners: tuple[PageOwner, ...]
