"""The numbers of the pool's pages, by content."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Numbers of pages by content. They count all pages of the pool that are not free, or the pages of one tenant.

    kv: KV of running sequences. prefixes: cached prefixes, which no sequence uses now.
    adapters: adapters that are in use or being loaded. idle_adapters: adapters that stay cached.
    """

    kv: int = 0
    prefixes: int = 0
    adapters: int = 0
    idle_adapters: int = 0

    @property
    def total(self) -> int:
        return self.kv + self.prefixes + self.adapters + self.idle_adapters

    def __add__(self, other: "PageCounts") -> "PageCounts":
        return PageCounts(
            self.kv + other.kv,
            self.prefixes + other.prefixes,
            self.adapters + other.adapters,
            self.idle_adapters + other.idle_adapters,
        )

    def __sub__(self, other: "PageCounts") -> "PageCounts":
        return PageCounts(
            self.kv - other.kv,
            self.prefixes - other.prefixes,
            self.adapters - other.adapters,
            self.idle_adapters - other.idle_adapters,
        )
