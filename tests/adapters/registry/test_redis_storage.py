"""Behaviour that only Redis has: lost connections, server crashes, leases, and caches in several processes."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress

import pytest

from slora_adapters.database.database import Database
from slora_adapters.errors import AdapterNotFound, StoreUnavailable, StoreUnfit
from slora_adapters.peft.adapter import AdapterExtras
from slora_adapters.registry import redis_storage
from slora_adapters.registry.adapter_record import ExtrasSummary
from slora_adapters.registry.name_cache import NameCache
from slora_adapters.registry.named_adapter import NamedAdapter
from slora_adapters.registry.redis_storage import open_redis_storage
from slora_adapters.registry.registry import AdapterDetails, AdapterRecord, Registry
from slora_adapters.registry.registry_url import open_registry
from slora_adapters.version import AdapterVersion
from tests.adapters.registry_places import reserved
from tests.redis_server import RedisServer

D1, D2 = "1" * 64, "2" * 64
DETAILS = AdapterDetails(8, ("q_proj",), 4096)
WAIT_S = 60
Open = Callable[[], Registry]


def _v(digest: str = D1, tenant: str = "t1") -> AdapterVersion:
    return AdapterVersion(tenant, digest)


@pytest.fixture
def server(redis_server: RedisServer) -> RedisServer:
    return redis_server


@pytest.fixture
def open_registries(server: RedisServer) -> Iterator[Open]:
    """Each call opens a registry as another process would. All of them stay open until the end."""
    opened = []

    def open_one() -> Registry:
        opened.append(Registry(open_redis_storage(server.url), cache=NameCache()))
        return opened[-1]

    yield open_one
    for registry in opened:
        registry.close()


# -- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "'appendonly yes' .it is no."),
        (
            ("--appendonly", "yes", "--maxmemory-policy", "volatile-lru"),
            "'maxmemory-policy noeviction' .it is volatile-lru.",
        ),
        (("--appendonly", "yes", "--appendfsync", "no"), "'appendfsync everysec' or 'always'"),
    ],
)
def test_a_redis_registry_without_durable_settings_is_refused(
    make_redis: Callable[..., RedisServer], options: tuple[str, ...], message: str
) -> None:
    with pytest.raises(StoreUnfit, match=f"as a registry it needs {message}"):
        open_redis_storage(make_redis(*options).url)


def test_a_registry_of_a_newer_release_is_refused(server: RedisServer, open_registries: Open) -> None:
    open_registries()
    with server.client() as client:
        client.set("slora:registry:schema", "3")
    with pytest.raises(
        StoreUnavailable, match="version 3 of the registry schema, but this release supports at most 2"
    ):
        open_registries()


def test_a_registry_url_must_be_empty_or_a_redis(tmp_path, server: RedisServer) -> None:
    with closing(Database(tmp_path / "slora.db")) as database:
        for url in ("s3://bucket/names", "/var/names"):
            with pytest.raises(ValueError, match="must be a Redis"):
                open_registry(url, database)
        open_registry("", database).put("a", _v(), DETAILS)
        assert open_registry("", database).get("t1", "a").number == 1
        far = open_registry(server.tcp_url, database)
        with pytest.raises(AdapterNotFound):
            far.get("t1", "a")
        far.close()


def test_a_full_redis_refuses_pushes_and_allows_deletions(server: RedisServer, open_registries: Open) -> None:
    registry = open_registries()
    for name in ("a", "b"):
        registry.put(name, _v(), DETAILS)
    with server.client() as client:
        client.config_set("maxmemory", 1)
        with pytest.raises(StoreUnavailable, match="maxmemory"):
            registry.put("a", _v(D2), DETAILS)
        assert registry.versions("t1", "a") == [registry.get("t1", "a@1")]
        assert registry.storage_usage("t1", D1).num_versions == 2
        registry.delete("t1", "a")
        client.config_set("maxmemory", 0)
    assert [one.label for one in registry.list("t1")] == ["b"]
    registry.put("a", _v(D2), DETAILS)


# -- concurrent changes of the same keys ------------------------------------------------------------------------------


def test_a_change_is_recomputed_after_a_concurrent_change(open_registries: Open) -> None:
    registry, other = open_registries(), open_registries()
    storage = registry._storage
    seen: list[list[int]] = []

    def push(named: NamedAdapter) -> int:
        seen.append(sorted(named.records))
        if len(seen) < 3:
            other.put("a", _v(f"{len(seen):064x}"), DETAILS)
        return named.push(_v("f" * 64), DETAILS, AdapterExtras(), 1.0)[0].number

    assert storage.change(("t1", "a"), (), push)[0] == 3
    assert seen == [[], [1], [1, 2]]
    assert [record.number for record in other.versions("t1", "a")] == [3, 2, 1]


def test_a_pin_is_checked_again_after_a_concurrent_pin(open_registries: Open) -> None:
    registry, other = open_registries(), open_registries()
    for name in ("a", "b"):
        registry.put(name, _v(), DETAILS)
    told: list[list[str]] = []

    def check(wanted: object, others: list[AdapterRecord]) -> None:
        told.append([one.label for one in others])
        if len(told) == 1:
            other.pin("t1", "b", lambda one, others: None)

    registry.pin("t1", "a", check)
    assert told == [[], ["b"]]


# -- crashes of Redis ------------------------------------------------------------------------------------------------


def test_a_change_acknowledged_while_the_disk_is_busy_survives_the_death_of_redis(
    server: RedisServer, open_registries: Open
) -> None:
    registry = open_registries()
    with server.client() as client, server.stalled_fsync():
        registry.put("a", _v(), DETAILS)
        while not client.info("persistence")["aof_pending_bio_fsync"]:
            time.sleep(0.01)
        registry.put("a", _v(D2), DETAILS)
        server.kill()
    server.start()
    assert registry.get("t1", "a").number == 2


def test_a_lost_connection_loses_no_change(server: RedisServer, open_registries: Open) -> None:
    writer, reader = open_registries(), open_registries()
    cursor = reader.changes().cursor
    with server.client() as client:
        for name in ("a", "b"):
            client.client_kill_filter(_type="normal", skipme=True)
            writer.put(name, _v(), DETAILS)
    told = reader.changes(cursor)
    assert [change.name for change in told.changes] == ["a", "b"] and not told.resync


def test_the_name_cache_is_cleared_when_redis_dies(
    server: RedisServer, open_registries: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other processes may have read a change that was never acknowledged."""
    writer, reader = open_registries(), open_registries()
    writer.put("a", _v(), DETAILS)

    def give_up(connection: object) -> None:
        raise StoreUnavailable("it takes too long")

    monkeypatch.setattr(redis_storage, "wait_for_disk", give_up)
    with server.client() as client, server.stalled_fsync():
        client.set("anything", "asks for an fsync")
        while not client.info("persistence")["aof_pending_bio_fsync"]:
            time.sleep(0.01)
        cursor = reader.changes().cursor
        with pytest.raises(StoreUnavailable):
            writer.put("a", _v(D2), DETAILS)
        assert reader.get("t1", "a").number == 2
        server.kill()
    with pytest.raises(StoreUnavailable):
        reader.changes(cursor)
    server.start()
    assert reader.get("t1", "a").number == 2, "it is not known yet"
    told = reader.changes(cursor)
    assert told.resync and reader.get("t1", "a").number == 1
    monkeypatch.undo()
    assert writer.put("a", _v(D2), DETAILS).record.number == 2
    after = reader.changes(told.cursor)
    assert [change.name for change in after.changes] == ["a"] and not after.resync


def test_repeated_kills_of_redis_lose_no_acknowledged_change_and_readers_converge(
    server: RedisServer, open_registries: Open, soak: bool
) -> None:
    writer, reader = open_registries(), open_registries()
    writer.put("a", _v("0" * 64), DETAILS)
    is_over = threading.Event()
    pushed: list[str] = []

    def push() -> None:
        """Pushes one version after the other, and repeats each push until it is acknowledged."""
        while not is_over.is_set():
            digest = f"{len(pushed) + 1:064x}"
            with suppress(StoreUnavailable):
                writer.put("a", _v(digest), DETAILS)
                pushed.append(digest)

    thread = threading.Thread(target=push)
    thread.start()
    cursor: str | None = None
    for _ in range(30 if soak else 4):
        so_far = len(pushed)
        while len(pushed) < so_far + 5:
            with suppress(StoreUnavailable):
                cursor = reader.changes(cursor).cursor
                reader.get("t1", "a")
        server.kill()
        server.start()
    is_over.set()
    thread.join(WAIT_S)
    while not (changes := reader.changes(cursor)).is_all or changes.resync:
        cursor = changes.cursor
    records = writer.versions("t1", "a")
    assert [record.version.digest for record in records[::-1]] == ["0" * 64, *pushed]
    assert reader.get("t1", "a") == records[0]


def test_a_replaced_change_history_forces_a_resync(server: RedisServer, open_registries: Open) -> None:
    registry = open_registries()
    registry.put("a", _v(), DETAILS)
    cursor = registry.changes().cursor
    with server.client() as client:
        ((entry, _),) = client.xrevrange("slora:registry:changes", count=1)
        client.delete("slora:registry:changes")
        client.xadd("slora:registry:changes", {"nonce": "another"}, id=entry)
        assert registry.changes(cursor).resync
        client.flushall()
    emptied = registry.changes(cursor)
    assert emptied.resync
    registry.put("b", _v(), DETAILS)
    begun = registry.changes(emptied.cursor)
    assert begun.resync, "what came first since is not in it"
    registry.put("c", _v(), DETAILS)
    assert [change.name for change in registry.changes(begun.cursor).changes] == ["c"]


def test_during_a_redis_outage_cached_names_are_answered_and_others_refused(
    server: RedisServer, open_registries: Open
) -> None:
    registry, other = open_registries(), open_registries()
    for name in ("known", "changing", "unknown"):
        registry.put(name, _v(), DETAILS)
    for name in ("known", "changing"):
        registry.move("t1", name, "prod", {1: 100})
    cursor = registry.changes().cursor
    references = ("known", "known@prod", "known@1", "changing")
    known = {reference: registry.get("t1", reference) for reference in references}
    rollout = registry.rollout("t1", "known@prod")
    assert registry.is_lookup_local("t1", "known@1") and not registry.is_lookup_local("t1", "unknown")
    server.kill()
    with pytest.raises(StoreUnavailable):
        registry.changes(cursor)
    with pytest.raises(StoreUnavailable):
        registry.put("changing", _v(D2), DETAILS)
    assert {reference: registry.get("t1", reference) for reference in references} == known
    assert registry.rollout("t1", "known@prod") == rollout
    assert registry.is_lookup_local("t1", "unknown"), "it is refused at once"
    for reference in ("unknown", "known@canary", "nothing"):
        with pytest.raises(StoreUnavailable, match="cannot be looked up at the moment"):
            registry.get("t1", reference)
    server.start()
    other.put("changing", _v(D2), DETAILS)
    other.delete("t1", "known", force=True)
    registry.changes(cursor)
    assert registry.get("t1", "unknown").number == 1 and registry.get("t1", "changing").number == 2
    with pytest.raises(AdapterNotFound):
        registry.get("t1", "known")


def test_cached_names_are_dropped_on_own_changes_and_on_changes_from_the_feed(
    open_registries: Open,
) -> None:
    registry, other = open_registries(), open_registries()
    cursor = registry.changes().cursor
    for digest in (D1, D2):
        registry.put("a", _v(digest), DETAILS)
        registry.put("b", _v(digest), DETAILS)
        assert registry.get("t1", "a").version == registry.get("t1", "b").version == _v(digest)
    assert not registry.rollout("t1", "a").pinned
    registry.pin("t1", "a", lambda one, others: None)
    assert registry.rollout("t1", "a").pinned
    cursor = registry.changes(cursor).cursor
    registry.get("t1", "b")
    other.roll_back("t1", "a", "latest")
    assert registry.changes(cursor).changes and registry.get("t1", "a").number == 1
    assert registry.is_lookup_local("t1", "b"), "nobody changed it"
    other.put("b", _v(), DETAILS)
    assert registry.get("t1", "b").number == 2
    registry.drop_cached("t1", "b")
    assert registry.get("t1", "b").number == 3


# -- leases ----------------------------------------------------------------------------------------------------------


def test_an_upload_waits_until_the_deletion_of_its_blob_has_ended(open_registries: Open) -> None:
    collector, uploader = open_registries(), open_registries()
    order: list[str] = []
    may_end, has_begun = threading.Event(), threading.Event()

    def drop(digest: str) -> None:
        has_begun.set()
        may_end.wait(WAIT_S)
        order.append("dropped")

    def upload() -> None:
        with reserved(uploader, D1) as reservation:
            order.append("uploaded")
            uploader.put("a", _v(), DETAILS, reservation=reservation)

    threads = [threading.Thread(target=collector.collect, args=(D1, drop)), threading.Thread(target=upload)]
    threads[0].start()
    assert has_begun.wait(WAIT_S)
    assert not uploader.collect(D1, order.append), "somebody does already"
    with reserved(uploader, D2):
        pass  # a reservation of other weights is not blocked
    threads[1].start()
    may_end.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert order == ["dropped", "uploaded"]
    assert not collector.collect(D1, order.append)


def test_uploads_of_a_blob_are_refused_while_its_deletion_is_unconfirmed(
    open_registries: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store may still execute the delayed deletion."""
    monkeypatch.setattr(redis_storage, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(redis_storage, "LEASE_S", 2)
    registry = open_registries()

    def fail(digest: str) -> None:
        raise StoreUnavailable("it does not answer")

    with pytest.raises(StoreUnavailable, match="does not answer"):
        registry.collect(D1, fail)
    with (
        pytest.raises(StoreUnavailable, match="another server is deleting the same weights"),
        reserved(registry, D1),
    ):
        pass
    deadline = time.monotonic() + WAIT_S
    is_reserved = False
    while not is_reserved:
        assert time.monotonic() < deadline
        with suppress(StoreUnavailable), reserved(registry, D1):
            is_reserved = True


def test_a_deletion_interrupted_by_a_crash_ends_when_its_server_restarts(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_storage, "_PATIENCE_S", 0.05)

    def die(digest: str) -> None:
        raise KeyboardInterrupt

    def begin(name: str) -> Registry:
        return Registry(stack.enter_context(closing(open_redis_storage(server.url, name))))

    def may_upload(registry: Registry, digest: str) -> bool:
        try:
            with reserved(registry, digest):
                return True
        except StoreUnavailable:
            return False

    with ExitStack() as stack:
        dead, other = begin("a"), begin("ab")
        for registry, digest in ((dead, D1), (dead, D2), (other, "f" * 64)):
            with pytest.raises(KeyboardInterrupt):
                registry.collect(digest, die)
        begin("b")
        assert not any(may_upload(other, digest) for digest in (D1, D2, "f" * 64))
        again = begin("a")
        assert all(may_upload(other, digest) for digest in (D1, D2)) and not may_upload(other, "f" * 64)
        assert again.collect(D2, lambda digest: None)
        with pytest.raises(KeyboardInterrupt):
            other.collect(D1, die)
        begin("a")
        assert not may_upload(again, D1), "it is another one's now"


def test_the_lease_of_a_deletion_survives_the_death_of_redis(
    server: RedisServer, open_registries: Open
) -> None:
    registry = open_registries()
    leases: list[int] = []
    with server.client() as client, server.stalled_fsync():

        def drop(digest: str) -> None:
            server.kill()
            server.start()
            leases.append(client.exists(f"slora:registry:dropping:{digest}"))

        client.set("anything", "asks for an fsync")
        while not client.info("persistence")["aof_pending_bio_fsync"]:
            time.sleep(0.01)
        assert registry.collect(D1, drop)
    assert leases == [1]


def test_an_upload_whose_reservation_was_lost_is_refused(server: RedisServer, open_registries: Open) -> None:
    registry = open_registries()
    with server.client() as client, reserved(registry, D1) as reservation:
        client.delete(f"slora:registry:reserved:{D1}")
        assert registry.collect(D1, lambda digest: None)
        with pytest.raises(StoreUnavailable, match="upload again"):
            registry.put("a", _v(), DETAILS, reservation=reservation)
    assert registry.list("t1") == []


# -- the cache -------------------------------------------------------------------------------------------------------


def _record() -> AdapterRecord:
    return AdapterRecord("a", 1, _v(), DETAILS, ExtrasSummary.of(AdapterExtras()), 1.0, 1.0)


def test_a_value_read_before_a_change_is_not_cached() -> None:
    cache, key = NameCache(), ("t1", "a")

    def find() -> AdapterRecord:
        cache.drop(key)  # the entry changes while its value is being read
        return _record()

    assert cache.look_up(key, 1, find) == _record()
    assert cache.get(key, 1) is None
    assert cache.look_up(key, 1, lambda: _record()) == cache.get(key, 1)
    cache.clear()
    assert cache.get(key, 1) is None


def test_missing_names_and_failed_lookups_are_not_cached() -> None:
    cache = NameCache()

    def fail() -> None:
        raise StoreUnavailable("down")

    for number in range(100):
        assert cache.look_up(("t1", f"n{number}"), "latest", lambda: None) is None
        with pytest.raises(StoreUnavailable):
            cache.look_up(("t1", f"n{number}"), "latest", fail)
    assert not cache._names


def test_the_least_recently_used_names_are_evicted() -> None:
    cache = NameCache(max_bytes=40_000)
    for number in range(1000):
        name = f"n{number}"
        cache.look_up(("t1", name), 1, lambda: AdapterExtras("x" * 8000))
        cache.get(("t1", "n0"), 1)
    held = [number for number in range(1000) if cache.get(("t1", f"n{number}"), 1)]
    assert held == [0, 997, 998, 999]
    for number in held:
        cache.drop(("t1", f"n{number}"))
    assert cache._num_bytes == 0


# -- data of earlier releases ------------------------------------------------------------------------------------------


def test_versions_of_schema_1_keep_the_texts_that_were_inside_them(
    server: RedisServer, open_registries: Open
) -> None:
    registry, extras = open_registries(), AdapterExtras("{{ m }}", "{}")
    registry.put("a", _v(), DETAILS, extras)
    now = registry.get("t1", "a")
    with server.client() as client:
        fields = json.loads(client.hget("slora:registry:versions:t1/a", 1))
        for name in ("blob_bytes", "template_bytes", "defaults_bytes", "extras_digest"):
            del fields[name]
        fields |= {"chat_template": "{{ m }}", "generation_config": "{}"}
        client.hset("slora:registry:versions:t1/a", 1, json.dumps(fields))
        client.delete("slora:registry:extras:t1/a", "slora:registry:extras_bytes:t1")
        client.set("slora:registry:schema", 1)
        again = open_registries()
        assert again.serve("t1", "a") == (now, extras)
        assert not again.put("a", _v(), DETAILS, extras).is_new
        assert client.get("slora:registry:schema") == b"2", "earlier releases refuse it from now on"
        again.delete("t1", "a")
    assert again.storage_usage("t1", D1).num_bytes == 0
