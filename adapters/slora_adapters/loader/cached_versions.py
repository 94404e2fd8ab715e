"""Tracks the content of a loader process's host cache, from the messages that the loader sends to an engine."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from slora_adapters.version import AdapterVersion


@dataclass(frozen=True, slots=True)
class CacheCounts:
    """A summary of the content of a host cache. Sizes are in bytes."""

    num_adapters: int = 0
    used_bytes: int = 0
    capacity_bytes: int = 0  # size of the host cache; 0 while no loader is connected
    # Bytes by tenant, for the tenants with the most bytes.
    tenants: Mapping[str, int] = field(default_factory=dict)
    # The requested adapters that are cached, as `AdapterVersion.label` names them.
    labels: tuple[str, ...] = ()


class CachedVersions:
    """The adapters in the host cache of one connected loader. capacity_bytes: size of the host cache."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._sizes: dict[AdapterVersion, int] = {}
        self._versions: frozenset[AdapterVersion] | None = None

    @property
    def versions(self) -> frozenset[AdapterVersion]:
        """The cached adapters. Without an update in between, the same object is returned."""
        if self._versions is None:
            self._versions = frozenset(self._sizes)
        return self._versions

    def update(self, added: Iterable[tuple[AdapterVersion, int]], removed: Iterable[AdapterVersion]) -> None:
        for version in removed:
            self._sizes.pop(version, None)
        self._sizes.update(added)
        self._versions = None

    def count(self, most: int, labels: Collection[str]) -> CacheCounts:
        """Returns a summary. most: maximum number of tenants in it. labels: adapters to look for in the cache."""
        tenants: Counter[str] = Counter()
        for version, num_bytes in self._sizes.items():
            tenants[version.tenant] += num_bytes
        return CacheCounts(
            len(self._sizes),
            tenants.total(),
            self._capacity_bytes,
            dict(tenants.most_common(most)),
            tuple(sorted({version.label for version in self._sizes}.intersection(labels))),
        )
