"""Aliases in the registry: moves, rollbacks and deletions. A simple model serves as reference."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from slora_adapters.database.change_feed import Changes
from slora_adapters.errors import AdapterError, AdapterInUse, AdapterNotFound, AliasConflict, BadAlias
from slora_adapters.registry.record import (
    LATEST,
    MAX_ALIASES,
    MAX_HISTORY,
    AdapterDetails,
    Removal,
    Rollout,
    StorageUsage,
)
from slora_adapters.registry.registry import Registry
from slora_adapters.version import AdapterVersion
from tests.adapters.registry_places import OpenDatabase
from tests.postgresql_server import PostgresqlServer

DIGESTS = tuple(digit * 64 for digit in "1234")
DETAILS = AdapterDetails(8, ("q_proj",), 4096)


def push(registry: Registry, digest: int, name: str = "a", tenant: str = "t1") -> int:
    return registry.put(name, AdapterVersion(tenant, DIGESTS[digest]), DETAILS).record.number


@pytest.fixture
def registry(open_database: OpenDatabase) -> Registry:
    """A registry in which the name `a` of tenant `t1` has three versions."""
    registry = Registry(open_database())
    for digest in range(3):
        push(registry, digest)
    return registry


def test_an_alias_moves_only_from_its_expected_targets(registry: Registry) -> None:
    registry.move("t1", "a", "prod", {1: 100}, expected={})
    with pytest.raises(AliasConflict, match=r"a@prod points at 1 \(100%\), not at no version"):
        registry.move("t1", "a", "prod", {2: 100}, expected={})
    registry.move("t1", "a", "prod", {1: 90, 2: 10}, expected={1: 100})
    with pytest.raises(AliasConflict, match=r"points at 1 \(90%\), 2 \(10%\), not at 1 \(100%\)"):
        registry.move("t1", "a", "prod", {3: 100}, expected={1: 100})
    again = registry.move("t1", "a", "prod", {1: 90, 2: 10}, expected={1: 100})
    assert again.targets == {1: 90, 2: 10}, "who lost the answer may ask again"
    assert registry.roll_back("t1", "a", "prod").targets == {1: 100}, "and has moved it once"


def test_a_version_is_found_by_every_reference_that_serves_it(registry: Registry) -> None:
    registry.move("t1", "a", "prod", {1: 90, 3: 10})
    versions = [AdapterVersion("t1", digest) for digest in DIGESTS]
    found = registry.find_references([*versions, AdapterVersion("t2", DIGESTS[0])])
    assert {version: set(references) for version, references in found.items()} == {
        versions[0]: {"a@1", "a@prod"},
        versions[1]: {"a@2"},
        versions[2]: {"a", "a@3", "a@latest", "a@prod"},
    }


def test_another_process_sees_a_move_and_a_rollback_at_once(
    registry: Registry, open_database: OpenDatabase
) -> None:
    other = Registry(open_database())
    registry.move("t1", "a", "prod", {1: 100})
    assert other.get("t1", "a@prod").number == 1
    other.move("t1", "a", "prod", {2: 100})
    assert registry.get("t1", "a@prod").number == 2
    registry.roll_back("t1", "a", "prod")
    assert other.get("t1", "a@prod").number == 1


def test_of_concurrent_moves_from_the_same_targets_exactly_one_succeeds(registry: Registry) -> None:
    registry.move("t1", "a", "prod", {1: 100})

    def move(weight: int) -> bool:
        with suppress(AliasConflict):
            registry.move("t1", "a", "prod", {1: 100 - weight, 2: weight}, expected={1: 100})
            return True
        return False

    with ThreadPoolExecutor(6) as threads:
        assert sum(threads.map(move, range(1, 13))) == 1


def test_a_user_keeps_its_version_and_requests_without_a_user_are_split_at_random(registry: Registry) -> None:
    registry.move("t1", "a", "prod", {1: 50, 2: 50})
    users = [f"u{number}" for number in range(40)]
    first = {user: registry.get("t1", "a@prod", user).number for user in users}
    assert set(first.values()) == {1, 2}
    assert first == {user: registry.get("t1", "a@prod", user).number for user in users}
    registry.move("t1", "a", "prod", {1: 30, 2: 70})
    assert all(registry.get("t1", "a@prod", user).number == 2 for user in users if first[user] == 2)
    assert {registry.get("t1", "a@prod").number for _ in range(200)} == {1, 2}


def test_a_name_that_does_not_follow_pushes_stays_until_it_is_set_to_follow(registry: Registry) -> None:
    registry.move("t1", "a", LATEST, {1: 100})
    registry.move("t1", "a", "staging", {1: 100}, follows_pushes=True)
    push(registry, 3)
    assert [registry.get("t1", reference).number for reference in ("a", "a@staging")] == [1, 4]
    registry.move("t1", "a", LATEST, {4: 100}, follows_pushes=True)
    assert push(registry, 0) == registry.get("t1", "a").number == 5
    registry.roll_back("t1", "a", LATEST)
    assert registry.get("t1", "a").number == 4
    assert push(registry, 1) == registry.get("t1", "a").number, "a rollback says nothing about later pushes"


def test_an_alias_points_only_at_existing_versions(registry: Registry) -> None:
    for name, targets in (("a", {4: 100}), ("a", {1: 50, 9: 50}), ("b", {1: 100})):
        with pytest.raises(AdapterNotFound):
            registry.move("t1", name, "prod", targets)
    with pytest.raises(AdapterNotFound):
        registry.move("t2", "a", "prod", {1: 100})
    assert [one.alias for one in registry.rollouts("t1")] == [LATEST]


def test_deleting_a_version_that_an_alias_serves_is_refused_with_the_alias(registry: Registry) -> None:
    registry.move("t1", "a", "prod", {1: 90, 2: 10})
    for reference, aliases in (("a@2", ("prod",)), ("a@3", (LATEST,)), ("a", ("prod",))):
        with pytest.raises(AdapterInUse) as refused:
            registry.delete("t1", reference)
        assert refused.value.aliases == aliases
    registry.move("t1", "a", "prod", {3: 100})
    assert [record.number for record in registry.delete("t1", "a@2").records] == [2]
    registry.delete_alias("t1", "a", "prod")
    assert [record.number for record in registry.delete("t1", "a").records] == [1, 3]


def test_a_forced_deletion_shifts_aliases_to_their_other_versions_or_removes_them(registry: Registry) -> None:
    registry.move("t1", "a", "prod", {1: 90, 2: 10})
    registry.move("t1", "a", "old", {1: 100})
    registry.pin("t1", "a@old", lambda wanted, others: None)
    assert registry.delete("t1", "a@1", force=True).moved_pin
    assert {one.alias: one.targets for one in registry.aliases("t1", "a")} == {
        "prod": {2: 100},
        LATEST: {3: 100},
    }
    registry.delete("t1", "a@3", force=True)
    assert registry.get("t1", "a").number == 2, "a bare name serves the newest that is left"
    with pytest.raises(AliasConflict):
        registry.roll_back("t1", "a", LATEST)
    assert push(registry, 3) == registry.get("t1", "a").number == 4, "numbers do not come back"
    registry.delete("t1", "a", force=True)
    assert registry.rollouts("t1") == []
    assert push(registry, 0) == 1, "it is another name"


def test_deleting_the_last_version_of_a_name_requires_force(registry: Registry) -> None:
    push(registry, 0, "b")
    with pytest.raises(AdapterInUse):
        registry.delete("t1", "b@1")
    assert registry.delete("t1", "b@1", force=True).orphaned == (), "a@1 has these weights"
    assert [one.label for one in registry.list("t1")] == ["a"]


def test_latest_can_be_moved_but_not_deleted(registry: Registry) -> None:
    with pytest.raises(BadAlias, match="because requests for the bare name use it"):
        registry.delete_alias("t1", "a", LATEST)
    with pytest.raises(BadAlias, match="is an alias"):
        registry.delete("t1", "a@latest", force=True)
    with pytest.raises(AdapterNotFound):
        registry.delete_alias("t1", "a", "prod")
    with pytest.raises(AdapterNotFound):
        registry.roll_back("t1", "a", "prod")


def test_aliases_of_a_name_are_bounded(registry: Registry) -> None:
    for number in range(MAX_ALIASES - 1):
        registry.move("t1", "a", f"alias-{number}", {1: 100})
    with pytest.raises(BadAlias, match="'a' already has 32 aliases"):
        registry.move("t1", "a", "one-more", {1: 100})
    registry.move("t1", "a", "alias-0", {2: 100})


# -- comparison with a simple model ----------------------------------------------------------------------------------


@dataclass
class PlainAlias:
    targets: dict[int, int]
    follows: bool
    pinned: bool = False
    before: list[tuple[dict[int, int], bool]] = field(default_factory=list)

    def move(self, targets: dict[int, int], follows: bool) -> None:
        if (targets, follows) != (self.targets, self.follows):
            self.before = [*self.before, (self.targets, self.follows)][-MAX_HISTORY:]
            self.targets, self.follows = targets, follows


@dataclass
class PlainName:
    last: int = 0
    versions: dict[int, int] = field(default_factory=dict)
    aliases: dict[str, PlainAlias] = field(default_factory=dict)


# One key is used most of the time, so that its name lives long enough to have a history.
keys = st.sampled_from([*[("t1", "a")] * 4, ("t1", "b"), ("t2", "a")])
aliases, digests = st.sampled_from([LATEST, "prod"]), st.sampled_from(range(3))


def plainly(value: Any) -> Any:
    """The value without random ids and times, so that two registries can be compared."""
    if isinstance(value, Rollout):
        targets = {number: (value.targets[number], one.version) for number, one in value.records.items()}
        return value.tenant, value.label, targets, value.follows_pushes, value.pinned
    if isinstance(value, Removal):
        records = [record.label for record in value.records]
        return records, set(value.orphaned), value.moved_pin
    if isinstance(value, Changes):
        return [(one.tenant, one.name, set(one.orphaned), one.moved_pin) for one in value.changes]
    return value


class RegistryMachine(RuleBasedStateMachine):
    """Compares two registries and a model after each step: all lookups, the feeds, and the weights that each
    deletion orphans."""

    server: PostgresqlServer

    @initialize()
    def open(self) -> None:
        self.stack = ExitStack()
        folder = Path(self.stack.enter_context(TemporaryDirectory()))
        places = [
            OpenDatabase(self.stack, str(folder / "slora.db")),
            OpenDatabase(self.stack, self.server.migrated_database()),
        ]
        self.registries = [Registry(place()) for place in places]
        # A reader that sees the second registry from another process.
        self.reader = Registry(places[1]())
        self.reader_cursor = self.reader.changes().cursor
        self.cursors = [registry.changes().cursor for registry in self.registries]
        self.plain: dict[tuple[str, str], PlainName] = {}

    def teardown(self) -> None:
        self.stack.close()

    def each(self, ask: Callable[[Registry], Any]) -> Any:
        """The common result of `ask` on all registries. A refusal must be the same on all of them too."""
        answers: list[Any] = []
        for registry in self.registries:
            try:
                answers.append(ask(registry))
            except AdapterError as error:
                answers.append(error)
        first, *others = [str(one) if isinstance(one, Exception) else plainly(one) for one in answers]
        assert others == [first]
        if isinstance(answers[0], Exception):
            raise answers[0]
        return answers[0]

    @rule(key=keys, digest=digests)
    def push(self, key: tuple[str, str], digest: int) -> None:
        number = self.each(lambda registry: push(registry, digest, key[1], key[0]))
        plain = self.plain.setdefault(key, PlainName())
        if plain.versions and plain.versions[max(plain.versions)] == digest:
            assert number == max(plain.versions)
            return
        plain.last += 1
        assert number == plain.last
        plain.versions[number] = digest
        plain.aliases.setdefault(LATEST, PlainAlias({number: 100}, True))
        for alias in plain.aliases.values():
            if alias.follows:
                alias.move({number: 100}, True)

    def there(self, data: st.DataObject) -> tuple[tuple[str, str], PlainName]:
        """An existing name. Other tests cover the refusal of missing names."""
        key = data.draw(st.sampled_from(sorted(self.plain)))
        return key, self.plain[key]

    @precondition(lambda self: self.plain)
    @rule(alias=aliases, weight=st.integers(1, 100), follows=st.booleans(), data=st.data())
    def move(self, alias: str, weight: int, follows: bool, data: st.DataObject) -> None:
        key, plain = self.there(data)
        first, second = (data.draw(st.integers(1, plain.last + 1)) for _ in range(2))
        targets = {first: weight, second: 100 - weight} if first != second and weight < 100 else {first: 100}
        try:
            self.each(lambda registry: registry.move(*key, alias, targets, follows_pushes=follows))
        except AdapterNotFound:
            assert not plain.versions.keys() >= targets.keys()
            return
        if alias in plain.aliases:
            plain.aliases[alias].move(targets, follows)
        else:
            plain.aliases[alias] = PlainAlias(targets, follows)

    @precondition(lambda self: self.plain)
    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        key, plain = self.there(data)
        alias = data.draw(st.sampled_from(sorted(plain.aliases)))
        one = plain.aliases[alias]
        try:
            self.each(lambda registry: registry.roll_back(*key, alias))
        except AliasConflict:
            assert not one.before
        else:
            one.targets, one.follows = one.before.pop()

    @precondition(lambda self: any("prod" in plain.aliases for plain in self.plain.values()))
    @rule(data=st.data())
    def delete_alias(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from([key for key, one in self.plain.items() if "prod" in one.aliases]))
        self.each(lambda registry: registry.delete_alias(*key, "prod"))
        del self.plain[key].aliases["prod"]

    @precondition(lambda self: self.plain)
    @rule(pinned=st.booleans(), data=st.data())
    def pin(self, pinned: bool, data: st.DataObject) -> None:
        key, plain = self.there(data)
        alias = data.draw(st.sampled_from(sorted(plain.aliases)))
        told: list[list[Any]] = []

        def set_pinned(registry: Registry) -> Rollout:
            if not pinned:
                return registry.unpin(key[0], f"{key[1]}@{alias}")
            return registry.pin(
                key[0], f"{key[1]}@{alias}", lambda one, others: told.append([*map(plainly, others)])
            )

        assert self.each(set_pinned).pinned is pinned
        assert not told or told[0] == told[1]
        plain.aliases[alias].pinned = pinned

    @precondition(lambda self: self.plain)
    @rule(force=st.booleans(), data=st.data())
    def delete_version(self, force: bool, data: st.DataObject) -> None:
        key, plain = self.there(data)
        number = data.draw(st.sampled_from(sorted(plain.versions)))
        using = {alias for alias, one in plain.aliases.items() if number in one.targets}
        self.delete(key, f"{key[1]}@{number}", {number}, using, force)

    @precondition(lambda self: len(self.plain) > 1)
    @rule(force=st.booleans(), data=st.data())
    def delete_name(self, force: bool, data: st.DataObject) -> None:
        key, plain = self.there(data)
        self.delete(key, key[1], set(plain.versions), plain.aliases.keys() - {LATEST}, force)

    def delete(
        self, key: tuple[str, str], reference: str, numbers: set[int], using: set[str], force: bool
    ) -> None:
        try:
            removal = self.each(lambda registry: registry.delete(key[0], reference, force=force))
        except AdapterInUse as error:
            assert not force and set(error.aliases) == using
            return
        assert force or not using
        plain = self.plain[key]
        gone = {plain.versions.pop(number) for number in numbers}
        for alias, one in list(plain.aliases.items()):
            one.before = [before for before in one.before if not numbers & before[0].keys()]
            left = {number: weight for number, weight in one.targets.items() if number not in numbers}
            if left:
                heaviest = min(left, key=lambda number: (-left[number], number))
                left[heaviest] += 100 - sum(left.values())
                one.targets = left
            elif alias == LATEST and plain.versions:
                plain.aliases[alias] = PlainAlias({max(plain.versions): 100}, one.follows, one.pinned)
            else:
                del plain.aliases[alias]
        if not plain.versions:
            del self.plain[key]
        own = {
            digest
            for (owner, _), one in self.plain.items()
            if owner == key[0]
            for digest in one.versions.values()
        }
        everybodys = {digest for one in self.plain.values() for digest in one.versions.values()}
        assert {version.digest for version in removal.orphaned} == {DIGESTS[digest] for digest in gone - own}
        kept = {DIGESTS[digest] for digest in gone & everybodys}
        for registry in self.registries:
            assert registry.blobs.find_referenced(DIGESTS[digest] for digest in gone) == kept

    @invariant()
    def everything_is_as_in_the_model(self) -> None:
        if not hasattr(self, "registries"):
            return
        changes = [
            registry.changes(cursor) for registry, cursor in zip(self.registries, self.cursors, strict=True)
        ]
        self.cursors = [one.cursor for one in changes]
        assert not any(one.resync for one in changes) and plainly(changes[0]) == plainly(changes[1])
        self.reader_cursor = self.reader.changes(self.reader_cursor).cursor
        for registry in (*self.registries, self.reader):
            self.compare(registry)

    def compare(self, registry: Registry) -> None:
        pinned = {
            (owner, name, alias): one.targets
            for (owner, name), plain in sorted(self.plain.items())
            for alias, one in sorted(plain.aliases.items())
            if one.pinned
        }
        assert {(one.tenant, one.main.name, one.alias): one.targets for one in registry.pinned()} == pinned
        for tenant in ("t1", "t2"):
            own = {name: one for (owner, name), one in self.plain.items() if owner == tenant}
            assert [one.label for one in registry.list(tenant)] == sorted(own)
            rollouts = registry.rollouts(tenant)
            assert {(one.main.name, one.alias): (one.targets, one.follows_pushes) for one in rollouts} == {
                (name, alias): (one.targets, one.follows)
                for name, plain in own.items()
                for alias, one in plain.aliases.items()
            }
            for name, plain in own.items():
                assert {
                    record.number: record.version.digest for record in registry.versions(tenant, name)
                } == {number: DIGESTS[digest] for number, digest in plain.versions.items()}
                assert registry.get(tenant, name).number in plain.aliases[LATEST].targets
                for alias, one in plain.aliases.items():
                    rollout = registry.rollout(tenant, f"{name}@{alias}")
                    assert (rollout.targets, rollout.pinned) == (one.targets, one.pinned)
            versions = [DIGESTS[digest] for one in own.values() for digest in one.versions.values()]
            num_bytes = len(set(versions)) * DETAILS.num_bytes
            own = DETAILS.num_bytes if DIGESTS[0] in versions else None
            assert registry.storage_usage(tenant, DIGESTS[0]) == StorageUsage(len(versions), num_bytes, own)


def test_both_storages_agree_with_a_simple_model(shared_postgresql: PostgresqlServer, soak: bool) -> None:
    machine = type("OverBoth", (RegistryMachine,), {"server": shared_postgresql})
    # Each step commits to disk once or twice.
    num_steps = 50 if soak else 30
    counts = settings(max_examples=settings.default.max_examples // 8, stateful_step_count=num_steps)
    run_state_machine_as_test(machine, settings=counts)
