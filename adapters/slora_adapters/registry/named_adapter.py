"""One name of a tenant as operations find it and leave it: the rules of versions and aliases, whatever keeps them.

Plain values and no storage: `registry_storage.py` says who loads a name, keeps what changed of it, and tells others.
"""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from slora_adapters.errors import (
    AdapterInUse,
    AdapterNotFound,
    AliasConflict,
    BadAlias,
)
from slora_adapters.peft.adapter import AdapterExtras
from slora_adapters.registry.adapter_record import AdapterDetails, AdapterRecord, ExtrasSummary, Rollout
from slora_adapters.registry.alias import AliasHistory, AliasState, Targets, check_targets
from slora_adapters.registry.reference import LATEST, check_alias_name
from slora_adapters.version import AdapterVersion

__all__ = ["MAX_ALIASES", "Alias", "NamedAdapter", "make_rollout", "not_found"]

# Of one name, `latest` included: all are read when the name changes.
MAX_ALIASES = 32


@dataclass(frozen=True, slots=True)
class Alias:
    """salt: see `choose_target`. updated_at: when it last moved (Unix time)."""

    history: AliasHistory
    salt: str
    pinned: bool
    updated_at: float

    @property
    def targets(self) -> Targets:
        return self.history.state.targets


@dataclass(slots=True)
class NamedAdapter:
    """A name that is being changed; one that is not there has no records.

    last_number: of the version that was pushed last, be it deleted. named_at: when the name first was (Unix time).
    records: versions by number, not all: the two newest, those that an alias points at or would after a rollback, and
    those that were asked for. new_extras: the texts of versions that this change makes.
    """

    tenant: str
    name: str
    named_at: float = 0.0
    last_number: int = 0
    records: dict[int, AdapterRecord] = field(default_factory=dict)
    aliases: dict[str, Alias] = field(default_factory=dict)
    new_extras: dict[int, AdapterExtras] = field(default_factory=dict)

    def copy(self) -> "NamedAdapter":
        return replace(
            self, records=dict(self.records), aliases=dict(self.aliases), new_extras=dict(self.new_extras)
        )

    @property
    def newest(self) -> AdapterRecord | None:
        return self.records[max(self.records)] if self.records else None

    def pins(self) -> Mapping[str, Targets]:
        """Where the pinned aliases point."""
        return {alias: one.targets for alias, one in self.aliases.items() if one.pinned}

    def rollout(self, alias: str) -> Rollout:
        """Raises AdapterNotFound."""
        return make_rollout(self._find(alias), alias, self.records)

    def push(
        self, version: AdapterVersion, details: AdapterDetails, extras: AdapterExtras, now: float
    ) -> tuple[AdapterRecord, bool]:
        """The record of the next version, to which aliases move that follow pushes; and whether it is new: what is the
        newest already, with the same extras, stays that one, and nothing moves.
        """
        newest = self.newest
        if newest is not None and newest.holds(version, extras):
            if details.packed_bytes is not None:
                # It may have been published by a release that did not keep it.
                known = replace(newest.details, packed_bytes=details.packed_bytes)
                newest = self.records[newest.number] = replace(newest, details=known)
            return newest, False
        if newest is None:
            self.named_at, self.last_number = now, 0
        self.last_number += 1
        state = AliasState({self.last_number: 100}, follows_pushes=True)
        if newest is None:
            self._make(LATEST, state, now)
        for alias, one in self.aliases.items():
            if one.history.state.follows_pushes:
                self._set(alias, one.history.move(state), now)
        record = AdapterRecord(
            self.name, self.last_number, version, details, ExtrasSummary.of(extras), now, self.named_at
        )
        self.records[record.number] = record
        self.new_extras[record.number] = extras
        return record, True

    def remove(self, number: int | None, now: float, *, force: bool) -> tuple[AdapterRecord, ...]:
        """Takes a version away, or all, None, for which all records must be here. Raises AdapterNotFound, and
        AdapterInUse while an alias points at it, unless forced; see `Registry.delete`."""
        reference = self.name if number is None else f"{self.name}@{number}"
        removed = frozenset(self.records) if number is None else frozenset({number})
        if not self.records or not removed <= self.records.keys():
            raise not_found(reference)
        if not force:
            self._check_unused(reference, number)
        gone = tuple(self.records.pop(number) for number in sorted(removed))
        if self.records:
            for alias, one in list(self.aliases.items()):
                self._take_from(alias, one, removed, now)
        else:
            self.aliases.clear()
        return gone

    def move(
        self, alias: str, targets: Targets, expected: Targets | None, now: float, *, follows_pushes: bool
    ) -> Rollout:
        """Points an alias at versions, whose records must be here if they exist; see `Registry.move`."""
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
                    f"{self.name}@{alias} points at {_say(current)}, not at {_say(expected)}: somebody else has moved "
                    "it; look at it and decide again"
                )
            if present is None:
                self._make(alias, wanted, now)
            else:
                self._set(alias, present.history.move(wanted), now)
        return self.rollout(alias)

    def roll_back(self, alias: str, now: float) -> Rollout:
        """Raises AdapterNotFound, and AliasConflict if there is nothing to go back to."""
        before = self._find(alias).history.roll_back()
        if before is None:
            raise AliasConflict(
                f"{self.name}@{alias} can't be rolled back: it has not moved since it was made, or where it was "
                "before has been deleted; point it at a version"
            )
        self._set(alias, before, now)
        return self.rollout(alias)

    def delete_alias(self, alias: str) -> Rollout:
        """As it was. Raises AdapterNotFound, and BadAlias for `latest`."""
        rollout = self.rollout(alias)
        if alias == LATEST:
            raise BadAlias(f"{LATEST!r} is what the bare name serves; move it, or delete the name")
        del self.aliases[alias]
        return rollout

    def set_pinned(self, alias: str, *, pinned: bool) -> Rollout:
        """Raises AdapterNotFound."""
        self.aliases[alias] = replace(self._find(alias), pinned=pinned)
        return self.rollout(alias)

    def _find(self, alias: str) -> Alias:
        if alias not in self.aliases:
            raise not_found(self.name if alias == LATEST else f"{self.name}@{alias}")
        return self.aliases[alias]

    def _make(self, alias: str, state: AliasState, now: float) -> None:
        if len(self.aliases) >= MAX_ALIASES:
            raise BadAlias(f"{self.name!r} has {MAX_ALIASES} aliases, and no more are kept; delete one")
        self.aliases[alias] = Alias(AliasHistory(state), uuid.uuid4().hex, pinned=False, updated_at=now)

    def _set(self, alias: str, history: AliasHistory, now: float) -> None:
        self.aliases[alias] = replace(self.aliases[alias], history=history, updated_at=now)

    def _take_from(self, alias: str, one: Alias, removed: frozenset[int], now: float) -> None:
        """What an alias is when versions are gone and others stay."""
        after = one.history.without(removed)
        if after is None and alias == LATEST:
            after = AliasHistory(AliasState({max(self.records): 100}, one.history.state.follows_pushes))
        if after is None:
            del self.aliases[alias]
        elif after != one.history:
            self._set(alias, after, one.updated_at if after.state == one.history.state else now)

    def _check_unused(self, reference: str, number: int | None) -> None:
        """`latest` goes with its name, so that it does not keep it."""
        using = tuple(
            alias
            for alias, one in sorted(self.aliases.items())
            if (alias != LATEST if number is None else number in one.targets)
        )
        if using:
            raise AdapterInUse(reference, using)


def make_rollout(one: Alias, alias: str, records: Mapping[int, AdapterRecord]) -> Rollout:
    """records: those that it points at, among others."""
    state = one.history.state
    return Rollout(
        alias,
        {number: records[number] for number in sorted(state.targets)},
        state.targets,
        state.follows_pushes,
        one.salt,
        one.pinned,
        one.updated_at,
    )


def not_found(reference: str) -> AdapterNotFound:
    return AdapterNotFound(f"there is no adapter {reference[:257]!r}")


def _say(targets: Targets) -> str:
    if not targets:
        return "nothing (there is no such alias)"
    return ", ".join(f"{number} ({weight}%)" for number, weight in sorted(targets.items()))
