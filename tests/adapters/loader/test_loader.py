import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest

from slora_adapters.loader.host_cache import CachedAdapter, HostCache
from slora_adapters.loader.loader import Loader, ServedFormat
from slora_adapters.loader.source import FetchFailed
from slora_adapters.peft.adapter import TENSORS_NAME, AdapterLimits
from slora_adapters.peft.packing import PackedAdapter
from slora_adapters.store import redis_store
from slora_adapters.store.redis_store import open_redis_store
from slora_adapters.store.store import Blob, Store
from slora_adapters.store.tiered_store import TieredStore
from slora_adapters.version import AdapterVersion
from tests.adapters.blobs import read_members
from tests.adapters.hand_made import SHAPE
from tests.adapters.stock import AdapterFixtures, GatedStore
from tests.redis_server import RedisServer

# Splits even an adapter of a few KB into many pieces.
SMALL_BYTES = 200
SERVED = ServedFormat(SHAPE, "float32", AdapterLimits(served_dtype="float32"))


class LoaderHarness:
    """A loader over a store with gated reads, and the loader's answers."""

    def __init__(self, root: Path, cache_bytes: int = 1 << 20, **options) -> None:
        self.stock = AdapterFixtures(root)
        self.gated = GatedStore(self.stock.store)
        self.cache = HostCache(cache_bytes)
        self.options = options
        self.loader = Loader(self.gated, self.cache, SERVED, **options)
        self.answers: queue.Queue[CachedAdapter | FetchFailed] = queue.Queue()

    def load(self, version: AdapterVersion) -> None:
        self.loader.load(version, self.answers.put)

    def answer(self) -> CachedAdapter | FetchFailed:
        return self.answers.get(timeout=300)

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
def make_bench(tmp_path: Path) -> Iterator[Callable[..., LoaderHarness]]:
    benches: list[LoaderHarness] = []

    def make(**options) -> LoaderHarness:
        benches.append(LoaderHarness(tmp_path / str(len(benches)), **options))
        return benches[-1]

    yield make
    for bench in benches:
        bench.close()


def _v(digest: str, tenant: str = "t1") -> AdapterVersion:
    return AdapterVersion(tenant, digest)


def _check(bench: LoaderHarness, entry: CachedAdapter | FetchFailed) -> None:
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


def test_a_new_request_retries_a_failed_load(make_bench) -> None:
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


def test_a_load_evicts_idle_adapters_and_waits_if_all_are_pinned(make_bench) -> None:
    bench = make_bench(cache_bytes=4096, wait_for_room_s=300)
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


def test_progress_counts_loads_and_pieces_and_the_loader_is_idle_after_the_last(make_bench) -> None:
    bench = make_bench()
    assert not bench.loader.measure().is_busy
    version = _v(bench.stock.add(1))
    gate = bench.gated.hold(version.digest)
    bench.load(version)
    before = bench.loader.measure()
    assert before.is_busy
    gate.set()
    bench.loader.release(bench.answer())
    after = bench.loader.measure()
    assert after.num_completed >= before.num_completed + 2 and not after.is_busy
    assert isinstance(bench.fetch(_v("0" * 64)), FetchFailed)
    assert bench.loader.measure().num_completed == after.num_completed + 1


def test_a_load_that_waits_for_room_does_not_count_as_busy(make_bench) -> None:
    """If such a load counted as work, the loader would be killed for a stall. Only a release lets it go on."""
    bench = make_bench(cache_bytes=4096, wait_for_room_s=300)
    held = bench.fetch(_v(bench.stock.add(1)))
    bench.load(_v(bench.stock.add(2)))
    deadline = time.monotonic() + 300
    while bench.loader.measure().is_busy:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    bench.loader.release(held)
    bench.loader.release(bench.answer())


def test_a_load_that_finds_no_room_in_time_fails_and_names_the_setting(make_bench) -> None:
    bench = make_bench(cache_bytes=4096, wait_for_room_s=0.05)
    bench.fetch(_v(bench.stock.add(1)))
    answer = bench.fetch(_v(bench.stock.add(2)))
    assert answer.code == "unavailable" and "host_cache_bytes" in answer.message
    too_large = bench.fetch(_v(bench.stock.add(3, rank=4)))
    assert too_large.code == "unavailable" and "host_cache_bytes" in too_large.message


def test_a_discarded_adapter_is_read_from_the_store_again(make_bench) -> None:
    bench = make_bench()
    version = _v(bench.stock.add(1))
    held = bench.fetch(version)
    bench.loader.discard(version)
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


class Interrupted:
    """A store that runs an action once, before the given piece of the tensors is read."""

    def __init__(self, store: Store, before: int, action: Callable[[], object]) -> None:
        self._store = store
        self._left = before
        self._action = action

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def open(self, digest: str) -> Blob:
        blob = self._store.open(digest)
        read = blob.read_into

        def read_into(name: str, start: int, buffer: memoryview) -> None:
            if name == TENSORS_NAME:
                self._left -= 1
                if self._left == 0:
                    self._action()
            read(name, start, buffer)

        blob.read_into = read_into
        return blob


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits even an adapter of a few KB into many chunks of Redis, and limits read-ahead to a few of them."""
    monkeypatch.setattr(redis_store, "CHUNK_BYTES", 256)


PIECES = pytest.mark.parametrize("before", [1, 2, 3, 9], ids=["length", "header", "first", "ninth"])


def _load(bench: LoaderHarness, store: Store, version: AdapterVersion) -> CachedAdapter | FetchFailed:
    """Loads `version` in many pieces. If the load fails, the cache must be in the same state as before."""
    cache = HostCache(1 << 20)
    loader = Loader(store, cache, SERVED, batch_bytes=SMALL_BYTES)
    loader.load(version, bench.answers.put)
    answer = bench.answer()
    if isinstance(answer, CachedAdapter):
        packed = PackedAdapter(answer.layout, answer.scales, cache.region(answer))
        bench.stock.assert_same(version, packed)
        loader.release(answer)
    else:
        assert cache.used_bytes == 0 and cache.find(version) is None
    loader.close()
    loader.check()
    cache.close()
    return answer


Stored = tuple[LoaderHarness, Store, str]


@pytest.fixture
def stored(make_bench, redis_server: RedisServer, small_chunks: None) -> Iterator[Stored]:
    """A loader, a store in Redis with an adapter, and the adapter's digest."""
    bench = make_bench()
    digest = bench.stock.add(1)
    store = open_redis_store(redis_server.url, durable=True)
    store.put(digest, read_members(bench.stock.store, digest))
    yield bench, store, digest
    store.close()


@PIECES
def test_redis_killed_while_it_is_read_fails_that_load_and_it_works_again_afterwards(
    stored: Stored, redis_server: RedisServer, before: int
) -> None:
    bench, store, digest = stored
    answer = _load(bench, Interrupted(store, before, redis_server.kill), _v(digest))
    assert isinstance(answer, FetchFailed) and answer.code == "unavailable"
    redis_server.start()
    assert isinstance(_load(bench, store, _v(digest)), CachedAdapter)


@PIECES
def test_a_load_whose_warm_tier_dies_continues_from_the_durable_store(
    make_bench, make_redis: Callable[..., RedisServer], small_chunks: None, before: int
) -> None:
    bench, server = make_bench(), make_redis()
    digest = bench.stock.add(1)
    tiers = TieredStore(bench.stock.store, open_redis_store(server.url, durable=False))
    tiers.warm.put(digest, read_members(bench.stock.store, digest))
    assert isinstance(_load(bench, Interrupted(tiers, before, server.kill), _v(digest)), CachedAdapter)
    tiers.close()


@PIECES
def test_a_chunk_missing_in_the_warm_tier_is_read_from_the_durable_store(
    make_bench, make_redis: Callable[..., RedisServer], small_chunks: None, before: int
) -> None:
    bench, server = make_bench(), make_redis()
    digest = bench.stock.add(1)
    tiers = TieredStore(bench.stock.store, open_redis_store(server.url, durable=False))
    tiers.warm.put(digest, read_members(bench.stock.store, digest))

    def lose_the_last() -> None:
        with server.client() as client:
            client.delete(max(client.keys("*:c:*"), key=lambda key: int(key.rsplit(b":", 1)[1])))

    assert isinstance(_load(bench, Interrupted(tiers, before, lose_the_last), _v(digest)), CachedAdapter)
    tiers.drain()
    assert read_members(tiers.warm, digest) == read_members(tiers.durable, digest), "it is warm again"
    tiers.close()


def test_a_chunk_missing_in_the_only_store_fails_the_load(stored: Stored, redis_server: RedisServer) -> None:
    bench, store, digest = stored
    with redis_server.client() as client:
        client.delete(client.keys("*:c:*:5")[0])
    answer = _load(bench, store, _v(digest))
    assert isinstance(answer, FetchFailed) and answer.code == "unavailable"


@PIECES
@pytest.mark.parametrize("again", [False, True], ids=["deleted", "replaced"])
def test_a_blob_deleted_or_replaced_while_it_is_read(stored: Stored, before: int, again: bool) -> None:
    bench, store, digest = stored
    members = read_members(bench.stock.store, digest)
    change = (lambda: store.put(digest, members)) if again else (lambda: store.delete(digest))
    answer = _load(bench, Interrupted(store, before, change), _v(digest))
    if again:
        assert isinstance(answer, CachedAdapter), answer
    else:
        assert answer.code == "not_found"


def test_a_region_is_not_readable_before_all_of_it_is_verified(make_bench) -> None:
    """The last piece is held back. All other pieces are packed, and requests for the adapter wait."""
    bench = make_bench(batch_bytes=SMALL_BYTES)
    good, damaged = _v(bench.stock.add(1)), _v(bench.stock.add(2))
    bench.stock.damage(damaged.digest)
    for version in (good, damaged):
        reached, go_on = Event(), Event()
        # The reads are the length, the header and the pieces. An adapter of this size has more than ten pieces.
        bench.gated.store = Interrupted(
            bench.stock.store, 12, lambda reached=reached, go_on=go_on: (reached.set(), go_on.wait(300))
        )
        bench.load(version)
        assert reached.wait(300)
        assert bench.cache.find(version) is None
        assert bench.cache.used_bytes > sum(bench.cache.contents.values()), "its region is taken"
        bench.load(version)
        assert bench.answers.empty()
        go_on.set()
        answers = [bench.answer(), bench.answer()]
        if version == good:
            for answer in answers:
                _check(bench, answer)
                bench.loader.release(answer)
        else:
            assert [answer.code for answer in answers] == ["corrupt", "corrupt"]
            assert bench.cache.used_bytes == sum(bench.cache.contents.values()), "its region is free"


def test_an_adapter_copied_to_the_warm_tier_gets_that_tiers_reload_cost(
    make_bench, make_redis: Callable[..., RedisServer]
) -> None:
    bench = make_bench()
    warm, cold, alone = (bench.stock.add(number) for number in range(3))
    tiers = TieredStore(bench.stock.store, open_redis_store(make_redis().url, durable=False))
    tiers.warm.put(warm, read_members(bench.stock.store, warm))
    bench.gated.store = tiers
    bench.fetch(_v(warm))
    entry = bench.fetch(_v(cold))
    paces = bench.loader.paces
    assert paces.keys() == {"redis", "file"} and entry.reload_s == pytest.approx(
        entry.num_bytes * paces["redis"]
    )
    bench.gated.store = bench.stock.store
    entry = bench.fetch(_v(alone))
    assert entry.reload_s == pytest.approx(entry.num_bytes * bench.loader.paces["file"]), "it stays there"
    tiers.close()
