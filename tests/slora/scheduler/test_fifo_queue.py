"""First come, first served, whichever tenant sends the request."""

from slora.core.request import TenantShare
from slora.scheduler.waiting_queues import FifoQueue
from tests.support.queueing import make_sequence, make_tenant


def test_the_earliest_arrival_is_next_regardless_of_service_and_push_order() -> None:
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


def test_a_preempted_sequence_returns_to_its_old_place() -> None:
    queue, a = FifoQueue(), make_tenant("a")
    old, new = make_sequence(a), make_sequence(a)
    queue.push(old)
    queue.remove(old)
    queue.push(new)
    queue.push(old)
    assert queue.peek() is old


def test_peek_skips_the_excluded_tenants() -> None:
    queue, a, b = FifoQueue(), make_tenant("a"), make_tenant("b")
    first, second, third = make_sequence(a), make_sequence(a), make_sequence(b)
    for sequence in (first, second, third):
        queue.push(sequence)
    assert [queue.peek(over) for over in ([], [b], [a], [a, b])] == [first, first, third, None]


def test_a_removed_sequence_is_never_returned() -> None:
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


def test_upcoming_lists_only_waiting_sequences() -> None:
    queue, a = FifoQueue(), make_tenant("a")
    sequences = [make_sequence(a) for _ in range(4)]
    for sequence in sequences:
        queue.push(sequence)
    queue.remove(sequences[1])
    assert queue.upcoming(1) == sequences[:1]
    assert set(queue.upcoming(10)) == {sequences[0], *sequences[2:]}


def test_the_newest_sequence_is_preempted() -> None:
    queue, a, b = FifoQueue(), make_tenant("a", service=1000), make_tenant("b")
    old, new = make_sequence(a), make_sequence(b)
    assert queue.choose_victim([new, old]) is new
