"""One name of a tenant with its versions and aliases, and the rules of every operation on them.

The module holds plain values and does no I/O. `registry.py` loads a name, writes its changes, and publishes them to
other processes.
"""

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slora_adapters.errors import AdapterInUse, AdapterNotFound, AliasConflict, BadAlias
from slora_adapters.peft.adapter import AdapterExtras
from slora_adapters.registry.record import (
    LATEST,
    AdapterDetails,
    AdapterRecord,
    ExtrasSummary,
    Rollout,
    Targets,
    check_alias_name,
)
from slora_adapters.version import AdapterVersion

# Maximum number of aliases of one name, including `latest`. Each change of the name reads all of its aliases.
MAX_ALIASES = 32
# Maximum number of versions of one alias. A larger number is probably a mistake. A lookup of the alias reads the
# records of all its versions.
MAX_TARGETS = 8
# Maximum number of earlier states that an alias keeps for rollbacks. Each move of the alias reads all of these states.
MAX_HISTORY = 20


@dataclass(frozen=True, slots=True)
class AliasState:
    """One state of an alias: the versions that it points at."""

    targets: Targets
    follows_pushes: bool = False  # whether a newly pushed version receives all requests at once

    def without(self, numbers: frozenset[int]) -> "AliasState | None":
        """Returns the state after these versions are deleted. Their percentages are added to the largest remaining
        percentage. Returns None if no version remains.
        """
        left = {number: weight for number, weight in self.targets.items() if number not in numbers}
        if not left:
            return None
        heir = max(left, key=lambda number: (left[number], -number))
        left[heir] += 100 - sum(left.values())
        return AliasState(left, self.follows_pushes)


@dataclass(frozen=True, slots=True)
class AliasHistory:
    """The state of an alias, and its earlier states in `before`, oldest first. A rollback restores the newest of the
    earlier states.
    """

    state: AliasState
    before: tuple[AliasState, ...] = ()

    def move(self, state: AliasState) -> "AliasHistory":
        """Returns the history after a move. Moving to the current state is a no-op, so a client can retry a move."""
        if state == self.state:
            return self
        return AliasHistory(state, (*self.before, self.state)[-MAX_HISTORY:])

    def roll_back(self) -> "AliasHistory | None":
        """Returns the history before the last move; None if the alias has no earlier state."""
        return AliasHistory(self.before[-1], self.before[:-1]) if self.before else None

    def near_targets(self) -> set[int]:
        """Returns the versions that the alias points at now, and the versions that it would point at after one
        rollback.
        """
        return {number for state in (self.state, *self.before[-1:]) for number in state.targets}

    def without(self, numbers: frozenset[int]) -> "AliasHistory | None":
        """Returns the history after these versions are deleted; None if the alias then has no target.

        Earlier states that contain a deleted version are removed, so a rollback skips them.
        """
        state = self.state.without(numbers)
        kept = tuple(earlier for earlier in self.before if numbers.isdisjoint(earlier.targets))
        return None if state is None else AliasHistory(state, kept)


def check_targets(targets: Targets) -> Targets:
    """Returns the targets if they are valid. Raises BadAlias with the value and the rule."""
    if not 1 <= len(targets) <= MAX_TARGETS:
        raise BadAlias(f"the alias has {len(targets)} versions; an alias points at 1 to {MAX_TARGETS}")
    for number, weight in targets.items():
        if not 1 <= weight <= 100:
            raise BadAlias(
                f"version {number} has the weight {weight}; a weight is a percentage from 1 to 100"
            )
    if (total := sum(targets.values())) != 100:
        raise BadAlias(f"the weights add up to {total}; they are percentages and must add up to 100")
    return targets


def encode_states(states: Sequence[AliasState]) -> str:
    return json.dumps([[dict(sorted(state.targets.items())), state.follows_pushes] for state in states])


def decode_states(text: str) -> tuple[AliasState, ...]:
    return tuple(
        AliasState({int(number): weight for number, weight in targets.items()}, follows_pushes)
        for targets, follows_pushes in json.loads(text)
    )


@dataclass(frozen=True, slots=True)
class Alias:
    """One alias of a name."""

    history: AliasHistory
    salt: str  # see `choose_target`
    pinned: bool
    updated_at: float  # Unix time of its last move

    @property
    def targets(self) -> Targets:
        return self.history.state.targets

    def describe(self) -> dict[str, Any]:
        """Returns the JSON that the audit log shows. `targets` maps version numbers to percentages."""
        targets = {str(number): percent for number, percent in self.targets.items()}
        return {
            "targets": targets,
            "follows_pushes": self.history.state.follows_pushes,
            "pinned": self.pinned,
        }


@dataclass(slots=True)
class NamedAdapter:
    """One name with its versions and aliases, during an operation. A name that does not exist has no records."""

    tenant: str
    name: str
    named_at: float = 0.0  # Unix time of the first push of the name
    last_number: int = 0  # number of the last pushed version, even if that version was deleted
    # Some versions by number: the two newest, the versions that an alias points at or would point at after a rollback,
    # and the versions that the operation requested.
    records: dict[int, AdapterRecord] = field(default_factory=dict)
    aliases: dict[str, Alias] = field(default_factory=dict)
    new_extras: dict[int, AdapterExtras] = field(
        default_factory=dict
    )  # of the versions that the operation creates

    def copy(self) -> "NamedAdapter":
        return replace(
            self, records=dict(self.records), aliases=dict(self.aliases), new_extras=dict(self.new_extras)
        )

    @property
    def newest(self) -> AdapterRecord | None:
        return self.records[max(self.records)] if self.records else None

    def pins(self) -> Mapping[str, Targets]:
        """Returns the targets of each pinned alias."""
        return {name: alias.targets for name, alias in self.aliases.items() if alias.pinned}

    def changes_since(self, before: "NamedAdapter") -> dict[str, Any]:
        """Returns the differences from `before` as JSON for the audit log. A deleted alias is null."""
        if not self.records:
            return {"num_versions_removed": len(before.records)}
        found: dict[str, Any] = {}
        if added := self.records.keys() - before.records.keys():
            found["added"] = {str(number): self.records[number].version.digest for number in sorted(added)}
        if removed := sorted(before.records.keys() - self.records.keys()):
            found["removed"] = removed
        moved = {
            alias: None if entry is None else entry.describe()
            for alias in sorted({*before.aliases, *self.aliases})
            if (entry := self.aliases.get(alias)) != before.aliases.get(alias)
        }
        return {**found, "aliases": moved} if moved else found

    def rollout(self, alias: str) -> Rollout:
        """Returns the rollout of an alias. Raises AdapterNotFound if there is no such alias."""
        return make_rollout(self._find(alias), alias, self.records)

    def rollouts(self) -> tuple[Rollout, ...]:
        """Returns the rollouts of all aliases, sorted."""
        return tuple(self.rollout(alias) for alias in sorted(self.aliases))

    def push(
        self, version: AdapterVersion, details: AdapterDetails, extras: AdapterExtras, now: float
    ) -> tuple[AdapterRecord, bool]:
        """Creates the next version and moves the aliases that follow pushes. Returns the version's record and whether
        the version is new.

        Pushing the newest version again with the same extras returns the existing record and moves no alias.
        """
        newest = self.newest
        if newest is not None and newest.holds(version, extras):
            if details.packed_bytes is not None:
                # The release that published this version may not have stored packed_bytes.
                known = replace(newest.details, packed_bytes=details.packed_bytes)
                newest = self.records[newest.number] = replace(newest, details=known)
            return newest, False
        if newest is None:
            self.named_at, self.last_number = now, 0
        self.last_number += 1
        state = AliasState({self.last_number: 100}, follows_pushes=True)
        if newest is None:
            self._make(LATEST, state, now)
        for alias, entry in self.aliases.items():
            if entry.history.state.follows_pushes:
                self._set(alias, entry.history.move(state), now)
        record = AdapterRecord(
            self.name, self.last_number, version, details, ExtrasSummary.of(extras), now, self.named_at
        )
        self.records[record.number] = record
        self.new_extras[record.number] = extras
        return record, True

    def remove(self, number: int | None, now: float, *, force: bool) -> tuple[AdapterRecord, ...]:
        """Deletes one version, or all versions if `number` is None, and returns the deleted records.

        To delete all versions, `self.records` must contain all of them. Raises AdapterNotFound if there is no such
        version. Raises AdapterInUse while an alias points at a version, unless `force` is set. See `Registry.delete`.
        """
        reference = self.name if number is None else f"{self.name}@{number}"
        removed = frozenset(self.records) if number is None else frozenset({number})
        if not self.records or not removed <= self.records.keys():
            raise not_found(reference)
        if not force:
            self._check_unused(reference, number)
        gone = tuple(self.records.pop(number) for number in sorted(removed))
        if self.records:
            for alias, entry in list(self.aliases.items()):
                self._take_from(alias, entry, removed, now)
        else:
            self.aliases.clear()
        return gone

    def move(
        self, alias: str, targets: Targets, expected: Targets | None, now: float, *, follows_pushes: bool
    ) -> Rollout:
        """Makes an alias point at the versions in `targets`. See `Registry.move`.

        `self.records` must contain every target that exists. Raises AdapterNotFound for a target without a record.
        """
        check_alias_name(alias)
        check_targets(targets)
        if missing := sorted(targets.keys() - self.records.keys()):
            raise not_found(f"{self.name}@{missing[0]}" if self.records else self.name)
        wanted = AliasState(dict(targets), follows_pushes)
        present = self.aliases.get(alias)
        if present is None or present.history.state != wanted:
            current: Targets = {} if present is None else present.targets
            if expected is not None and current != expected:
                raise AliasConflict(
                    f"{self.name}@{alias} points at {_say(current)}, not at {_say(expected)}, because "
                    "another client has moved it: read the alias again and repeat the change if it "
                    "still applies"
                )
            if present is None:
                self._make(alias, wanted, now)
            else:
                self._set(alias, present.history.move(wanted), now)
        return self.rollout(alias)

    def roll_back(self, alias: str, now: float) -> Rollout:
        """Restores the state of an alias before its last move. Raises AdapterNotFound, and AliasConflict if there is no
        earlier state.
        """
        before = self._find(alias).history.roll_back()
        if before is None:
            raise AliasConflict(
                f"{self.name}@{alias} cannot be rolled back: it has never moved, or its earlier "
                "versions were deleted; point it at a version instead"
            )
        self._set(alias, before, now)
        return self.rollout(alias)

    def delete_alias(self, alias: str) -> Rollout:
        """Deletes an alias and returns its last rollout. Raises AdapterNotFound, and BadAlias for `latest`."""
        rollout = self.rollout(alias)
        if alias == LATEST:
            raise BadAlias(
                f"{LATEST!r} cannot be deleted, because requests for the bare name use it; move it, or delete the name"
            )
        del self.aliases[alias]
        return rollout

    def set_pinned(self, alias: str, *, pinned: bool) -> Rollout:
        """Pins or unpins an alias and returns its rollout. Raises AdapterNotFound."""
        self.aliases[alias] = replace(self._find(alias), pinned=pinned)
        return self.rollout(alias)

    def _find(self, alias: str) -> Alias:
        if alias not in self.aliases:
            raise not_found(self.name if alias == LATEST else f"{self.name}@{alias}")
        return self.aliases[alias]

    def _make(self, alias: str, state: AliasState, now: float) -> None:
        if len(self.aliases) >= MAX_ALIASES:
            raise BadAlias(f"{self.name!r} already has {MAX_ALIASES} aliases, the limit; delete one")
        self.aliases[alias] = Alias(AliasHistory(state), uuid.uuid4().hex, pinned=False, updated_at=now)

    def _set(self, alias: str, history: AliasHistory, now: float) -> None:
        self.aliases[alias] = replace(self.aliases[alias], history=history, updated_at=now)

    def _take_from(self, alias: str, entry: Alias, removed: frozenset[int], now: float) -> None:
        """Updates one alias after some versions, but not all, were deleted."""
        after = entry.history.without(removed)
        if after is None and alias == LATEST:
            after = AliasHistory(AliasState({max(self.records): 100}, entry.history.state.follows_pushes))
        if after is None:
            del self.aliases[alias]
        elif after != entry.history:
            self._set(alias, after, entry.updated_at if after.state == entry.history.state else now)

    def _check_unused(self, reference: str, number: int | None) -> None:
        """Raises AdapterInUse while an alias points at the version or name that the caller wants to delete.

        Deleting a whole name ignores `latest`, because `latest` is deleted with the name.
        """
        using = tuple(
            alias
            for alias, entry in sorted(self.aliases.items())
            if (alias != LATEST if number is None else number in entry.targets)
        )
        if using:
            raise AdapterInUse(reference, using)


def make_rollout(entry: Alias, alias: str, records: Mapping[int, AdapterRecord]) -> Rollout:
    """Builds the rollout of an alias. `records` must contain at least the versions that the alias points at."""
    state = entry.history.state
    return Rollout(
        alias,
        {number: records[number] for number in sorted(state.targets)},
        state.targets,
        state.follows_pushes,
        entry.salt,
        entry.pinned,
        entry.updated_at,
    )


def not_found(reference: str) -> AdapterNotFound:
    return AdapterNotFound(f"there is no adapter {reference[:257]!r}")


def _say(targets: Targets) -> str:
    if not targets:
        return "no version (the alias does not exist)"
    return ", ".join(f"{number} ({weight}%)" for number, weight in sorted(targets.items()))
