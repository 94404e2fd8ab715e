"""The page pool: which pages are free, held or cached, and which tenant owns each. The bytes live in `DeviceMemory`.

A page is in exactly one state:

    free    has no owner; its bytes are undefined
    held    has at least one reference: KV of running sequences, or an adapter that is in use or being loaded
    cached  has no reference but useful bytes (an idle adapter, a prefix block); evicting it makes it free

      allocate          release (last reference)
free ---------> held --------------------------> free
                 |  ^
           cache |  | acquire
                 v  |
                cached --- evict ---> free

The tenant that a page was allocated for owns it until it is freed or transferred, even if other tenants hold references
to it.

The pool also measures how long each page is held. The reading of a page is the time that it was held so far, divided by
the number of its references at each moment. A reference is charged the difference between the readings at its end
and at its start. Worked example: a page that has one reference for 3 s and then two for 4 s has a reading of
3 + 4 / 2 = 5 s.

This module does not depend on torch, adapters or sequences.
"""

from collections import Counter
from collections.abc import Iterable

from slora.memory.tenant_account import TenantAccount


class PagePool:
    """Reference counts of `num_pages` pages.

    The caller makes room before it allocates: running out of pages here is a bug.

    now: the time of the following calls, in seconds on any monotonic clock.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        # A stack: the page freed last is reused first, while its bytes are still in the CPU caches.
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = [0] * num_pages
        # The owner of each page; None for a free page.
        self._owners: list[TenantAccount | None] = [None] * num_pages
        # The tenant that each page was last allocated for. A free page may still have bytes of this tenant.
        self._last_owners: list[TenantAccount | None] = [None] * num_pages
        self._num_cached = 0
        self.now = 0.0
        self._readings = [0.0] * num_pages  # The readings at the times in `_read_at`.
        self._read_at = [0.0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def free_pages(self) -> list[int]:
        return list(self._free)

    @property
    def num_cached(self) -> int:
        return self._num_cached

    @property
    def num_held(self) -> int:
        return self.num_pages - len(self._free) - self._num_cached

    def owner(self, page: int) -> TenantAccount:
        """The tenant that owns a held or cached page."""
        owner = self._owners[page]
        assert owner is not None, f"page {page} is free"
        return owner

    def sample(self, stride: int) -> tuple[list[TenantAccount | None], list[int]]:
        """Returns the owner of every `stride`-th page (None for a free page), and the number of its references."""
        return self._owners[::stride], self._references[::stride]

    def is_shared(self, page: int) -> bool:
        """Whether a held page has more than one reference. A shared page must not be written."""
        return self._references[page] > 1

    def is_cached(self, page: int) -> bool:
        return self._references[page] == 0 and self._owners[page] is not None

    def read(self, pages: Iterable[int]) -> float:
        """The sum of the readings of held pages, in page-seconds."""
        readings, read_at, references, now = self._readings, self._read_at, self._references, self.now
        return sum(readings[page] + (now - read_at[page]) / references[page] for page in pages)

    def allocate(self, count: int, tenant: TenantAccount) -> list[int]:
        """Takes `count` free pages for `tenant`, each with one reference."""
        free = self._free
        assert count <= len(free), (
            f"{count} pages are requested, but only {len(free)} are free: evict pages first"
        )
        if count == 0:
            return []
        pages = free[-count:]
        del free[-count:]
        references, owners, read_at, now = self._references, self._owners, self._read_at, self.now
        last_owners = self._last_owners
        for page in pages:
            references[page] = 1
            owners[page] = last_owners[page] = tenant
            read_at[page] = now
        tenant.num_pages += count
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Adds a reference to each held page."""
        references = self._references
        for page in pages:
            assert references[page], f"page {page} is not held"
            self._update_reading(page)
            references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drops one reference from each held page. A page without references becomes free."""
        references, owners, free = self._references, self._owners, self._free
        for page in pages:
            count = references[page] - 1
            owner = owners[page]
            assert count >= 0 and owner is not None, f"page {page} is not held"
            if count:
                self._update_reading(page)
            references[page] = count
            if count == 0:
                owner.num_pages -= 1
                owners[page] = None
                free.append(page)

    def cache(self, pages: Iterable[int]) -> None:
        """Drops the only reference of each page but keeps its bytes: held becomes cached."""
        references, owners = self._references, self._owners
        for page in pages:
            owner = owners[page]
            assert references[page] == 1 and owner is not None, (
                f"page {page} has {references[page]} references, not 1"
            )
            references[page] = 0
            owner.num_cached += 1
            self._num_cached += 1

    def acquire(self, pages: Iterable[int]) -> None:
        """Gives each cached page one reference: cached becomes held."""
        references, owners = self._references, self._owners
        for page in pages:
            owner = owners[page]
            assert references[page] == 0 and owner is not None, f"page {page} is not cached"
            references[page] = 1
            self._read_at[page] = self.now
            owner.num_cached -= 1
            self._num_cached -= 1

    def transfer(self, page: int, tenant: TenantAccount) -> None:
        """Makes `tenant` the owner of a cached page."""
        owner = self._owners[page]
        assert owner is not None and not self._references[page], f"page {page} is not cached"
        owner.num_pages -= 1
        owner.num_cached -= 1
        tenant.num_pages += 1
        tenant.num_cached += 1
        self._owners[page] = tenant

    def evict(self, pages: Iterable[int]) -> None:
        """Frees cached pages."""
        references, owners, free = self._references, self._owners, self._free
        for page in pages:
            owner = owners[page]
            assert references[page] == 0 and owner is not None, f"page {page} is not cached"
            owners[page] = None
            owner.num_pages -= 1
            owner.num_cached -= 1
            self._num_cached -= 1
            free.append(page)

    def pop_residue(self, tenant: TenantAccount) -> list[int]:
        """Returns the free pages that were last allocated for the tenant. The caller overwrites their bytes."""
        pages = [page for page in self._free if self._last_owners[page] is tenant]
        for page in pages:
            self._last_owners[page] = None
        return pages

    def check_invariants(
        self, held: Iterable[int], cached: Iterable[int], tenants: Iterable[TenantAccount] = ()
    ) -> None:
        """Asserts that every page is accounted for. Raises AssertionError with the first mismatch.

        held: every reference of every user; a page with two references appears twice.
        cached: every page that the residency or the KV cache keeps.
        tenants: further tenants whose page counts are checked; tenants without pages are checked only if listed here.
        """
        expected = [0] * self.num_pages
        for page in held:
            expected[page] += 1
        wrong = [p for p in range(self.num_pages) if expected[p] != self._references[p]]
        assert not wrong, f"pages {wrong[:8]}: the reference counts differ from the owners' references"
        kept = list(cached)
        assert len(set(kept)) == len(kept), "a cached page has two owners"
        assert all(self.is_cached(page) for page in kept), "an owner keeps a page that is not cached"
        assert len(kept) == self._num_cached, (
            f"{self._num_cached} pages are cached, but the owners keep {len(kept)}"
        )
        self._check_free(num_in_use=sum(1 for count in expected if count), num_kept=len(kept))
        self._check_tenants(kept, tenants)

    def _update_reading(self, page: int) -> None:
        """Updates a page's reading to the current time. Called before the number of references changes."""
        self._readings[page] += (self.now - self._read_at[page]) / self._references[page]
        self._read_at[page] = self.now

    def _check_free(self, num_in_use: int, num_kept: int) -> None:
        assert len(set(self._free)) == len(self._free), "a page is twice in the free list"
        assert all(self._owners[page] is None for page in self._free), "a page in the free list is not free"
        total = len(self._free) + num_in_use + num_kept
        assert total == self.num_pages, (
            f"{len(self._free)} free + {num_in_use} held + {num_kept} cached != {self.num_pages}"
        )

    def _check_tenants(self, kept: list[int], tenants: Iterable[TenantAccount]) -> None:
        owned = Counter(owner for owner in self._owners if owner is not None)
        num_cached = Counter(self._owners[page] for page in kept)
        for tenant in {*owned, *tenants}:
            assert (tenant.num_pages, tenant.num_cached) == (owned[tenant], num_cached[tenant]), (
                f"{tenant!r} owns {owned[tenant]} pages, {num_cached[tenant]} of them cached"
            )
