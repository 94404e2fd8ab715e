"""How an engine gets adapters to the host: it requests adapters, continues to run steps, and polls for the results.

`AdapterSource` is the interface. `DirectorySource` reads PEFT directories in the engine's own process, for the `LLM`
class and for tests. `LoaderClient` uses a loader process that serves many tenants.

Every implementation follows these rules:

- `request` never blocks. While a request for a version is in flight, further requests for it join the first one.
- Each request (or group of joined requests) is answered by exactly one `Fetched` or `FetchFailed` from `poll`.
- A `Fetched` copy stays in place, unchanged, until `release` is called once for each `Fetched`.
- `discard` reports that a version was deleted. Its copy is dropped as soon as the last `Fetched` is released.
"""

import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Literal, Protocol

from slora_adapters.errors import AdapterInvalid, AdapterNotFound
from slora_adapters.loader.cached_versions import CacheCounts
from slora_adapters.peft.adapter import Adapter, AdapterLimits
from slora_adapters.peft.packing import PackedAdapter, pack
from slora_adapters.peft.peft_directory import read_adapter
from slora_adapters.version import AdapterVersion
from slora_kernels.layout import ModelShape

logger = logging.getLogger(__name__)

FailureCode = Literal["not_found", "unavailable", "corrupt"]


@dataclass(frozen=True, slots=True, eq=False)
class Fetched:
    """The packed adapter is in host memory, and stays there until `release(version)`."""

    version: AdapterVersion
    packed: PackedAdapter


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """The adapter could not be loaded to the host. `message` may be shown to the tenant that requested it."""

    version: AdapterVersion
    code: FailureCode
    message: str


class AdapterSource(Protocol):
    """Loads adapter versions to the host. All methods are called from one thread, and none blocks."""

    @property
    def capacity_bytes(self) -> int | None:
        """The total bytes of copies that may be held at once; None if only memory limits them."""

    @property
    def paces(self) -> Mapping[str, float]:
        """Recent load time in seconds per packed byte, by the tier that adapters were loaded from. Tiers without
        a load are missing.
        """

    @property
    def cached_versions(self) -> frozenset[AdapterVersion]:
        """The adapters in the host cache of this source. While they do not change, the same object is returned."""

    def count_cached(self, most: int, labels: Collection[str]) -> CacheCounts:
        """Returns what the host cache of this source holds; see `CachedVersions.count`."""

    def request(self, version: AdapterVersion) -> None:
        """Starts fetching a version."""

    def poll(self) -> list[Fetched | FetchFailed]:
        """Returns the fetches that completed or failed since the last call."""

    def release(self, version: AdapterVersion) -> None:
        """Releases one `Fetched` copy, which may then be evicted from the host."""

    def discard(self, version: AdapterVersion) -> None:
        """Drops the host copy of a deleted version."""

    def purge(self, tenant: str) -> None:
        """Drops all host copies of a tenant, and overwrites adapter data in free host memory."""


class DirectorySource:
    """Reads adapters from PEFT directories and packs them in this process, on `num_threads` threads (0: inside
    `request`).

    It also serves adapters without a directory, which stay packed in memory until they are discarded. Copies of
    directories are not cached: each fetch reads the directory again. A fetch fails if the weights in the directory have
    changed since the adapter was added.

    notify: called from any thread whenever `poll` would return a result.
    num_ranks: the number of tensor-parallel ranks of the engine.
    """

    def __init__(
        self,
        shape: ModelShape,
        dtype: str,
        limits: AdapterLimits | None = None,
        *,
        notify: Callable[[], None] = lambda: None,
        num_threads: int = 2,
        num_ranks: int = 1,
    ) -> None:
        self.shape = shape
        self._num_ranks = num_ranks
        self.dtype = dtype
        self.limits = limits or AdapterLimits(served_dtype=dtype)
        self._notify = notify
        self._directories: dict[AdapterVersion, tuple[Path, ...]] = {}
        self._packed: dict[AdapterVersion, PackedAdapter] = {}
        self._in_flight: set[AdapterVersion] = set()
        self._done: deque[Fetched | FetchFailed] = deque()
        self._lock = Lock()
        self._threads = ThreadPoolExecutor(num_threads, "adapter-load") if num_threads else None

    @property
    def capacity_bytes(self) -> int | None:
        return None

    @property
    def paces(self) -> Mapping[str, float]:
        """Always empty, because the engine does not use the paces of this source."""
        return {}

    @property
    def cached_versions(self) -> frozenset[AdapterVersion]:
        """Always empty, because this source has no host cache."""
        return frozenset()

    def count_cached(self, most: int, labels: Collection[str]) -> CacheCounts:
        """Returns empty counts, because this source has no host cache."""
        return CacheCounts()

    def add(self, directory: Path | str, tenant: str = "local") -> AdapterVersion:
        """Validates the adapter in a directory and makes it fetchable. Raises what `read_adapter` raises."""
        return self.hold(read_adapter(directory, self.shape, self.limits), directory, tenant)

    def hold(
        self, adapter: Adapter, directory: Path | str | None = None, tenant: str = "local"
    ) -> AdapterVersion:
        """Makes a validated adapter fetchable from its directory. If it has no directory, a packed copy is kept in
        memory.

        Several directories may have the same weights. A fetch then reads any of them that still has these weights.
        """
        version = AdapterVersion(tenant, adapter.digest)
        if directory is not None:
            others = tuple(other for other in self._directories.get(version, ()) if other != Path(directory))
            self._directories[version] = (Path(directory), *others)
        elif version not in self._packed:
            self._packed[version] = pack(adapter, self.shape, self.dtype, self._num_ranks)
        return version

    def request(self, version: AdapterVersion) -> None:
        with self._lock:
            if version in self._in_flight:
                return
            self._in_flight.add(version)
        if self._threads is None:
            self._finish(version)
        else:
            self._threads.submit(self._finish, version)

    def poll(self) -> list[Fetched | FetchFailed]:
        with self._lock:
            results = list(self._done)
            self._done.clear()
            self._in_flight.difference_update(result.version for result in results)
        return results

    def release(self, version: AdapterVersion) -> None:
        """Does nothing, because each copy is the caller's own memory."""

    def discard(self, version: AdapterVersion) -> None:
        self._directories.pop(version, None)
        self._packed.pop(version, None)

    def purge(self, tenant: str) -> None:
        for version in [*self._directories, *self._packed]:
            if version.tenant == tenant:
                self.discard(version)

    def close(self) -> None:
        """Waits for running loads. The source must not be used afterwards."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    def _finish(self, version: AdapterVersion) -> None:
        try:
            result = self._load(version)
        except Exception as error:  # top of a thread: a bug must fail this request, not block it
            logger.exception("loading adapter %s failed", version.digest)
            result = FetchFailed(version, "unavailable", f"the adapter could not be loaded: {error}")
        with self._lock:
            self._done.append(result)
        self._notify()

    def _load(self, version: AdapterVersion) -> Fetched | FetchFailed:
        packed = self._packed.get(version)
        if packed is not None:
            return Fetched(version, packed)
        result: Fetched | FetchFailed = FetchFailed(
            version, "not_found", f"adapter {version.digest[:12]} was never added, or was deleted"
        )
        for directory in self._directories.get(version, ()):
            result = self._read(version, directory)
            if isinstance(result, Fetched):
                break
        return result

    def _read(self, version: AdapterVersion, directory: Path) -> Fetched | FetchFailed:
        try:
            adapter = read_adapter(directory, self.shape, self.limits)
        except (AdapterNotFound, FileNotFoundError):
            return FetchFailed(
                version, "not_found", f"the adapter directory {str(directory)!r} no longer exists"
            )
        except AdapterInvalid as error:
            return FetchFailed(
                version,
                "corrupt",
                f"the adapter in {str(directory)!r} was changed after it was added: {error}",
            )
        if adapter.digest != version.digest:
            message = f"the weights in {str(directory)!r} were changed after they were added; add them again"
            return FetchFailed(version, "corrupt", message)
        packed = pack(adapter, self.shape, self.dtype, self._num_ranks)
        return Fetched(version, packed)
