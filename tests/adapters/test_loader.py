import queue
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slora_adapters.host_cache import CachedAdapter, HostCache
from slora_adapters.limits import AdapterLimits
from slora_adapters.loader import Loader, ServedFormat
from slora_adapters.packing import PackedAdapter
from slora_adapters.redis_store import open_redis_store
from slora_adapters.source import FetchFailed
from slora_adapters.tiered_store import TieredStore
from slora_adapters.version import AdapterVersion
from tests.adapters.blobs import read_members
from tests.adapters.hand_made import SHAPE
from tests.adapters.stock import GatedStore, Stock
from tests.redis_server import RedisServer

SERVED = ServedFormat(SHAPE, "float32", AdapterLimits(served_dtype="float32"))


class Bench:
    """A loader over a gated store, and what it has answered."""

    def __init__(self, root: Path, cache_bytes: int = 1 << 20, **options) -> None:
        self.stock = Stock(root)
        self.gated = GatedStore(self.stock.store)
        self.cache = HostCache(cache_bytes)
        self.options = options
        self.loader = Loader(self.gated, self.cache, SERVED, **options)
        self.answers: queue.Queue[CachedAdapter | FetchFailed] = queue.Queue()

    def load(self, version: AdapterVersion) -> None:
        self.loader.load(version, self.answers.put)

    def answer(self) -> CachedAdapter | FetchFailed:
        return self.answers.get(timeout=20)

    def fetch(self, version: AdapterVersion) -> CachedAdapter | FetchFailed:
        self.load(version)
        return self.answer()

    def close(self) -> None:
        for gate in self.gated.gates.values():
            gate.set()
        self.loader.close()
        self.loader.check()
        self.cache.close()


@pytest.fixture
def make_bench(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make(**options) -> Bench:
        benches.append(Bench(tmp_path / str(len(benches)), **options))
        return benches[-1]

    yield make
    for bench in benches:
        bench.close()


def _v(digest: str, tenant: str = "t1") -> AdapterVersion:
    return AdapterVersion(tenant, digest)


def _check(bench: Bench, entry: CachedAdapter | FetchFailed) -> None:
    assert isinstance(entry, CachedAdapter), entry
    bench.stock.assert_same(
        entry.version, PackedAdapter(entry.layout, entry.scales, bench.cache.region(entry))
    )


def test_a_stored_adapter_arrives_packed_and_pinned(make_bench) -> None:
    bench = make_bench()
    entry = bench.fetch(_v(bench.stock.add(1)))
    _check(bench, entry)
    assert entry.num_pins == 1
    bench.loader.release(entry)


def test_a_cached_adapter_is_not_read_again(make_bench) -> None:
    bench = make_bench()
    version = _v(bench.stock.add(1))
    for _ in range(3):
        bench.loader.release(bench.fetch(version))
    assert len(bench.gated.reads) == 1


def test_requests_at_once_share_one_load_and_hold_one_pin_each(make_bench) -> None:
    bench = make_bench()
    version = _v(bench.stock.add(1))
    gate = bench.gated.hold(version.digest)
    for _ in range(5):
        bench.load(version)
    gate.set()
    entries = [bench.answer() for _ in range(5)]
    assert len(bench.gated.reads) == 1
    assert all(entry is entries[0] for entry in entries) and entries[0].num_pins == 5
    for entry in entries:
        bench.loader.release(entry)


def test_a_slow_load_does_not_hold_up_another_tenant(make_bench) -> None:
    bench = make_bench()
    slow, quick = _v(bench.stock.add(1), "slow"), _v(bench.stock.add(2), "quick")
    bench.gated.hold(slow.digest)
    bench.load(slow)
    _check(bench, bench.fetch(quick))


def test_a_tenant_with_many_cold_adapters_gets_no_more_than_its_share(make_bench) -> None:
    bench = make_bench(num_threads=3, loads_per_tenant=2)
    cold = [_v(bench.stock.add(n), "greedy") for n in range(6)]
    gates = [bench.gated.hold(version.digest) for version in cold]
    for version in cold:
        bench.load(version)
    _check(bench, bench.fetch(_v(bench.stock.add(9), "modest")))
    assert set(bench.gated.reads) - {version.digest for version in cold[:2]} <= {bench.gated.reads[-1]}
    for gate in gates:
        gate.set()
    for _ in cold:
        _check(bench, bench.answer())


def test_the_same_weights_of_two_tenants_are_two_copies(make_bench) -> None:
    bench = make_bench()
    digest = bench.stock.add(1)
    first, second = bench.fetch(_v(digest, "t1")), bench.fetch(_v(digest, "t2"))
    _check(bench, first)
    _check(bench, second)
    assert first.offset != second.offset


def test_each_failure_fails_alone_with_its_own_code(make_bench) -> None:
    bench = make_bench()
    damaged, good = bench.stock.add(1), bench.stock.add(2)
    bench.stock.damage(damaged)
    for digest, code in (("0" * 64, "not_found"), (damaged, "corrupt"), ("no digest", "unavailable")):
        answer = bench.fetch(_v(digest))
        assert isinstance(answer, FetchFailed) and answer.code == code and answer.version == _v(digest)
    _check(bench, bench.fetch(_v(good)))
    bench.loader.check()


def test_a_failed_load_is_tried_again_when_it_is_asked_for_again(make_bench) -> None:
    bench = make_bench()
    digest = bench.stock.add(1)
    members = read_members(bench.stock.store, digest)
    bench.stock.store.delete(digest)
    assert bench.fetch(_v(digest)).code == "not_found"
    bench.stock.store.put(digest, members)
    _check(bench, bench.fetch(_v(digest)))


def test_an_adapter_over_this_servers_limits_is_not_served(make_bench, tmp_path: Path) -> None:
    bench = make_bench()
    digest = bench.stock.add(1, rank=4)
    strict = replace(SERVED, limits=AdapterLimits(max_lora_rank=2))
    cache = HostCache(1 << 20)
    loader = Loader(bench.gated, cache, strict)
    loader.load(_v(digest), bench.answers.put)
    answer = bench.answer()
    assert answer.code == "corrupt" and "at most 2 (max_lora_rank)" in answer.message
    loader.close()
    cache.close()


def test_eviction_makes_room_and_a_full_cache_waits_for_a_release(make_bench) -> None:
    bench = make_bench(cache_bytes=4096, wait_for_room_s=20)
    versions = [_v(bench.stock.add(n)) for n in range(4)]
    size = bench.stock.packed[versions[0].digest].buffer.nbytes
    assert size == bench.cache.num_bytes, "one fits, two do not"
    first = bench.fetch(versions[0])
    bench.load(versions[1])
    assert bench.answers.empty()
    bench.loader.release(first)
    second = bench.answer()
    _check(bench, second)
    bench.loader.release(second)
    assert bench.cache.num_evictions == 1


def test_a_load_that_finds_no_room_in_time_fails_and_says_why(make_bench) -> None:
    bench = make_bench(cache_bytes=4096, wait_for_room_s=0.05)
    bench.fetch(_v(bench.stock.add(1)))
    answer = bench.fetch(_v(bench.stock.add(2)))
    assert answer.code == "unavailable" and "host_cache_bytes" in answer.message
    too_large = bench.fetch(_v(bench.stock.add(3, rank=4)))
    assert too_large.code == "unavailable" and "host_cache_bytes" in too_large.message


def test_a_forgotten_adapter_is_asked_of_the_store_again(make_bench) -> None:
    bench = make_bench()
    version = _v(bench.stock.add(1))
    held = bench.fetch(version)
    bench.loader.forget(version)
    bench.stock.store.delete(version.digest)
    assert bench.fetch(version).code == "not_found"
    _check(bench, held)
    bench.loader.release(held)
    assert bench.cache.used_bytes == 0


def test_a_wrong_warm_copy_is_replaced_by_the_durable_one(
    make_bench, make_redis: Callable[..., RedisServer]
) -> None:
    bench = make_bench()
    digest, other = bench.stock.add(1), bench.stock.add(2)
    warm = open_redis_store(make_redis().url, durable=False)
    warm.put(digest, read_members(bench.stock.store, other))
    tiers = TieredStore(bench.stock.store, warm)
    cache = HostCache(1 << 20)
    loader = Loader(tiers, cache, SERVED)
    loader.load(_v(digest), bench.answers.put)
    entry = bench.answer()
    bench.stock.assert_same(_v(digest), PackedAdapter(entry.layout, entry.scales, cache.region(entry)))
    loader.close()
    tiers.close()
    cache.close()


def test_a_bug_in_a_store_fails_the_load_and_not_the_loader(
    make_bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench = make_bench()
    digest = bench.stock.add(1)
    open_blob, bench.gated.open = bench.gated.open, lambda digest: 1 // 0
    assert bench.fetch(_v(digest)).code == "unavailable"
    assert "ZeroDivisionError" in caplog.text
    bench.gated.open = open_blob
    _check(bench, bench.fetch(_v(digest)))
