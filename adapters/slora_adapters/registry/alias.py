"""Where an alias points: at one version of its name, or at several by weight; and which of them a user gets.

A user stays with a version for as long as its weight does not shrink: raising a canary from 10 to 20 moves a tenth of
the users to it, and none away from it. That is weighted rendezvous hashing (Thaler and Ravishankar 1998; the logarithm
is Schindelhauer and Schomaker 2005): each version draws a number for the user, and the best one wins.

Plain values: knows no database and no weights of adapters.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slora_adapters.errors import BadAlias

# Version number -> percent of the requests.
Targets = Mapping[int, int]

# A request reads all of them; a rollout that has more under way at once is a mistake.
MAX_TARGETS = 8
# States that a rollback can go back through. They are read at each move, with the alias.
MAX_HISTORY = 20


@dataclass(frozen=True, slots=True)
class AliasState:
    """targets: add up to 100. follows_pushes: each new version takes all requests, as soon as it is pushed."""

    targets: Targets
    follows_pushes: bool = False

    def without(self, numbers: frozenset[int]) -> "AliasState | None":
        """As it is when these versions are deleted: what they had goes to the heaviest one left; None if none is."""
        left = {number: weight for number, weight in self.targets.items() if number not in numbers}
        if not left:
            return None
        heir = max(left, key=lambda number: (left[number], -number))
        left[heir] += 100 - sum(left.values())
        return AliasState(left, self.follows_pushes)


@dataclass(frozen=True, slots=True)
class AliasHistory:
    """The state of an alias, and those before it, latest last: what a rollback goes back to."""

    state: AliasState
    before: tuple[AliasState, ...] = ()

    def move(self, state: AliasState) -> "AliasHistory":
        """To where it is already changes nothing, so that a lost answer can be asked for again."""
        if state == self.state:
            return self
        return AliasHistory(state, (*self.before, self.state)[-MAX_HISTORY:])

    def roll_back(self) -> "AliasHistory | None":
        """Back to before the last move; None if there was none, or what was before it is deleted."""
        return AliasHistory(self.before[-1], self.before[:-1]) if self.before else None

    def near_targets(self) -> set[int]:
        """The versions that it points at, and those that it would after a rollback."""
        return {number for state in (self.state, *self.before[-1:]) for number in state.targets}

    def without(self, numbers: frozenset[int]) -> "AliasHistory | None":
        """As it is when these versions are deleted; None if it points nowhere then. What needs them is no way back."""
        state = self.state.without(numbers)
        kept = tuple(one for one in self.before if numbers.isdisjoint(one.targets))
        return None if state is None else AliasHistory(state, kept)


def check_targets(targets: Targets) -> Targets:
    """The targets, if they can be some. Raises BadAlias with the value and the rule."""
    if not 1 <= len(targets) <= MAX_TARGETS:
        raise BadAlias(f"an alias points at 1 to {MAX_TARGETS} versions, not {len(targets)}")
    for number, weight in targets.items():
        if not 1 <= weight <= 100:
            raise BadAlias(f"version {number} has the weight {weight}; weights are percent, 1 to 100")
    if (total := sum(targets.values())) != 100:
        raise BadAlias(f"the weights add up to {total}; they are percent and must add up to 100")
    return targets


def choose_target(targets: Targets, salt: str, user: str) -> int:
    """The version for `user`; each gets a share of all users that is its weight. salt: the alias's own, so that the
    canaries of different aliases are different users."""
    if len(targets) == 1:
        return next(iter(targets))
    return max(targets, key=lambda number: _draw(salt, user, number) * targets[number])


def encode_states(states: Sequence[AliasState]) -> str:
    return json.dumps([[_plain(state.targets), state.follows_pushes] for state in states])


def decode_states(text: str) -> tuple[AliasState, ...]:
    return tuple(AliasState(_targets(targets), bool(follows)) for targets, follows in json.loads(text))


def encode_targets(targets: Targets) -> str:
    return json.dumps(_plain(targets))


def decode_targets(text: str) -> Targets:
    return _targets(json.loads(text))


def _plain(targets: Targets) -> dict[str, int]:
    return {str(number): targets[number] for number in sorted(targets)}


def _targets(plain: Mapping[str, Any]) -> Targets:
    return {int(number): int(weight) for number, weight in plain.items()}


def _draw(salt: str, user: str, number: int) -> float:
    """1 over an exponentially distributed number: of several, each times its weight, w is the largest in w of sum."""
    drawn = hashlib.sha256(f"{salt}:{number}:{user}".encode()).digest()
    # In (0, 1): 52 bits and a half, so that neither end can be met.
    fraction = ((int.from_bytes(drawn[:8]) >> 12) + 0.5) / 2**52
    return -1 / math.log(fraction)
