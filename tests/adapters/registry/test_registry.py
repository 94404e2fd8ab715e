"""The contract of the registry, on every database. `test_registry_aliases.py` tests aliases."""

import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from sqlalchemy.sql import Executable

from slora_adapters.errors import AdapterNotFound, BadAdapterName, BadAlias, StoreUnavailable
from slora_adapters.peft.adapter import AdapterExtras
from slora_adapters.registry import table
from slora_adapters.registry.record import AdapterDetails, Rollout, StorageUsage, check_adapter_name
from slora_adapters.registry.registry import RESERVATION_S, Registry
from slora_adapters.version import AdapterVersion
from tests.adapters.registry_places import OpenDatabase, WatchedDatabase, reserved
from tests.support.clock import Clock

D1, D2, D3 = "1" * 64, "2" * 64, "3" * 64
DETAILS = AdapterDetails(8, ("q_proj", "down_proj"), 4096, 8192, 4400)
EXTRAS = AdapterExtras("{{ m }}", '{"top_p": 1}')


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


@pytest.fixture
def registry(open_database: OpenDatabase, clock: Clock) -> Registry:
    return Registry(open_database(), clock)


def _v(tenant: str, digest: str = D1) -> AdapterVersion:
    return AdapterVersion(tenant, digest)


def test_each_push_is_a_version_and_the_bare_name_serves_the_newest(registry: Registry, clock: Clock) -> None:
    first = registry.put("a", _v("t1"), DETAILS)
    clock.now = 2000.0
    other = AdapterDetails(4, ("o_proj",), 1)
    second = registry.put("a", _v("t1", D2), other)
    assert first.is_new and second.is_new
    assert (
        registry.get("t1", "a")
        == registry.get("t1", "a@2")
        == registry.get("t1", "a@latest")
        == second.record
    )
    assert (second.record.version, second.record.details, second.record.number) == (_v("t1", D2), other, 2)
    assert (second.record.named_at, second.record.created_at) == (1000.0, 2000.0)
    assert registry.get("t1", "a@1") == first.record, "it is still there, as it was"
    assert registry.versions("t1", "a") == [second.record, first.record]


def test_pushing_the_newest_version_again_is_a_no_op(registry: Registry, clock: Clock) -> None:
    registry.put("a", _v("t1", D2), DETAILS)
    first = registry.put("a", _v("t1"), DETAILS)
    registry.roll_back("t1", "a", "latest")
    clock.now = 2000.0
    again = registry.put("a", _v("t1"), DETAILS)
    assert not again.is_new and again.record == first.record
    assert registry.get("t1", "a").number == 1, "a push that is tried again does not undo a rollback"
    assert registry.put("a", _v("t1", D2), DETAILS).record.number == 3, (
        "older weights again are newer than these"
    )


def test_what_a_push_would_do_is_known_before_it(registry: Registry) -> None:
    assert registry.before_push("a", _v("t1"), EXTRAS) == (True, StorageUsage(0, 0, None))
    registry.put("a", _v("t1"), DETAILS, EXTRAS)
    usage = registry.storage_usage("t1", D1)
    assert registry.before_push("a", _v("t1"), EXTRAS) == (False, usage)
    assert registry.before_push("a", _v("t1"), AdapterExtras()) == (True, usage)
    assert registry.before_push("b", _v("t1"), EXTRAS) == (True, usage)
    assert registry.before_push("a", _v("t2"), EXTRAS) == (True, StorageUsage(0, 0, None))
    registry.put("a", _v("t1", D2), DETAILS)
    assert registry.before_push("a", _v("t1"), EXTRAS) == (True, registry.storage_usage("t1", D1))
    published = registry.put("a", _v("t1", D2), DETAILS)
    assert not published.is_new and list(published.rollouts) == registry.aliases("t1", "a")


def test_storage_usage_is_all_versions_of_a_tenant_and_the_bytes_of_each_weights_once(
    registry: Registry,
) -> None:
    assert registry.storage_usage("t1", D1) == StorageUsage(0, 0, None)
    larger = replace(DETAILS, blob_bytes=10_000)
    for name, digest, details in (("a", D1, DETAILS), ("a", D2, larger), ("b", D1, DETAILS)):
        registry.put(name, _v("t1", digest), details)
    registry.put("a", _v("t2", D2), larger)
    assert registry.storage_usage("t1", D1) == StorageUsage(3, 14_400, 4400)
    assert registry.storage_usage("t1", D3) == StorageUsage(3, 14_400, None)
    registry.roll_back("t1", "a", "latest")
    assert registry.versions("t1", "a", limit=1) == [registry.get("t1", "a@2")] != [registry.get("t1", "a")]
    registry.delete("t1", "a@2")
    assert registry.versions("t1", "a", limit=1) == [registry.get("t1", "a@1")]
    assert registry.storage_usage("t1", D2) == StorageUsage(2, 4400, None)


def test_the_same_weights_with_another_template_are_another_version(registry: Registry) -> None:
    registry.put("a", _v("t1"), DETAILS, EXTRAS)
    retold = AdapterExtras("{{ other }}")
    assert registry.put("a", _v("t1"), DETAILS, retold).record.number == 2
    assert not registry.put("a", _v("t1"), DETAILS, retold).is_new
    assert registry.serve("t1", "a@1")[1] == EXTRAS and registry.serve("t1", "a")[1] == retold
    assert registry.delete("t1", "a@1").orphaned == (), "the other version has these weights"


def test_details_and_extras_come_back_as_they_were_put(registry: Registry) -> None:
    for number, extras in enumerate((EXTRAS, AdapterExtras(), AdapterExtras("ü"), AdapterExtras("", "")), 1):
        registry.put("a", _v("t1"), DETAILS, extras)
        record, found = registry.serve("t1", f"a@{number}")
        assert (record.details, found) == (DETAILS, extras)
        assert record == registry.get("t1", f"a@{number}")
    assert [record.extras.template_bytes for record in registry.versions("t1", "a")] == [0, 2, None, 7]


def test_the_extras_of_a_version_are_counted_and_deleted_with_it(registry: Registry) -> None:
    """Born from a bug: extras did not count, so a tenant could store any amount of them beside small weights."""
    for digest in (D1, D2):
        registry.put("a", _v("t1", digest), DETAILS, AdapterExtras("ü" * 1000, "{}"))
    registry.put("b", _v("t1"), DETAILS, AdapterExtras("x"))
    assert registry.storage_usage("t1", D1) == StorageUsage(3, 2 * 4400 + 2 * 2002 + 1, 4400)
    registry.delete("t1", "a@1")
    assert registry.storage_usage("t1", D1) == StorageUsage(2, 2 * 4400 + 2002 + 1, 4400)
    registry.delete("t1", "a")
    registry.delete("t1", "b")
    assert registry.storage_usage("t1", D1) == StorageUsage(0, 0, None)


def test_a_lookup_during_delete_and_push_returns_the_extras_of_the_new_version(database_place: str) -> None:
    """The name is deleted and pushed again between the two lookups of one request. Its version numbers start at 1
    again."""
    others = iter([AdapterExtras("{{ new }}")])
    with contextlib.closing(WatchedDatabase(database_place)) as database:
        registry = Registry(database)
        registry.put("a", _v("t1"), DETAILS, EXTRAS)

        def interrupt(statement: Executable, _: object) -> None:
            if statement is table.EXTRAS:
                for extras in others:
                    registry.delete("t1", "a")
                    registry.put("a", _v("t1", D2), DETAILS, extras)

        database.before = interrupt
        record, extras = registry.serve("t1", "a")
        assert (record.version.digest, extras) == (D2, AdapterExtras("{{ new }}"))
        registry.delete("t1", "a")
        with pytest.raises(AdapterNotFound):
            registry.serve("t1", "a")


class QuotaFull(Exception):
    pass


def test_concurrent_pushes_do_not_exceed_the_tenants_quota(open_database: OpenDatabase) -> None:
    """Born from a bug: two processes checked the tenant's quota at the same time, and then each made a version."""
    most = 3

    def check(usage: StorageUsage) -> None:
        if usage.num_versions >= most:
            raise QuotaFull

    def push(worker: int) -> int:
        own, kept = Registry(open_database()), 0
        for turn in range(4):
            with contextlib.suppress(QuotaFull):
                own.put(f"n{worker}", _v("t1", f"{worker * 9 + turn:064x}"), DETAILS, check=check)
                kept += 1
        return kept

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(push, range(4))) == most
    assert Registry(open_database()).storage_usage("t1", D1).num_versions == most


def test_pushing_the_newest_version_again_skips_the_quota_check(registry: Registry) -> None:
    def refuse(usage: StorageUsage) -> None:
        raise QuotaFull

    registry.put("a", _v("t1"), DETAILS)
    assert not registry.put("a", _v("t1"), DETAILS, check=refuse).is_new
    with pytest.raises(QuotaFull):
        registry.put("a", _v("t1", D2), DETAILS, check=refuse)
    assert registry.get("t1", "a").number == 1


def test_tenants_do_not_see_each_other(registry: Registry) -> None:
    registry.put("a", _v("t1"), DETAILS)
    registry.put("b", _v("t2"), DETAILS)
    assert [rollout.label for rollout in registry.list("t1")] == ["a"]
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
    assert registry.delete("t1", "a").orphaned == (), "b still stands for it"
    last_of_t1 = registry.delete("t1", "b")
    assert last_of_t1.orphaned == (_v("t1"),) and registry.blobs.find_referenced([D1]), "t2 needs the bytes"
    last = registry.delete("t2", "a")
    assert last.orphaned == (_v("t2"),) and not registry.blobs.find_referenced([D1])


def test_collect_deletes_only_unreferenced_blobs(registry: Registry) -> None:
    dropped: list[str] = []
    registry.put("a", _v("t1"), DETAILS)
    assert not registry.blobs.collect(D1, dropped.append)
    with reserved(registry, D2):
        assert not registry.blobs.collect(D2, dropped.append)
    assert registry.blobs.collect(D2, dropped.append)
    registry.delete("t1", "a")
    assert registry.blobs.collect(D1, dropped.append)
    assert dropped == [D2, D1]


def test_a_reservation_ends_with_its_put_or_its_release_or_its_time(registry: Registry, clock: Clock) -> None:
    with reserved(registry, D1) as reservation:
        registry.put("a", _v("t1"), DETAILS, reservation=reservation)
    registry.delete("t1", "a")
    assert registry.blobs.collect(D1, lambda digest: None)
    registry.blobs.release(registry.blobs.reserve(D1))
    assert registry.blobs.collect(D1, lambda digest: None)
    with reserved(registry, D1) as reservation:
        clock.now += RESERVATION_S
        assert registry.blobs.collect(D1, lambda digest: None), "the registry takes its upload for crashed"
        with pytest.raises(StoreUnavailable, match="took too long"):
            registry.put("a", _v("t1"), DETAILS, reservation=reservation)
    assert registry.list("t1") == []


def test_names_and_digests_are_accepted_or_refused_with_the_rule(registry: Registry) -> None:
    for name in ("a", "0", "a.b_c-d", "x" * 128):
        assert registry.put(check_adapter_name(name), _v("t1"), DETAILS).record.name == name
    for name in ("", "A", "-a", ".a", "a/b", "a b", "é", "a\n", "x" * 129, "a\0"):
        with pytest.raises(BadAdapterName, match="is not a valid adapter name: a name has 1 to 128"):
            registry.put(name, _v("t1"), DETAILS)
    with pytest.raises(ValueError, match="is not a digest"):
        registry.put("a", _v("t1", "zz"), DETAILS)


NAMES_SORTED = ["a", "a-b", "a.b", "a1", "a_b", "ab", "b"]


def test_names_come_in_pages_behind_a_name_that_need_not_be_there(registry: Registry) -> None:
    for name in reversed(NAMES_SORTED):
        registry.put(name, _v("t1"), DETAILS)
        registry.put(name, _v("t1", D2), DETAILS)
        registry.move("t1", name, "zz", {1: 100})
    registry.put("aa", _v("t2"), DETAILS)
    registry.move("t1", "a", "latest", {1: 50, 2: 50})

    def page(limit: int | None = None, after: str | None = None) -> list[str]:
        return [one.label for one in registry.list("t1", limit=limit, after=after)]

    assert page() == NAMES_SORTED
    assert page(2) == ["a", "a-b"], "of two versions that a name serves each is not a name"
    assert registry.list("t1", limit=1)[0].targets == {1: 50, 2: 50}
    assert page(3, "a-b") == ["a.b", "a1", "a_b"] and page(after="a_b") == ["ab", "b"]
    registry.delete("t1", "a-b", force=True)
    assert page(3, "a-b") == ["a.b", "a1", "a_b"] and page(1, "a@zz") == ["a_b"]
    assert page(3, "b") == [] and page(3, "") == ["a", "a.b", "a1"]


def test_aliases_of_all_names_come_in_pages_by_name_and_alias(registry: Registry) -> None:
    for name in ("a", "a-b"):
        for digest in (D1, D2):
            registry.put(name, _v("t1", digest), DETAILS)
        for alias in ("canary", "prod"):
            registry.move("t1", name, alias, {1: 50, 2: 50})

    def page(limit: int | None = None, after: tuple[str, str] | None = None) -> list[str]:
        return [one.label for one in registry.rollouts("t1", limit=limit, after=after)]

    everything = ["a@canary", "a", "a@prod", "a-b@canary", "a-b", "a-b@prod"]
    assert page() == everything and page(2) == everything[:2]
    assert page(3, ("a", "latest")) == everything[2:5] and page(9, ("a", "prod")) == everything[3:]
    registry.delete_alias("t1", "a", "prod")
    assert page(1, ("a", "prod")) == ["a-b@canary"] and page(9, ("a-b", "prod")) == []
    assert [one.label for one in registry.aliases("t1", "a")] == everything[:2]
    assert registry.aliases("t1", "c") == registry.aliases("t2", "a") == []


def test_versions_come_in_pages_newest_first(registry: Registry) -> None:
    for number in range(1, 13):
        registry.put("a", _v("t1", f"{number:064x}"), DETAILS)
    registry.put("b", _v("t1"), DETAILS)

    def page(limit: int | None = None, after: int | None = None) -> list[int]:
        return [record.number for record in registry.versions("t1", "a", limit=limit, after=after)]

    assert page() == list(range(12, 0, -1)) and page(2) == [12, 11] and page(2, 11) == [10, 9]
    registry.delete("t1", "a@9")
    assert page(2, 11) == [10, 8] and page(2, 9) == [8, 7]
    assert page(2, 1) == [], "it is there; there are just none that are older"
    with pytest.raises(AdapterNotFound):
        registry.versions("t1", "c", limit=2, after=11)


def test_concurrent_puts_and_deletes_never_miscount_references(registry: Registry) -> None:
    def use(worker: int) -> None:
        for turn in range(12):
            registry.put(f"n{worker % 3}", _v(f"t{worker % 2}", (D1, D2)[turn % 2]), DETAILS)
            with contextlib.suppress(AdapterNotFound):
                registry.delete(f"t{worker % 2}", f"n{worker % 3}")

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(use, range(6)))
    assert registry.list("t0") == registry.list("t1") == []
    assert registry.blobs.collect(D1, lambda digest: None) and registry.blobs.collect(D2, lambda digest: None)


def anything(wanted: Rollout, others: Sequence[Rollout]) -> None:
    """A pin check that accepts every rollout."""


class Refused(Exception):
    pass


def nothing(wanted: Rollout, others: Sequence[Rollout]) -> None:
    raise Refused


def test_the_pin_of_an_alias_covers_exactly_the_versions_of_the_alias(registry: Registry) -> None:
    for digest in (D1, D2, D3):
        registry.put("a", _v("t1", digest), DETAILS)
    registry.move("t1", "a", "prod", {1: 90, 2: 10})
    assert registry.pin("t1", "a@prod", anything).pinned
    assert [sorted(one.records) for one in registry.pinned()] == [[1, 2]]
    assert registry.roll_back("t1", "a", "latest").pinned is False
    registry.move("t1", "a", "prod", {2: 100})
    assert [sorted(one.records) for one in registry.pinned()] == [[2]]
    assert not registry.put("a", _v("t1"), DETAILS).moved_pin
    with pytest.raises(BadAlias, match="'a@1' is a version"):
        registry.pin("t1", "a@1", anything)
    assert registry.delete_alias("t1", "a", "prod").pinned and registry.pinned() == []


def test_pinning_and_unpinning_are_idempotent(registry: Registry) -> None:
    registry.put("a", _v("t1"), DETAILS)
    assert not registry.unpin("t1", "a").pinned
    assert registry.pin("t1", "a", anything) == registry.pin("t1", "a", nothing), "it is pinned already"
    assert registry.unpin("t1", "a") == registry.unpin("t1", "a") == registry.rollout("t1", "a")
    assert registry.pinned() == []


def test_a_refused_pin_is_not_stored(registry: Registry) -> None:
    for tenant, name in (("t2", "c"), ("t1", "b"), ("t1", "a")):
        registry.put(name, _v(tenant), DETAILS)
    told: list[tuple[str, list[str]]] = []
    for tenant, name in (("t2", "c"), ("t1", "b")):
        registry.pin(tenant, name, lambda one, others: told.append((one.label, [o.label for o in others])))
    assert told == [("c", []), ("b", ["c"])]
    with pytest.raises(Refused):
        registry.pin("t1", "a", nothing)
    assert [rollout.label for rollout in registry.pinned()] == ["b", "c"]
    with pytest.raises(AdapterNotFound):
        registry.pin("t1", "c", anything)
    with pytest.raises(AdapterNotFound):
        registry.unpin("t1", "c")
