"""Registries of several processes: concurrent changes, uploads beside deletions, caches, and outages."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress

import pytest
from sqlalchemy import delete, update

from slora_adapters.database import schema
from slora_adapters.database.change_feed import Change, publish
from slora_adapters.database.database import CHANGES, Database
from slora_adapters.errors import AdapterNotFound, StoreUnavailable
from slora_adapters.peft.adapter import AdapterExtras
from slora_adapters.registry.record import AdapterDetails, Rollout
from slora_adapters.registry.registry import Registry
from slora_adapters.version import AdapterVersion
from tests.adapters.registry_places import OpenDatabase, reserved
from tests.postgresql_server import PostgresqlServer

D1, D2 = "1" * 64, "2" * 64
DETAILS = AdapterDetails(8, ("q_proj",), 4096)
WAIT_S = 300
Open = Callable[[], Registry]


def _v(digest: str = D1, tenant: str = "t1") -> AdapterVersion:
    return AdapterVersion(tenant, digest)


def catch_up(registry: Registry, cursor: str | None) -> None:
    """Reads the feed to its end. Right after an outage, the database is not tried again for a moment."""
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            changes = registry.changes(cursor)
        except StoreUnavailable:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        else:
            cursor = changes.cursor
            if changes.is_all:
                return


# -- the order of the feed -------------------------------------------------------------------------------------------


def test_a_change_that_commits_later_has_a_later_place_in_the_feed(database_place: str) -> None:
    """A plain sequence would lose changes: a reader that has seen id 2 misses id 1, which is committed later."""
    with closing(Database(database_place)) as first, closing(Database(database_place)) as second:
        registry = Registry(first)
        cursor = registry.changes().cursor

        def publish_second() -> None:
            with second.transaction(CHANGES) as connection:
                publish(connection, Change("t1", "second"))

        thread = threading.Thread(target=publish_second)
        seen: list[str] = []
        with first.transaction(CHANGES) as connection:
            publish(connection, Change("t1", "first"))
            thread.start()
            thread.join(0.3)  # enough for it to commit, if it did not wait
            changes = registry.changes(cursor)
            seen += [change.name for change in changes.changes]
        thread.join(WAIT_S)
        seen += [change.name for change in registry.changes(changes.cursor).changes]
    assert seen == ["first", "second"]


def test_a_replaced_feed_forces_a_resync(open_database: OpenDatabase, database_place: str) -> None:
    """The database was restored from an older copy and has been written to since."""
    registry = Registry(open_database())
    registry.put("a", _v(), DETAILS)
    cursor = registry.changes().cursor
    assert registry.get("t1", "a").version == _v()
    with closing(Database(database_place)) as database, database.transaction(CHANGES) as connection:
        connection.execute(update(schema.changes).values(nonce="another"))
        connection.execute(delete(schema.adapter_aliases))
        connection.execute(delete(schema.adapter_alias_targets))
    assert registry.changes(cursor).resync
    with pytest.raises(AdapterNotFound):
        registry.get("t1", "a")


# -- uploads beside deletions ------------------------------------------------------------------------------------------


def test_an_upload_waits_until_the_deletion_of_its_blob_has_ended(open_database: OpenDatabase) -> None:
    collector, uploader = Registry(open_database()), Registry(open_database())
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

    threads = [
        threading.Thread(target=collector.blobs.collect, args=(D1, drop)),
        threading.Thread(target=upload),
    ]
    threads[0].start()
    assert has_begun.wait(WAIT_S)
    threads[1].start()
    threads[1].join(0.3)
    may_end.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert order == ["dropped", "uploaded"]
    assert not collector.blobs.collect(D1, order.append)


def test_a_blob_whose_deletion_failed_can_be_uploaded_again(open_database: OpenDatabase) -> None:
    registry = Registry(open_database())

    def fail(digest: str) -> None:
        raise StoreUnavailable("it does not answer")

    with pytest.raises(StoreUnavailable, match="does not answer"):
        registry.blobs.collect(D1, fail)
    with reserved(registry, D1):
        assert registry.blobs.find_referenced([D1])


def test_an_upload_whose_reservation_was_lost_is_refused(
    open_database: OpenDatabase, database_place: str
) -> None:
    registry = Registry(open_database())
    with closing(Database(database_place)) as database, reserved(registry, D1) as reservation:
        with database.transaction() as connection:
            connection.execute(delete(schema.adapter_reservations))
        assert registry.blobs.collect(D1, lambda digest: None)
        with pytest.raises(StoreUnavailable, match="upload again"):
            registry.put("a", _v(), DETAILS, reservation=reservation)
    assert registry.list("t1") == []


# -- concurrent changes ------------------------------------------------------------------------------------------------


def test_a_pin_is_checked_against_pins_that_other_processes_make_at_the_same_time(
    open_database: OpenDatabase,
) -> None:
    """Each check waits until the other process has tried to pin, too. Both would pass if they ran side by side."""
    registries = [Registry(open_database()), Registry(open_database())]
    for name in ("a", "b"):
        registries[0].put(name, _v(), DETAILS)
    both = threading.Barrier(2)
    refused: list[str] = []

    class Full(Exception):
        pass

    def check(wanted: Rollout, others: list[Rollout]) -> None:
        with suppress(threading.BrokenBarrierError):
            both.wait(0.3)
        if others:
            raise Full

    def pin(registry: Registry, name: str) -> None:
        try:
            registry.pin("t1", name, check)
        except Full:
            refused.append(name)

    threads = [
        threading.Thread(target=pin, args=(registry, name))
        for registry, name in zip(registries, ("a", "b"), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(refused) == 1 and len(registries[0].pinned()) == 1


# -- caches ----------------------------------------------------------------------------------------------------------


def test_cached_names_are_dropped_on_own_changes_and_on_changes_from_the_feed(
    open_database: OpenDatabase,
) -> None:
    registry, other = Registry(open_database()), Registry(open_database())
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


def test_a_request_caches_the_texts_of_all_versions_of_an_alias(open_database: OpenDatabase) -> None:
    registry = Registry(open_database())
    for number, digest in enumerate((D1, D2), start=1):
        registry.put("a", _v(digest), DETAILS, AdapterExtras(f"template {number}"))
    registry.move("t1", "a", "prod", {1: 50, 2: 50})
    assert not registry.is_lookup_local("t1", "a@prod")
    registry.serve("t1", "a@prod", "somebody")
    assert registry.is_lookup_local("t1", "a@prod")
    assert registry.is_lookup_local("t1", "no such reference@@")


# -- outages of PostgreSQL ---------------------------------------------------------------------------------------------


@pytest.fixture
def open_registries(postgresql_server: PostgresqlServer) -> Iterator[Open]:
    """Each call opens the same registry as another process would."""
    place = postgresql_server.make_database()
    with ExitStack() as stack:
        yield lambda: Registry(stack.enter_context(closing(Database(place))))


def test_during_an_outage_cached_names_are_answered_and_others_refused(
    postgresql_server: PostgresqlServer, open_registries: Open
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
    postgresql_server.kill()
    with pytest.raises(StoreUnavailable):
        registry.changes(cursor)
    with pytest.raises(StoreUnavailable):
        registry.put("changing", _v(D2), DETAILS)
    assert {reference: registry.get("t1", reference) for reference in references} == known
    assert registry.rollout("t1", "known@prod") == rollout
    for reference in ("unknown", "known@canary", "nothing"):
        with pytest.raises(StoreUnavailable):
            registry.get("t1", reference)
    postgresql_server.start()
    catch_up(other, None)
    other.put("changing", _v(D2), DETAILS)
    other.delete("t1", "known", force=True)
    catch_up(registry, cursor)
    assert registry.get("t1", "unknown").number == 1 and registry.get("t1", "changing").number == 2
    with pytest.raises(AdapterNotFound):
        registry.get("t1", "known")


def test_repeated_kills_of_postgresql_lose_no_acknowledged_change_and_readers_converge(
    postgresql_server: PostgresqlServer, open_registries: Open, soak: bool
) -> None:
    writer, reader = open_registries(), open_registries()
    writer.put("a", _v("0" * 64), DETAILS)
    is_over = threading.Event()
    pushed: list[str] = []

    def push() -> None:
        """Pushes one version after the other, and repeats each push until it is acknowledged. The last one too: a
        push that fails without an answer may be in the database."""
        is_acknowledged = True
        while not is_over.is_set() or not is_acknowledged:
            digest = f"{len(pushed) + 1:064x}"
            try:
                writer.put("a", _v(digest), DETAILS)
                pushed.append(digest)
                is_acknowledged = True
            except StoreUnavailable:
                is_acknowledged = False
                time.sleep(0.01)

    thread = threading.Thread(target=push)
    thread.start()
    cursor: str | None = None
    for _ in range(20 if soak else 2):
        so_far = len(pushed)
        deadline = time.monotonic() + WAIT_S
        while len(pushed) < so_far + 5:
            assert time.monotonic() < deadline
            with suppress(StoreUnavailable):
                cursor = reader.changes(cursor).cursor
                reader.get("t1", "a")
        postgresql_server.kill()
        postgresql_server.start()
    is_over.set()
    thread.join(WAIT_S)
    catch_up(reader, cursor)
    catch_up(writer, None)
    records = writer.versions("t1", "a")
    assert [record.version.digest for record in records[::-1]] == ["0" * 64, *pushed]
    assert reader.get("t1", "a") == records[0]
