"""The feed of changes that processes read from each other, for every storage of the registry."""

import itertools
import time
from collections.abc import Iterator

import pytest

from slora_adapters.database import change_feed
from slora_adapters.database.change_feed import Change
from slora_adapters.registry.record import AdapterDetails
from slora_adapters.registry.registry import Registry
from slora_adapters.version import AdapterVersion
from tests.adapters.registry_places import OpenDatabase
from tests.support.forked_program import ForkedProgram

D1, D2 = "1" * 64, "2" * 64
DETAILS = AdapterDetails(8, ("q_proj",), 4096)
WAIT_S = 300


def _v(digest: str = D1, tenant: str = "t1") -> AdapterVersion:
    return AdapterVersion(tenant, digest)


def follow(registry: Registry, cursor: str) -> Iterator[Change]:
    """Yields all changes after a cursor, in order."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        changes = registry.changes(cursor)
        assert not changes.resync
        yield from changes.changes
        cursor = changes.cursor
    raise AssertionError(f"nothing came within {WAIT_S} s")


def test_another_process_reads_exactly_the_changes_in_order(open_database: OpenDatabase) -> None:
    writer, reader = Registry(open_database()), Registry(open_database())
    start = reader.changes()
    assert start.resync and start.changes == (), "what was before is not known"
    writer.put("a", _v(), DETAILS)
    writer.put("a", _v(D2), DETAILS)
    writer.put("a", _v(D2), DETAILS)
    writer.move("t1", "a", "prod", {1: 100})
    writer.move("t1", "a", "prod", {1: 100})
    writer.put("b", _v(), DETAILS)
    writer.pin("t1", "a@prod", lambda one, others: None)
    writer.pin("t1", "a@prod", lambda one, others: None)
    writer.move("t1", "a", "prod", {2: 100})
    writer.delete("t1", "a@1")
    writer.delete("t1", "b")
    writer.delete("t1", "a", force=True)
    told = reader.changes(start.cursor)
    assert told.changes == (
        *[Change("t1", "a")] * 3,
        Change("t1", "b"),
        *[Change("t1", "a", moved_pin=True)] * 2,
        Change("t1", "a"),
        Change("t1", "b", (_v(),)),
        Change("t1", "a", (_v(D2),), moved_pin=True),
    )
    assert not told.resync and told.is_all
    assert reader.changes(told.cursor).changes == () and writer.changes(told.cursor).changes == ()
    assert reader.changes(start.cursor) == told, "who has not got them may ask again"


def test_many_changes_come_in_several_answers(
    open_database: OpenDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(change_feed, "_MAX_CHANGES", 3)
    registry = Registry(open_database())
    changes = registry.changes()
    for number in range(7):
        registry.put(f"n{number}", _v(), DETAILS)
    seen: list[list[str]] = []
    while not seen or not changes.is_all:
        changes = registry.changes(changes.cursor)
        seen.append([change.name for change in changes.changes])
    assert seen == [["n0", "n1", "n2"], ["n3", "n4", "n5"], ["n6"]]


def test_a_reader_behind_the_start_of_the_feed_must_resync(
    open_database: OpenDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(change_feed, "KEPT_CHANGES", 5)
    registry = Registry(open_database())
    registry.put("a", _v(), DETAILS)
    cursor = registry.changes().cursor
    for number in range(4):
        registry.put(f"n{number}", _v(), DETAILS)
    assert len(registry.changes(cursor).changes) == 4, "the one that it stands for is kept, too"
    registry.put("b", _v(), DETAILS)
    late = registry.changes(cursor)
    assert late.resync and late.changes == ()
    registry.put("c", _v(), DETAILS)
    after = registry.changes(late.cursor)
    assert [change.name for change in after.changes] == ["c"] and not after.resync


WRITER = """
import sys
from slora_adapters.database.database import Database
from slora_adapters.registry.registry import AdapterDetails
from slora_adapters.registry.registry import Registry
from slora_adapters.version import AdapterVersion

registry = Registry(Database(sys.argv[1]))
details = AdapterDetails(8, ("q_proj",), 4096)
for turn in range(int(sys.argv[3])):
    version = AdapterVersion("t1", f"{int(sys.argv[2]) * 1000 + turn:064x}")
    number = registry.put("busy", version, details).record.number
    registry.move("t1", "busy", f"of-{sys.argv[2]}", {number: 100})
"""


def test_concurrent_writers_of_one_name_lose_no_update_and_no_feed_entry(
    open_database: OpenDatabase, soak: bool
) -> None:
    num_writers, num_turns = 3, 200 if soak else 12
    registry = Registry(open_database())
    cursor = registry.changes().cursor
    writers = [
        ForkedProgram(WRITER, open_database.place, writer, num_turns) for writer in range(1, num_writers + 1)
    ]
    heard = list(itertools.islice(follow(registry, cursor), 2 * num_writers * num_turns))
    assert [writer.finish() for writer in writers] == [(0, "")] * num_writers
    assert {change.name for change in heard} == {"busy"}
    records = registry.versions("t1", "busy")
    assert [record.number for record in records] == list(range(num_writers * num_turns, 0, -1))
    assert len({record.version for record in records}) == len(records), "each push has its own number"
    for writer in range(1, num_writers + 1):
        last = registry.get("t1", f"busy@of-{writer}").version.digest
        assert int(last, 16) == writer * 1000 + num_turns - 1
    assert registry.changes(cursor).changes[-1].name == "busy"
