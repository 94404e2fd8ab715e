"""Plain values of the registry: references, adapter versions, and aliases with the versions that they point at. A
`NamedAdapter` is one name of a tenant with its versions and aliases, and has the rules of every operation on them.

A reference in a request, path or command is `name`, `name@3` or `name@alias`. `name` alone means `name@latest`. Names
and aliases contain no `@`, and an alias is never a number, so every reference is unambiguous.

An alias points at one or more versions, each with a percentage of the users. `choose_target` chooses the version for a
user. A change of the percentages moves few users to another version. For example, an alias points at an old version
with 90 percent and at a new version with 10 percent. Raising the new version to 20 percent moves a tenth of all users
to it. All other users keep their version. This is weighted rendezvous hashing (Thaler and Ravishankar 1998; the
logarithm is from Schindelhauer and Schomaker 2005).
"""

import hashlib
import json
import math
import re
import unicodedata
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slora_adapters.errors import AdapterInUse, AdapterNotFound, AliasConflict, BadAdapterName, BadAlias
from slora_adapters.peft.adapter import AdapterExtras
from slora_adapters.version import AdapterVersion

# Version number -> percentage of the requests.
Targets = Mapping[int, int]
NO_EXTRAS = AdapterExtras()
# The alias that every name has. A bare name resolves to it.
LATEST = "latest"

_MAX_NAME_CHARS = 128
_NAME = re.compile(rf"[a-z0-9][a-z0-9._-]{{0,{_MAX_NAME_CHARS - 1}}}", re.ASCII)
# A version number has at most 18 digits, which fit SQLite's 64-bit integers. It has no leading zero, so that each
# version has only one spelling.
_NUMBER = re.compile(r"[1-9][0-9]{0,17}", re.ASCII)
_RULE = "1 to 128 characters of a-z, 0-9, '.', '_' and '-', and starts with a letter or digit"


@dataclass(frozen=True, slots=True)
class AdapterReference:
    """A reference to a version or an alias of a name: exactly one of `number` and `alias` is set."""

    name: str
    number: int | None
    alias: str | None

    @property
    def target(self) -> int | str:
        """The number or the alias, whichever is set."""
        if self.alias is None:
            assert self.number is not None
            return self.number
        return self.alias

    @property
    def text(self) -> str:
        """The shortest spelling of the reference."""
        return self.name if self.alias == LATEST else f"{self.name}@{self.target}"


def check_adapter_name(name: str) -> str:
    """Returns the name if it is valid. Raises BadAdapterName."""
    if not _NAME.fullmatch(name):
        near = suggest_adapter_name(name)
        hint = "" if near is None else f"; {near!r} would be valid"
        raise BadAdapterName(f"{name[:140]!r} is not a valid adapter name: a name has {_RULE}{hint}")
    return name


def suggest_adapter_name(text: str) -> str | None:
    """Returns a valid name that looks like the text; None if the text has no letter or digit of ASCII."""
    plain = unicodedata.normalize("NFKD", text[:512]).encode("ascii", "ignore").decode().lower()
    name = re.sub(r"[^a-z0-9._-]+", "-", plain).lstrip("._-")[:_MAX_NAME_CHARS].rstrip("-")
    return name or None


def check_alias_name(alias: str) -> str:
    """Returns the alias if it is valid. Raises BadAlias."""
    if not _NAME.fullmatch(alias) or alias.isdigit():
        raise BadAlias(
            f"{alias[:140]!r} is not a valid alias: an alias has {_RULE}, and is not a number, because "
            "numbers are versions"
        )
    return alias


def parse_reference(text: str) -> AdapterReference:
    """Parses a reference. Raises BadAdapterName if the text is not a valid reference."""
    name, at, target = text.partition("@")
    check_adapter_name(name)
    if not at:
        return AdapterReference(name, None, LATEST)
    if _NUMBER.fullmatch(target):
        return AdapterReference(name, int(target), None)
    try:
        return AdapterReference(name, None, check_alias_name(target))
    except BadAlias:
        raise BadAdapterName(
            f"{text[:270]!r} is not a reference to an adapter; write `name`, `name@3` for a version "
            "or `name@prod` for an alias"
        ) from None


def choose_target(targets: Targets, salt: str, user: str) -> int:
    """Returns the number of the version for `user`. Each version gets its percentage of all users.

    salt: unique to the alias. With equal salts, two aliases would choose versions for the same groups of users.
    """
    if len(targets) == 1:
        return next(iter(targets))
    return max(targets, key=lambda number: _draw(salt, user, number) * targets[number])


def _draw(salt: str, user: str, number: int) -> float:
    """Returns the pseudo-random score of a version for a user: 1 / x, where x is exponentially distributed.

    If the score of each version i is multiplied by its percentage p_i, version i has the largest product with
    probability p_i / 100.
    """
    drawn = hashlib.sha256(f"{salt}:{number}:{user}".encode()).digest()
    # 52 bits plus a half give a number strictly between 0 and 1, so the logarithm is finite and not zero.
    fraction = ((int.from_bytes(drawn[:8]) >> 12) + 0.5) / 2**52
    return -1 / math.log(fraction)


@dataclass(frozen=True, slots=True)
class AdapterDetails:
    """Facts about the weights of a version."""

    rank: int
    target_modules: tuple[str, ...]
    num_bytes: int  # size of the tensors
    # Size in the page pool of an engine without tensor parallelism, if it is known.
    packed_bytes: int | None = None
    # Size of the files in the store; None if it is num_bytes.
    blob_bytes: int | None = None

    @property
    def stored_bytes(self) -> int:
        """The bytes that the weights use in a store."""
        return self.num_bytes if self.blob_bytes is None else self.blob_bytes

    @property
    def pool_bytes(self) -> int:
        """The bytes that the weights use in the page pool of an engine without tensor parallelism.

        This is num_bytes if the packed size is unknown. `EngineInfo.count_rank_bytes` computes the bytes of each rank.
        """
        return self.num_bytes if self.packed_bytes is None else self.packed_bytes


@dataclass(frozen=True, slots=True)
class ExtrasSummary:
    """What a list or a comparison needs to know of a version's extras.

    A record does not contain the texts. A text may take half a megabyte, and a list loads many records at once.
    """

    template_bytes: int | None  # bytes of UTF-8; None if there is no text
    defaults_bytes: int | None
    digest: str  # see `digest_extras`

    @staticmethod
    def of(extras: AdapterExtras) -> "ExtrasSummary":
        template, defaults = extras.chat_template, extras.generation_config
        return ExtrasSummary(_size(template), _size(defaults), digest_extras(template, defaults))

    @property
    def num_bytes(self) -> int:
        return (self.template_bytes or 0) + (self.defaults_bytes or 0)


def digest_extras(chat_template: str | None, generation_config: str | None) -> str:
    """Returns the SHA-256 over presence, size and bytes of both texts; the empty string if neither text exists."""
    if chat_template is None and generation_config is None:
        return ""
    hashed = hashlib.sha256()
    for text in (chat_template, generation_config):
        raw = b"" if text is None else text.encode()
        hashed.update(b"%d:%d:%b" % (text is not None, len(raw), raw))
    return hashed.hexdigest()


@dataclass(frozen=True, slots=True)
class AdapterRecord:
    """The record of one push under a tenant's adapter name. A record never changes, and its number is not reused while
    the name exists.
    """

    name: str
    number: int
    version: AdapterVersion  # the weights, which may have several numbers and names
    details: AdapterDetails
    extras: ExtrasSummary
    created_at: float  # Unix time of the push
    named_at: float  # Unix time of the first push of the name

    @property
    def label(self) -> str:
        return f"{self.name}@{self.number}"

    def holds(self, version: AdapterVersion, extras: AdapterExtras) -> bool:
        """Returns whether the record has these weights and these extras."""
        return (self.version, self.extras) == (version, ExtrasSummary.of(extras))


@dataclass(frozen=True, slots=True)
class Rollout:
    """An alias and the versions that it points at."""

    alias: str
    records: Mapping[int, AdapterRecord]
    targets: Targets
    follows_pushes: bool  # whether each push moves all requests to the new version
    salt: str  # see `choose_target`
    pinned: (
        bool  # whether all versions in `targets` are kept in the page pool, even before a request needs them
    )
    updated_at: float  # Unix time of the last move

    @property
    def main(self) -> AdapterRecord:
        """The version with the largest percentage of the requests; among equal percentages, the oldest version."""
        return self.records[max(self.targets, key=lambda number: (self.targets[number], -number))]

    @property
    def label(self) -> str:
        """The reference to the alias that requests use."""
        return self.main.name if self.alias == LATEST else f"{self.main.name}@{self.alias}"

    @property
    def tenant(self) -> str:
        return self.main.version.tenant

    def choose(self, user: str) -> AdapterRecord:
        """Returns the version for `user`. The same user gets the same version until `targets` changes."""
        return self.records[choose_target(self.targets, self.salt, user)]


@dataclass(frozen=True, slots=True)
class StorageUsage:
    """Totals over all versions of a tenant."""

    num_versions: int
    num_bytes: int  # weights that several versions share count once; extras count for each version
    weights_bytes: (
        int | None
    )  # the part of the weights with the requested digest; None if no version has them


@dataclass(frozen=True, slots=True)
class Publication:
    """The result of a push."""

    record: AdapterRecord
    is_new: bool  # False if the newest version already had these weights and extras
    rollouts: tuple[Rollout, ...]  # all aliases of the name after the push, sorted
    moved_pin: bool  # whether the targets of a pinned alias changed


@dataclass(frozen=True, slots=True)
class Removal:
    """The result of a deletion."""

    records: tuple[AdapterRecord, ...]
    orphaned: tuple[AdapterVersion, ...]  # deleted weights that no remaining version of the tenant uses
    moved_pin: bool  # see Publication


def _size(text: str | None) -> int | None:
    return None if text is None else len(text.encode())


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
