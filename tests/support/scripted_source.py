"""An AdapterSource whose fetches complete when the test says so. It checks how the engine uses its host copies."""

from collections import Counter
from collections.abc import Collection, Iterable

import numpy as np

from slora_adapters.loader.cached_versions import CacheCounts
from slora_adapters.loader.source import FailureCode, Fetched, FetchFailed
from slora_adapters.peft.packing import PackedAdapter
from slora_adapters.version import AdapterVersion
from slora_kernels.layout import SEGMENT_BYTES, lay_out_adapter, llama_shape

# One row of any linear is one segment, so an adapter of rank r on all seven linears takes 14 r segments.
SHAPE = llama_shape(
    num_layers=1,
    hidden_size=8,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    intermediate_size=8,
    vocab_size=8,
    element_bytes=4,
)
# An adapter of rank r takes r pages of this size.
FULL_PAGE_BYTES = 2 * len(SHAPE.linears) * SEGMENT_BYTES


def make_packed(num_pages: int) -> PackedAdapter:
    layout = lay_out_adapter(SHAPE, [*[num_pages] * len(SHAPE.linears), 0, 0])
    assert layout.num_bytes == num_pages * FULL_PAGE_BYTES
    scales = np.ones(SHAPE.num_modules, np.float32)
    return PackedAdapter(layout, scales, np.zeros(layout.num_bytes, np.uint8))


class ScriptedSource:
    """A source of adapters, given by version and number of pages. It fails at once if the engine misuses a host
    copy.

    A fetch is in flight until it is delivered, not until it is collected. A request in between starts a second fetch,
    and both fetches return the same host copy.
    """

    def __init__(self, num_pages: dict[AdapterVersion, int], capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.paces: dict[str, float] = {}
        self.in_flight: set[AdapterVersion] = set()
        self.discarded: set[AdapterVersion] = set()
        self.num_fetches: Counter[AdapterVersion] = Counter()
        self._num_pages = num_pages
        self._arrived: list[AdapterVersion | FetchFailed] = []
        self._copies: dict[AdapterVersion, PackedAdapter] = {}
        self._pins: Counter[AdapterVersion] = Counter()

    @property
    def num_pinned(self) -> int:
        """The number of fetches whose copies are not yet released."""
        return self._pins.total()

    @property
    def wanted_bytes(self) -> int:
        """Total bytes of the adapters whose copies are in use or being fetched."""
        arrived = {one for one in self._arrived if isinstance(one, AdapterVersion)}
        versions = self.in_flight | arrived | self._copies.keys()
        return sum(self._num_pages[version] * FULL_PAGE_BYTES for version in versions)

    def is_pinned(self, packed: PackedAdapter) -> bool:
        return any(packed is copy for copy in self._copies.values())

    @property
    def cached_versions(self) -> frozenset[AdapterVersion]:
        return frozenset()

    def count_cached(self, most: int, labels: Collection[str]) -> CacheCounts:
        return CacheCounts()

    def request(self, version: AdapterVersion) -> None:
        if version not in self.in_flight:
            self.num_fetches[version] += 1
            self.in_flight.add(version)

    def poll(self) -> list[Fetched | FetchFailed]:
        arrived, self._arrived = self._arrived, []
        return [one if isinstance(one, FetchFailed) else self._pin(one) for one in arrived]

    def release(self, version: AdapterVersion) -> None:
        assert self._pins[version] > 0, f"{version} was released more often than it was fetched"
        self._pins[version] -= 1
        if self._pins[version] == 0:
            del self._copies[version]

    def discard(self, version: AdapterVersion) -> None:
        self.discarded.add(version)

    def purge(self, tenant: str) -> None:
        """Nothing is kept here."""

    def deliver(self, versions: Iterable[AdapterVersion] | None = None) -> None:
        """Completes the fetches of `versions`, or of all versions. A fetch of a deleted adapter fails with
        `not_found`."""
        for version in list(self.in_flight if versions is None else versions):
            if version in self.discarded:
                self.fail(version, "not_found")
                continue
            self.in_flight.remove(version)
            self._arrived.append(version)

    def fail(self, version: AdapterVersion, code: FailureCode) -> None:
        self.in_flight.remove(version)
        self._arrived.append(FetchFailed(version, code, "it could not be fetched"))

    def _pin(self, version: AdapterVersion) -> Fetched:
        self._pins[version] += 1
        packed = self._copies.setdefault(version, make_packed(self._num_pages[version]))
        return Fetched(version, packed)
