"""A request that cannot get its first token before its deadline is reported once, unless it runs or has its first
token."""

from slora.scheduler.deadlines import Deadlines
from tests.support.queueing import make_sequence, make_tenant

TENANT = make_tenant("a")


def test_those_who_have_not_begun_by_their_latest_start_are_told_of_once_in_order() -> None:
    deadlines = Deadlines()
    late, later, last = (make_sequence(TENANT) for _ in range(3))
    for sequence, latest_start_s in ((last, 9.0), (late, 1.0), (later, 2.0)):
        deadlines.add(sequence, latest_start_s)
    assert deadlines.missed(0.5) == []
    assert deadlines.missed(3.0) == [late, later]
    assert deadlines.missed(3.0) == []
    assert deadlines.missed(10.0) == [last]


def test_who_runs_has_spoken_or_is_over_is_not_told_of() -> None:
    deadlines = Deadlines()
    running, spoken, over, late = (make_sequence(TENANT) for _ in range(4))
    running.is_running = over.done = True
    spoken.token_ids.append(1)
    for sequence in (running, spoken, over, late):
        deadlines.add(sequence, 1.0)
    assert deadlines.missed(2.0) == [late]


def test_the_next_moment_to_look_is_the_earliest_latest_start() -> None:
    deadlines = Deadlines()
    assert deadlines.next_s is None
    deadlines.add(make_sequence(TENANT), 5.0)
    deadlines.add(make_sequence(TENANT), 3.0)
    assert deadlines.next_s == 3.0
    deadlines.missed(3.0)
    assert deadlines.next_s == 5.0
    deadlines.missed(5.0)
    assert deadlines.next_s is None
