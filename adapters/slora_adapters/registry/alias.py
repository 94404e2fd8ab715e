"""Aliases: an alias points at one or more versions of a name, each with a percentage of the users.

`choose_target` chooses the version for a user. A change of the percentages moves few users to another version. For
example, an alias points at an old version with 90 percent and at a new version with 10 percent. Raising the new version
to 20 percent moves a tenth of all users to it. All other users keep their version.

This is weighted rendezvous hashing (Thaler and Ravishankar 1998; the logarithm is from Schindelhauer and Schomaker
2005). Each version gets a pseudo-random score for the user, and the version with the highest score is chosen.

The module holds plain values. It uses no database and no tensors.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slora_adapters.errors import BadAlias

# Version number -> percentage of the requests.
Targets = Mapping[int, int]

# Maximum number of versions of one alias. A larger number is probably a mistake. A lookup of the alias reads the
# records of all its versions.
MAX_TARGETS = 8
# Maximum number of earlier states that an alias keeps for rollbacks. Each move of the alias reads all of these states.
MAX_HISTORY = 20


@dataclass(frozen=True, slots=True)
class AliasState:
    """One state of an alias: the versions that it points at.

    targets: the percentage of the requests for each version number. The sum of the percentages is 100.
    follows_pushes: whether a newly pushed version receives all requests at once.
    """

    targets: Targets
    follows_pushes: bool = False

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
        kept = tuple(one for one in self.before if numbers.isdisjoint(one.targets))
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


def choose_target(targets: Targets, salt: str, user: str) -> int:
    """Returns the number of the version for `user`. Each version gets its percentage of all users.

    salt: unique to the alias. With equal salts, two aliases would choose versions for the same groups of users.
    """
    if len(targets) == 1:
        return next(iter(targets))
    return max(targets, key=lambda number: _draw(salt, user, number) * targets[number])


def encode_states(states: Sequence[AliasState]) -> str:
    return json.dumps([[_plain(state.targets), state.follows_pushes] for state in states])


def decode_states(text: str) -> tuple[AliasState, ...]:
    return tuple(AliasState(_targets(targets), bool(follows)) for targets, follows in json.loads(text))


def _plain(targets: Targets) -> dict[str, int]:
    return {str(number): targets[number] for number in sorted(targets)}


def _targets(plain: Mapping[str, Any]) -> Targets:
    return {int(number): int(weight) for number, weight in plain.items()}


def _draw(salt: str, user: str, number: int) -> float:
    """Returns the pseudo-random score of a version for a user: 1 / x, where x is exponentially distributed.

    If the score of each version i is multiplied by its percentage p_i, version i has the largest product with
    probability p_i / 100.
    """
    drawn = hashlib.sha256(f"{salt}:{number}:{user}".encode()).digest()
    # 52 bits plus a half give a number strictly between 0 and 1, so the logarithm is finite and not zero.
    fraction = ((int.from_bytes(drawn[:8]) >> 12) + 0.5) / 2**52
    return -1 / math.log(fraction)
