from itertools import pairwise

import pytest

from slora_adapters.errors import BadAdapterName, BadAlias
from slora_adapters.registry.record import (
    LATEST,
    MAX_HISTORY,
    MAX_TARGETS,
    AdapterReference,
    AliasHistory,
    AliasState,
    Targets,
    check_alias_name,
    check_targets,
    choose_target,
    decode_states,
    encode_states,
    parse_reference,
)

USERS = [f"user-{number}" for number in range(4000)]


def chosen(targets: Targets, salt: str = "salt") -> dict[str, int]:
    return {user: choose_target(targets, salt, user) for user in USERS}


@pytest.mark.parametrize("targets", [{1: 90, 2: 10}, {1: 1, 2: 99}, {3: 50, 9: 30, 7: 20}])
def test_each_version_gets_its_share_of_the_users(targets: Targets) -> None:
    numbers = list(chosen(targets).values())
    for number, weight in targets.items():
        # The count is binomial. The tolerance is five standard deviations for 4000 users.
        assert abs(numbers.count(number) / len(USERS) - weight / 100) < 5 * (0.25 / len(USERS)) ** 0.5


def test_a_growing_canary_keeps_its_users_and_takes_only_from_shrinking_versions() -> None:
    steps: list[Targets] = [{1: 100}, {1: 90, 2: 10}, {1: 80, 2: 20}, {2: 50, 1: 50}, {2: 100}]
    taken = [{user for user, number in chosen(one).items() if number == 2} for one in steps]
    assert all(before < after for before, after in pairwise(taken))
    before, after = chosen({1: 80, 2: 10, 3: 10}), chosen({1: 70, 2: 10, 3: 20})
    assert all(after[user] == 2 or after[user] == 3 for user in USERS if before[user] == 2)
    assert all(after[user] == 3 for user in USERS if before[user] == 3)


def test_the_canary_users_of_two_aliases_are_independent() -> None:
    one, other = chosen({1: 50, 2: 50}, "a"), chosen({1: 50, 2: 50}, "b")
    share = sum(one[user] == other[user] for user in USERS) / len(USERS)
    assert abs(share - 0.5) < 5 * (0.25 / len(USERS)) ** 0.5


def test_the_version_of_a_user_is_the_same_in_every_process_and_release() -> None:
    first = [choose_target({1: 50, 2: 50}, "salt", user) for user in USERS[:12]]
    assert first == [2, 1, 1, 1, 1, 2, 2, 2, 2, 2, 1, 2]


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        ({}, "has 0 versions; an alias points at 1 to 8"),
        ({number: 10 for number in range(1, 11)}, "has 10 versions"),
        ({1: 90, 2: 9}, "add up to 99"),
        ({1: 90, 2: 11}, "add up to 101"),
        ({1: 100, 2: 0}, "version 2 has the weight 0"),
        ({1: 101, 2: -1}, "version 1 has the weight 101"),
    ],
)
def test_invalid_splits_are_refused_with_the_rule(targets: Targets, words: str) -> None:
    with pytest.raises(BadAlias, match=words):
        check_targets(targets)


def test_the_most_targets_are_accepted() -> None:
    targets = {number: 100 // MAX_TARGETS for number in range(1, MAX_TARGETS)}
    targets[99] = 100 - sum(targets.values())
    assert check_targets(targets) == targets


def state(number: int) -> AliasState:
    return AliasState({number: 100})


def test_rollbacks_undo_the_kept_moves_in_reverse_order() -> None:
    history = AliasHistory(state(1))
    for number in range(2, MAX_HISTORY + 4):
        history = history.move(state(number))
    assert history.move(state(MAX_HISTORY + 3)) is history, "it is there already"
    seen = []
    while (before := history.roll_back()) is not None:
        history = before
        seen.append(next(iter(history.state.targets)))
    assert seen == list(range(MAX_HISTORY + 2, 2, -1))


def test_the_share_of_a_deleted_version_goes_to_the_heaviest_and_its_history_is_dropped() -> None:
    history = (
        AliasHistory(state(1)).move(AliasState({1: 60, 2: 10, 3: 30}, follows_pushes=True)).move(state(2))
    )
    assert history.without(frozenset({2})) is None
    assert history.without(frozenset({3})) == AliasHistory(state(2), (state(1),))
    split = AliasHistory(AliasState({1: 40, 2: 40, 3: 20}), (state(1),))
    assert split.without(frozenset({3})) == AliasHistory(AliasState({1: 60, 2: 40}), (state(1),))
    assert split.without(frozenset({1, 3})) == AliasHistory(state(2), ())


def test_states_round_trip_through_their_encoding() -> None:
    states = (AliasState({12: 90, 3: 10}, follows_pushes=True), state(7))
    assert decode_states(encode_states(states)) == states and decode_states("[]") == ()


@pytest.mark.parametrize(
    ("text", "number", "alias"),
    [("a", None, LATEST), ("a@latest", None, LATEST), ("a@12", 12, None), ("a@v1", None, "v1")],
)
def test_a_reference_is_a_name_a_version_or_an_alias(
    text: str, number: int | None, alias: str | None
) -> None:
    assert parse_reference(text) == AdapterReference("a", number, alias)


@pytest.mark.parametrize(
    "text",
    ["", "@", "a@", "@1", "a@0", "a@01", "a@-1", "a@1@2", "a@Prod", "A@1", "a@" + "9" * 19, "a@\u0661"],
)
def test_an_invalid_reference_is_refused(text: str) -> None:
    with pytest.raises(BadAdapterName):
        parse_reference(text)


@pytest.mark.parametrize("alias", ["", "7", "007", "Prod", "a@b", "a/b", "-a", "x" * 129])
def test_an_invalid_alias_name_is_refused_with_the_rule(alias: str) -> None:
    with pytest.raises(BadAlias, match="is not a valid alias: an alias has 1 to 128"):
        check_alias_name(alias)
