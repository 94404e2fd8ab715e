"""The memory that the API processes of a host share: tallies, the state of the host, and changes."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slora_api.core.errors import ServerBusy, TenantBusy
from slora_api.core.host_board import BoardSize, HostBoard, HostChanges
from slora_api.http.permit_pool import PermitPool

NUM_KEYS = 6


@pytest.fixture
def boards() -> Iterator[list[HostBoard]]:
    """One board as the main process and two workers see it."""
    main = HostBoard.create(BoardSize(3, NUM_KEYS))
    yield [main, *(HostBoard(main.descriptor, main.size, process) for process in (1, 2))]
    main.close()


def test_a_tally_counts_what_all_processes_hold(boards: list[HostBoard]) -> None:
    _, one, two = (board.tally("answers") for board in boards)
    one.add("acme", 3)
    two.add("acme", 2)
    two.add("other", 1)
    assert (one.count_of("acme"), one.total, two.count_of("acme"), two.total) == (5, 6, 5, 6)
    two.add("acme", -2)
    assert (one.count_of("acme"), one.count_of("other"), one.total) == (3, 1, 4)


def test_the_tallies_of_a_board_are_independent(boards: list[HostBoard]) -> None:
    boards[1].tally("answers").add("acme", 3)
    assert boards[2].tally("uploads").total == 0


@given(
    changes=st.lists(
        st.tuples(st.integers(1, 2), st.integers(0, NUM_KEYS - 1), st.integers(0, 3)), max_size=80
    )
)
def test_a_tally_agrees_with_counting_whatever_the_order_of_changes(
    changes: list[tuple[int, int, int]],
) -> None:
    main = HostBoard.create(BoardSize(3, NUM_KEYS))
    tallies = {process: HostBoard(main.descriptor, main.size, process).tally("answers") for process in (1, 2)}
    held: dict[tuple[int, str], int] = {}
    for process, key, count in changes:
        name = f"tenant {key}"
        tallies[process].add(name, count - held.get((process, name), 0))
        held[process, name] = count
    for tally in tallies.values():
        assert tally.total == sum(held.values())
        for key in range(NUM_KEYS):
            name = f"tenant {key}"
            assert tally.count_of(name) == held.get((1, name), 0) + held.get((2, name), 0)
    close(main)


def test_an_engine_serves_elsewhere_if_all_other_workers_can_send_requests_to_it(
    boards: list[HostBoard],
) -> None:
    main, one, two = boards
    assert not one.serves_elsewhere(0)
    two.set_serving([True, False, *[False] * 61, True])
    assert [number for number in range(64) if one.serves_elsewhere(number)] == [0, 63]
    assert not any(main.serves_elsewhere(number) for number in range(64)), "the first worker is not connected"
    one.set_serving([False] * 63 + [True])
    assert [number for number in range(64) if main.serves_elsewhere(number)] == [63]
    one.set_serving([True] * 100)
    assert main.serves_elsewhere(99), "a board has no room for more than 64 engines"
    alone = HostBoard.create(BoardSize(1, NUM_KEYS))
    assert alone.serves_elsewhere(0)
    alone.close()


def test_what_a_dead_process_held_is_given_back(boards: list[HostBoard]) -> None:
    main, one, two = boards
    one.tally("answers").add("acme", 3)
    one.set_connections(4)
    one.set_serving([True])
    one.count_change()
    two.tally("answers").add("acme", 1)
    main.clear(1)
    assert main.tally("answers").count_of("acme") == 1
    assert two.least_connections_elsewhere() is None and not main.are_others_ready()
    assert two.changes_elsewhere() == (0, 1), "changes were committed, whatever became of the process"
    # Its successor starts with an empty table.
    successor = HostBoard(main.descriptor, main.size, 1).tally("answers")
    successor.add("acme", 2)
    assert successor.count_of("acme") == 3


def test_a_state_is_read_once_by_each_process(boards: list[HostBoard]) -> None:
    main, one, two = boards
    assert one.read_state() is None
    main.write_state({"stalls": {"engine": "it hangs"}})
    main.write_state({"stalls": {}})
    assert one.read_state() == {"stalls": {}} and one.read_state() is None
    assert two.read_state() == {"stalls": {}}


def close(board: HostBoard) -> None:
    assert board.descriptor is not None
    os.close(board.descriptor)


def make_pools(boards: list[HostBoard], num_permits: int, max_per_tenant: int) -> list[PermitPool]:
    return [
        PermitPool(num_permits, max_per_tenant, "things", "max_things", tally=board.tally("answers"))
        for board in boards
    ]


def test_permits_are_limited_for_all_processes_together(boards: list[HostBoard]) -> None:
    _, one, two = make_pools(boards, num_permits=8, max_per_tenant=4)
    with one.hold("hostile", 2), two.hold("hostile", 2):
        for pool in (one, two):
            with (
                pytest.raises(TenantBusy, match="Your tenant has 4 things, and the limit is 4"),
                pool.hold("hostile", 1),
            ):
                pass
            with pool.hold("honest", 1):
                assert pool.num_taken == 5


@given(wishes=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(1, 5)), max_size=40))
def test_two_processes_never_give_out_more_permits_than_one(wishes: list[tuple[int, int, int]]) -> None:
    """The same requests in the same order are admitted or refused alike, whichever process they reach."""
    main = HostBoard.create(BoardSize(3, NUM_KEYS))
    spread = make_pools([HostBoard(main.descriptor, main.size, process) for process in (1, 2)], 12, 6)
    alone = HostBoard.create(BoardSize(1, NUM_KEYS))
    (single,) = make_pools([alone], 12, 6)
    with ExitStack() as stack:
        for process, tenant, count in wishes:
            outcomes = []
            for pool in (spread[process], single):
                with suppress(TenantBusy, ServerBusy):
                    stack.enter_context(pool.hold(f"tenant {tenant}", count))
                    outcomes.append(pool)
            assert len(outcomes) in (0, 2)
        assert spread[0].num_taken == spread[1].num_taken == single.num_taken
    close(main)


class LateTally:
    """A tally that shows the permits of another process only after the first check."""

    def __init__(self) -> None:
        self.own = 0

    @property
    def total(self) -> int:
        return self.own + (0 if self.own == 0 else 4)

    def count_of(self, key: str) -> int:
        return self.own

    def add(self, key: str, count: int) -> None:
        self.own += count


def test_a_permit_that_another_process_took_at_the_same_moment_is_given_back() -> None:
    tally = LateTally()
    pool = PermitPool(4, 4, "things", "max_things", tally=tally)  # type: ignore[arg-type]
    with pytest.raises(ServerBusy, match="at the same moment"), pool.hold("acme", 1):
        pass
    assert tally.own == 0


def test_caches_are_not_used_until_the_change_of_another_process_was_read(boards: list[HostBoard]) -> None:
    now_s = 100.0
    changes = HostChanges(boards[1], lambda: now_s)
    assert not changes.is_behind()
    HostChanges(boards[1]).announce()
    assert not changes.is_behind(), "a process drops what it has changed itself"
    HostChanges(boards[2]).announce()
    assert changes.is_behind()
    committed = changes.read()
    HostChanges(boards[2]).announce()
    changes.apply(committed)
    assert changes.is_behind(), "the second change is not in the feed that was read"
    changes.apply(changes.read())
    assert not changes.is_behind()


def test_caches_are_used_again_after_a_second_without_the_feed(boards: list[HostBoard]) -> None:
    """The database may be away. Cached names and keys go on serving then."""
    now_s = 100.0
    changes = HostChanges(boards[1], lambda: now_s)
    HostChanges(boards[2]).announce()
    assert changes.is_behind()
    now_s += 0.9
    assert changes.is_behind()
    now_s += 0.2
    assert not changes.is_behind()
