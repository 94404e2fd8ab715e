import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from slora_adapters.adapter import AdapterExtras
from slora_adapters.database import Database
from slora_adapters.errors import AdapterNotFound, BadAdapterName, StoreUnavailable
from slora_adapters.registry import (
    _MIGRATIONS,
    RESERVATION_S,
    AdapterDetails,
    AdapterRecord,
    Registry,
    check_adapter_name,
)
from slora_adapters.version import AdapterVersion

D1, D2 = "1" * 64, "2" * 64
DETAILS = AdapterDetails(8, ("q_proj", "down_proj"), 4096, AdapterExtras("{{ m }}", '{"top_p": 1}'))


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry(tmp_path: Path, clock: Clock) -> Iterator[Registry]:
    database = Database(tmp_path / "slora.db")
    yield Registry(database, clock)
    database.close()


def _v(tenant: str, digest: str = D1) -> AdapterVersion:
    return AdapterVersion(tenant, digest)


def test_a_name_stands_for_what_was_put_last(registry: Registry, clock: Clock) -> None:
    registry.put("a", _v("t1"), DETAILS)
    clock.now = 2000.0
    other = AdapterDetails(4, ("o_proj",), 1, AdapterExtras())
    change = registry.put("a", _v("t1", D2), other)
    record = registry.get("t1", "a")
    assert record == change.record
    assert (record.version, record.details) == (_v("t1", D2), other)
    assert (record.created_at, record.updated_at) == (1000.0, 2000.0)
    assert change.orphaned == _v("t1", D1) and change.blob_unreferenced


def test_details_come_back_as_they_were_put(registry: Registry) -> None:
    registry.put("a", _v("t1"), DETAILS)
    assert registry.get("t1", "a").details == DETAILS


def test_tenants_do_not_see_each_other(registry: Registry) -> None:
    registry.put("a", _v("t1"), DETAILS)
    registry.put("b", _v("t2"), DETAILS)
    assert [record.name for record in registry.list("t1")] == ["a"]
    with pytest.raises(AdapterNotFound) as foreign:
        registry.get("t1", "b")
    registry.delete("t2", "b")
    with pytest.raises(AdapterNotFound) as absent:
        registry.get("t1", "b")
    assert str(foreign.value) == str(absent.value)
    with pytest.raises(AdapterNotFound):
        registry.delete("t2", "a")


def test_a_version_is_orphaned_with_its_last_name_and_its_blob_with_the_last_tenant(
    registry: Registry,
) -> None:
    for name, tenant in (("a", "t1"), ("b", "t1"), ("a", "t2")):
        registry.put(name, _v(tenant), DETAILS)
    assert registry.delete("t1", "a").orphaned is None, "b still stands for it"
    last_of_t1 = registry.delete("t1", "b")
    assert last_of_t1.orphaned == _v("t1") and not last_of_t1.blob_unreferenced, "t2 needs the bytes"
    last = registry.delete("t2", "a")
    assert last.orphaned == _v("t2") and last.blob_unreferenced


def test_putting_the_same_version_again_orphans_nothing(registry: Registry) -> None:
    registry.put("a", _v("t1"), DETAILS)
    change = registry.put("a", _v("t1"), DETAILS)
    assert change.orphaned is None and not change.blob_unreferenced


def test_collect_drops_only_what_nobody_refers_to(registry: Registry) -> None:
    dropped: list[str] = []
    registry.put("a", _v("t1"), DETAILS)
    assert not registry.collect(D1, dropped.append)
    with registry.reservation(D2):
        assert not registry.collect(D2, dropped.append)
    assert registry.collect(D2, dropped.append)
    registry.delete("t1", "a")
    assert registry.collect(D1, dropped.append)
    assert dropped == [D2, D1]


def test_a_reservation_ends_with_its_put_or_its_block_or_its_time(registry: Registry, clock: Clock) -> None:
    with registry.reservation(D1) as reservation:
        registry.put("a", _v("t1"), DETAILS, reservation)
    registry.delete("t1", "a")
    assert registry.collect(D1, lambda digest: None)
    with pytest.raises(KeyError), registry.reservation(D1):
        raise KeyError
    assert registry.collect(D1, lambda digest: None)
    with registry.reservation(D1) as reservation:
        clock.now += RESERVATION_S
        assert registry.collect(D1, lambda digest: None), "its upload has crashed, as far as anybody knows"
        with pytest.raises(StoreUnavailable, match="took too long"):
            registry.put("a", _v("t1"), DETAILS, reservation)
    assert registry.list("t1") == []


def test_a_drop_that_fails_is_reported_and_changes_nothing(registry: Registry) -> None:
    def fail(digest: str) -> None:
        raise StoreUnavailable("down")

    with pytest.raises(StoreUnavailable):
        registry.collect(D1, fail)
    registry.put("a", _v("t1"), DETAILS)


@pytest.mark.parametrize("name", ["a", "0", "a.b_c-d", "x" * 128])
def test_good_names_are_accepted(registry: Registry, name: str) -> None:
    assert registry.put(check_adapter_name(name), _v("t1"), DETAILS).record.name == name


@pytest.mark.parametrize("name", ["", "A", "-a", ".a", "a/b", "a b", "é", "a\n", "x" * 129, "a\0"])
def test_bad_names_are_refused_with_the_rule(registry: Registry, name: str) -> None:
    with pytest.raises(BadAdapterName, match="cannot be the name of an adapter: 1 to 128"):
        registry.put(name, _v("t1"), DETAILS)


def test_a_version_without_a_proper_digest_is_refused(registry: Registry) -> None:
    with pytest.raises(ValueError, match="is not a digest"):
        registry.put("a", _v("t1", "zz"), DETAILS)


def test_another_process_sees_a_change_at_once(registry: Registry, tmp_path: Path) -> None:
    other_database = Database(tmp_path / "slora.db")
    other = Registry(other_database)
    registry.put("a", _v("t1"), DETAILS)
    assert other.get("t1", "a").version == _v("t1")
    other.put("a", _v("t1", D2), DETAILS)
    assert registry.get("t1", "a").version == _v("t1", D2)
    other_database.close()


def test_of_many_puts_and_deletes_at_once_references_are_never_miscounted(registry: Registry) -> None:
    def use(worker: int) -> None:
        for turn in range(12):
            registry.put(f"n{worker % 3}", _v(f"t{worker % 2}", (D1, D2)[turn % 2]), DETAILS)
            with contextlib.suppress(AdapterNotFound):
                registry.delete(f"t{worker % 2}", f"n{worker % 3}")

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(use, range(6)))
    assert registry.list("t0") == registry.list("t1") == []
    assert registry.collect(D1, lambda digest: None) and registry.collect(D2, lambda digest: None)


def anything(record: AdapterRecord, others: Sequence[AdapterRecord]) -> None:
    """May be pinned."""


class Refused(Exception):
    pass


def nothing(record: AdapterRecord, others: Sequence[AdapterRecord]) -> None:
    raise Refused


def test_a_pin_stays_with_its_name_when_that_moves_and_goes_with_it(registry: Registry) -> None:
    for tenant in ("t1", "t2"):
        registry.put("a", _v(tenant), DETAILS)
    assert registry.pin("t1", "a", anything) == registry.get("t1", "a")
    larger = replace(DETAILS, packed_bytes=9999)
    moved = registry.put("a", _v("t1", D2), larger).record
    assert moved.pinned and registry.pinned() == [moved] == registry.list("t1")
    assert not registry.get("t2", "a").pinned, "another tenant's name is another name"
    assert registry.delete("t1", "a").record.pinned
    assert registry.pinned() == []
    assert not registry.put("a", _v("t1"), DETAILS).record.pinned, "it is a new name"


def test_to_pin_or_unpin_twice_is_to_do_it_once(registry: Registry) -> None:
    registry.put("a", _v("t1"), DETAILS)
    assert not registry.unpin("t1", "a").pinned
    assert registry.pin("t1", "a", anything) == registry.pin("t1", "a", nothing), "it is pinned already"
    assert registry.unpin("t1", "a") == registry.unpin("t1", "a") == registry.get("t1", "a")
    assert registry.pinned() == []


def test_what_may_not_be_pinned_is_not(registry: Registry) -> None:
    for tenant, name in (("t2", "c"), ("t1", "b"), ("t1", "a")):
        registry.put(name, _v(tenant), DETAILS)
    told: list[tuple[str, list[str]]] = []
    for tenant, name in (("t2", "c"), ("t1", "b")):
        registry.pin(tenant, name, lambda one, others: told.append((one.name, [o.name for o in others])))
    assert told == [("c", []), ("b", ["c"])]
    with pytest.raises(Refused):
        registry.pin("t1", "a", nothing)
    assert [record.name for record in registry.pinned()] == ["b", "c"]
    with pytest.raises(AdapterNotFound):
        registry.pin("t1", "c", anything)
    with pytest.raises(AdapterNotFound):
        registry.unpin("t1", "c")


def test_names_of_an_older_release_are_not_pinned_and_their_size_is_that_of_their_tensors(
    tmp_path: Path,
) -> None:
    database = Database(tmp_path / "slora.db")
    database.migrate("registry", _MIGRATIONS[:1])
    with database.transaction() as connection:
        connection.execute(
            "INSERT INTO adapters VALUES ('t1', 'old', ?, 8, '[\"q_proj\"]', 4096, NULL, NULL, 1.0, 2.0)",
            (D1,),
        )
    registry = Registry(database)
    old = registry.get("t1", "old")
    assert not old.pinned and registry.list("t1") == [old]
    assert (old.version, old.created_at, old.updated_at) == (_v("t1"), 1.0, 2.0)
    assert old.details.packed_bytes is None and old.details.pool_bytes == 4096
    assert registry.pin("t1", "old", anything).pinned and registry.pinned() == [replace(old, pinned=True)]
    known = replace(old.details, packed_bytes=8192)
    assert registry.put("old", _v("t1"), known).record.details.pool_bytes == 8192
    assert registry.get("t1", "old").details == known and registry.get("t1", "old").pinned
    database.close()
