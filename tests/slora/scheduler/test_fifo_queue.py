"""First come, first served, whichever tenant sends the request."""

from slora.scheduler.fifo_queue import FifoQueue
from slora.tenant_share import TenantShare
from tests.support.queueing import make_sequence, make_tenant


def test_the_first_to_arrive_is_next_whatever_its_tenant_has_had_and_whenever_it_was_pushed() -> None:
    queue = FifoQueue()
    much = make_tenant("much", TenantShare(priority=9), service=1000)
    little = make_tenant("little")
    first, second, third = make_sequence(much, priority=5), make_sequence(little), make_sequence(much)
    for sequence in (third, first, second):
        queue.push(sequence)
    order = []
    while (sequence_next := queue.peek()) is not None:
        queue.remove(sequence_next)
        order.append(sequence_next)
    assert order == [first, second, third]


def test_who_gave_way_comes_back_in_its_old_place() -> None:
    queue, a = FifoQueue(), make_tenant("a")
    old, new = make_sequence(a), make_sequence(a)
    queue.push(old)
    queue.remove(old)
    queue.push(new)
    queue.push(old)
    assert queue.peek() is old


def test_tenants_that_are_passed_over_leave_their_turn_to_the_next() -> None:
    queue, a, b = FifoQueue(), make_tenant("a"), make_tenant("b")
    first, second, third = make_sequence(a), make_sequence(a), make_sequence(b)
    for sequence in (first, second, third):
        queue.push(sequence)
    assert [queue.peek(over) for over in ([], [b], [a], [a, b])] == [first, first, third, None]


def test_who_is_removed_is_never_next_wherever_it_stood() -> None:
    queue, a = FifoQueue(), make_tenant("a")
    first, second, third = (make_sequence(a) for _ in range(3))
    for sequence in (first, second, third):
        queue.push(sequence)
    queue.remove(second)
    queue.remove(second)
    assert (len(queue), a.num_waiting, second in queue, third in queue) == (2, 2, False, True)
    queue.remove(first)
    assert queue.peek() is third
    queue.remove(third)
    assert queue.peek() is None and len(queue) == a.num_waiting == 0


def test_who_is_told_to_be_next_soon_waits() -> None:
    queue, a = FifoQueue(), make_tenant("a")
    sequences = [make_sequence(a) for _ in range(4)]
    for sequence in sequences:
        queue.push(sequence)
    queue.remove(sequences[1])
    assert queue.upcoming(1) == sequences[:1]
    assert set(queue.upcoming(10)) == {sequences[0], *sequences[2:]}


def test_the_newest_gives_way() -> None:
    queue, a, b = FifoQueue(), make_tenant("a", service=1000), make_tenant("b")
    old, new = make_sequence(a), make_sequence(b)
    assert queue.choose_victim([new, old]) is new
