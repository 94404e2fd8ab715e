"""A file store with a few valid adapters, and a way to delay its reads."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import Event, Lock

import numpy as np

from slora_adapters.peft.adapter import AdapterLimits, bundle
from slora_adapters.peft.packing import PackedAdapter, pack
from slora_adapters.peft.peft_directory import read_adapter
from slora_adapters.store.file_store import FileStore
from slora_adapters.store.store import Blob, Store
from slora_adapters.version import AdapterVersion
from tests.adapters.hand_made import SHAPE, make_config, make_members, make_tensors, write_directory


class AdapterFixtures:
    """Adapters by number, each with its own weights. `packed` is the packed form that a loader must produce."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store_path = root / "store"
        self.store = FileStore(self.store_path)
        self.packed: dict[str, PackedAdapter] = {}

    def add(self, number: int, rank: int = 2) -> str:
        """Adds a new adapter and returns its digest."""
        folder = write_directory(
            self.root / f"adapter-{number}",
            make_members(make_config(r=rank), make_tensors(rank, seed=number)),
        )
        adapter = read_adapter(folder, SHAPE, AdapterLimits())
        self.store.put(adapter.digest, bundle(adapter, folder, self.root))
        self.packed[adapter.digest] = pack(adapter, SHAPE, "float32")
        return adapter.digest

    def damage(self, digest: str) -> None:
        """Flips one bit of the stored weights."""
        path = self.store_path / "blobs" / digest[:2] / digest / "adapter_model.safetensors"
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)

    def hang(self, digest: str) -> None:
        """Makes every read of the blob block for ever: replaces a file with a pipe that has no writer."""
        path = self.store_path / "blobs" / digest[:2] / digest / "adapter_config.json"
        path.unlink()
        os.mkfifo(path)

    def assert_same(self, version: AdapterVersion, packed: PackedAdapter) -> None:
        expected = self.packed[version.digest]
        assert packed.layout.num_segments == expected.layout.num_segments
        assert np.array_equal(packed.layout.groups, expected.layout.groups)
        assert np.array_equal(packed.layout.modules, expected.layout.modules)
        assert np.array_equal(packed.scales, expected.scales)
        assert np.array_equal(packed.buffer, expected.buffer)


class GatedStore:
    """A store that counts reads. Reads of the chosen digests wait until a test lets them through."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._lock = Lock()
        self.gates: dict[str, Event] = {}
        self.reads: list[str] = []

    def hold(self, digest: str) -> Event:
        self.gates[digest] = Event()
        return self.gates[digest]

    def open(self, digest: str) -> Blob:
        with self._lock:
            self.reads.append(digest)
        if digest in self.gates:
            assert self.gates[digest].wait(300)
        return self.store.open(digest)

    def put(self, digest: str, members: Mapping[str, Path | bytes]) -> None:
        self.store.put(digest, members)

    def exists(self, digest: str) -> bool:
        return self.store.exists(digest)

    def delete(self, digest: str) -> None:
        self.store.delete(digest)

    def report_corrupt(self, digest: str) -> bool:
        return self.store.report_corrupt(digest)

    def digests(self) -> Iterator[str]:
        return self.store.digests()

    def check(self) -> None:
        self.store.check()

    def close(self) -> None:
        self.store.close()
