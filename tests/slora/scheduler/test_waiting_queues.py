"""The fair queue serves the tenant with the lowest weighted service next. Idle tenants save up no service."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slora.core.request import EngineRequest, TenantShare
from slora.core.sampling_params import SamplingParams
from slora.memory.kv_cache import BlockTable
from slora.memory.page_pool import PagePool
from slora.memory.tenant_account import TenantAccount, TenantAccounts
from slora.scheduler.sequence import Sequence
from slora.scheduler.waiting_queues import FairQueue, FifoQueue, WaitingQueue
from tests.support.queueing import make_sequence, make_tenant


def push(queue: FairQueue, tenant: TenantAccount, count: int = 1, priority: int = 0) -> list[Sequence]:
    sequences = [make_sequence(tenant, priority) for _ in range(count)]
    for sequence in sequences:
        queue.push(sequence)
    return sequences


def serve(queue: FairQueue, cost: float) -> TenantAccount:
    """The next sequence starts, and its tenant is charged `cost`."""
    sequence = queue.peek()
    assert sequence is not None
    queue.remove(sequence)
    sequence.tenant.charge(cost)
    return sequence.tenant


def test_requests_of_one_tenant_are_ordered_by_priority_then_arrival() -> None:
    queue, a = FairQueue(), make_tenant("a")
    last, first, second, early = (make_sequence(a, priority) for priority in (5, 0, 0, -3))
    for sequence in (last, second, first, early):
        queue.push(sequence)
    order = []
    while (sequence := queue.peek()) is not None:
        queue.remove(sequence)
        order.append(sequence)
    assert order == [early, first, second, last]


def test_a_request_priority_does_not_affect_other_tenants() -> None:
    queue, a, b = FairQueue(), make_tenant("a"), make_tenant("b")
    push(queue, a, priority=-1000)
    push(queue, b)
    a.charge(1)
    assert serve(queue, 1) is b


def test_a_later_priority_class_waits_until_the_earlier_one_is_empty() -> None:
    queue = FairQueue()
    later, earlier = make_tenant("later", TenantShare(priority=1)), make_tenant("earlier")
    push(queue, later, 2), push(queue, earlier, 2)
    assert [serve(queue, 1000) for _ in range(4)] == [earlier, earlier, later, later]


def test_peek_skips_the_excluded_tenants() -> None:
    queue, a, b, c = FairQueue(), make_tenant("a"), make_tenant("b"), make_tenant("c")
    for tenant, service in ((a, 1), (b, 2), (c, 3)):
        push(queue, tenant)
        tenant.charge(service)
    found = [queue.peek(passed_over) for passed_over in ([], [a], [a, b], [b], [a, b, c])]
    assert [one and one.tenant for one in found] == [a, b, c, a, None]


# -- the lift rule ------------------------------------------------------------------------------------------------


def test_an_idle_tenants_counter_is_lifted_to_the_lowest_waiting_counter() -> None:
    queue, a, b, idle = FairQueue(), make_tenant("a"), make_tenant("b"), make_tenant("idle", service=3)
    push(queue, a), push(queue, b)
    a.charge(100), b.charge(70)
    push(queue, idle)
    assert idle.service == 70


def test_the_lift_never_lowers_a_counter() -> None:
    queue, greedy = FairQueue(), make_tenant("greedy", service=500)
    push(queue, make_tenant("a", service=100))
    push(queue, greedy)
    assert greedy.service == 500


def test_with_an_empty_queue_the_counter_is_lifted_to_that_of_the_last_waiting_tenant() -> None:
    queue, last, idle = FairQueue(), make_tenant("last"), make_tenant("idle")
    push(queue, last)
    last.charge(80)
    serve(queue, 0)
    push(queue, idle)
    assert idle.service == 80


def test_a_tenant_with_waiting_requests_is_not_lifted() -> None:
    queue, slow, fast = FairQueue(), make_tenant("slow"), make_tenant("fast")
    push(queue, slow), push(queue, fast)
    fast.charge(100)
    push(queue, slow)
    assert slow.service == 0


def test_pushing_a_preempted_sequence_does_not_lift_its_tenant() -> None:
    queue, a, b = FairQueue(), make_tenant("a"), make_tenant("b", service=100)
    (sequence,) = push(queue, a)
    queue.remove(sequence)
    push(queue, b)
    sequence.num_preemptions = 1
    queue.push(sequence)
    assert a.service == 0


def test_the_lift_considers_only_the_tenants_own_priority_class() -> None:
    """Born from a bug: the newcomer was lifted only to a starving tenant of a later class.

    It then kept its own class waiting until it had received as much service as they had.
    """
    queue = FairQueue()
    starving = make_tenant("starving", TenantShare(priority=1), service=1)
    busy, idle = make_tenant("busy", service=1000), make_tenant("idle")
    push(queue, starving), push(queue, busy), push(queue, idle)
    assert idle.service == 1000


def test_with_an_empty_class_the_lift_uses_the_last_tenant_of_that_class() -> None:
    """Born from a bug: it was lifted to the last tenant that left the queue, of any class."""
    queue = FairQueue()
    later = [make_tenant(name, TenantShare(priority=1)) for name in ("later", "later newcomer")]
    busy, newcomer = make_tenant("busy", service=1000), make_tenant("newcomer")
    push(queue, busy)
    serve(queue, 0)
    push(queue, later[0])
    assert later[0].service == 0
    serve(queue, 10)
    push(queue, newcomer)
    assert newcomer.service == 1000
    push(queue, later[1])
    assert later[1].service == 0


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 50)), min_size=1, max_size=80),
    st.lists(st.sampled_from([0.5, 1.0, 4.0]), min_size=4, max_size=4),
)
def test_counters_of_backlogged_tenants_stay_close(
    arrivals: list[tuple[int, int]], weights: list[float]
) -> None:
    """VTC's bound: the counters never differ by more than the cost of one request divided by the smaller weight."""
    queue = FairQueue()
    tenants = [make_tenant(str(n), TenantShare(weight=weight)) for n, weight in enumerate(weights)]
    for tenant in tenants:
        push(queue, tenant, len(arrivals) + 1)
    for number, cost in arrivals:
        push(queue, tenants[number], cost)  # sending more requests must not give a tenant more service
        serve(queue, cost)
        counters = [tenant.service for tenant in tenants]
        assert max(counters) - min(counters) <= 50 / min(weights)


# -- removal, and which requests are reported ----------------------------------------------------------------------


@pytest.mark.parametrize("queue", [FairQueue(), FifoQueue()])
def test_a_removed_sequence_is_never_returned(queue: WaitingQueue) -> None:
    a = make_tenant("a")
    first, second, third = (make_sequence(a) for _ in range(3))
    for sequence in (first, second, third):
        queue.push(sequence)
    queue.remove(second)
    queue.remove(second)
    assert (len(queue), a.num_waiting, second in queue, third in queue) == (2, 2, False, True)
    assert queue.peek() is first
    queue.remove(first)
    assert queue.peek() is third
    queue.remove(third)
    assert queue.peek() is None and len(queue) == a.num_waiting == 0


def test_upcoming_lists_waiting_sequences_first_of_each_tenant() -> None:
    queue, a, b = FairQueue(), make_tenant("a"), make_tenant("b", service=1)
    of_a, of_b = push(queue, a, 3), push(queue, b, 2)
    queue.remove(of_a[1])
    assert queue.upcoming(0) == []
    assert queue.upcoming(1) == [of_a[0]]
    assert queue.upcoming(2) == [of_a[0], of_b[0]]
    assert set(queue.upcoming(10)) <= {of_a[0], of_a[2], *of_b}


# -- preemption --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_pages", "gives_way"), [(5, "much"), (4, "little"), (0, "little")])
def test_a_tenant_within_its_page_floor_is_preempted_last(num_pages: int, gives_way: str) -> None:
    queue, much, little = FairQueue(), make_tenant("much", service=9), make_tenant("little", service=1)
    much.min_pages, much.num_pages, little.num_pages = 4, num_pages, 1
    running = [make_sequence(much), make_sequence(little)]
    assert queue.choose_victim(running).tenant.name == gives_way


# -- victims: the least work, among tenants that hold many pages -------------------------------------------------------


class Runners:
    """Running sequences, each with pages of a pool of 100."""

    def __init__(self, **shares: TenantShare) -> None:
        self.queue = FairQueue()
        self.sequences: list[Sequence] = []
        self.pool, self.tenants = PagePool(100), TenantAccounts(100)
        for name, share in shares.items():
            self.tenants.set_share(name, share)

    def run(self, request_id: str, tenant: str, num_pages: int, num_computed: int, priority: int = 0) -> None:
        sequence = self._sequence(request_id, tenant, priority)
        self.pool.allocate(num_pages, sequence.tenant)
        sequence.num_computed = num_computed
        self.sequences.append(sequence)

    def wait(self, tenant: str) -> None:
        self.queue.push(self._sequence("waiting", tenant, 0))

    @property
    def victim(self) -> str:
        return self.queue.choose_victim(iter(self.sequences)).request.request_id

    def _sequence(self, request_id: str, tenant: str, priority: int) -> Sequence:
        request = EngineRequest(request_id, tenant, [1], (), SamplingParams(max_tokens=8), priority=priority)
        return Sequence(request, self.tenants.find(tenant), 8, frozenset(), 0, BlockTable(4))


def test_of_equal_tenants_the_sequence_with_fewest_computed_tokens_is_preempted() -> None:
    runners = Runners()
    runners.run("begun", "a", 10, 5)
    runners.run("far along", "b", 10, 90)
    runners.tenants.find("b").charge(1000)
    assert runners.victim == "begun"


def test_a_tenant_within_its_share_is_not_preempted() -> None:
    runners = Runners()
    runners.run("modest", "a", 4, 1)
    for number in range(3):
        runners.run(f"heavy {number}", "b", 10, 50 - number)
    assert runners.victim == "heavy 2"


def test_a_larger_weight_is_a_larger_share() -> None:
    runners = Runners(a=TenantShare(weight=3))
    runners.run("entitled", "a", 20, 1)
    runners.run("other", "b", 10, 50)
    assert runners.victim == "other"


def test_waiting_tenants_reduce_the_share_of_the_others() -> None:
    runners = Runners()
    runners.run("small", "a", 12, 1)
    runners.run("large", "b", 18, 50)
    assert runners.victim == "large", "15 pages are a share"
    runners.wait("c")
    assert runners.victim == "small", "10 pages are one: both hold more"


def test_pages_that_are_only_cached_do_not_count_as_held() -> None:
    runners = Runners()
    runners.run("caching", "a", 10, 1)
    runners.run("other", "b", 12, 50)
    runners.pool.cache(runners.pool.allocate(50, runners.tenants.find("a")))
    assert runners.victim == "other"


def test_a_later_priority_class_is_preempted_before_a_larger_tenant() -> None:
    runners = Runners(a=TenantShare(priority=1))
    runners.run("late", "a", 1, 90)
    runners.run("early", "b", 50, 1)
    assert runners.victim == "late"


@pytest.mark.parametrize("priority", [-1, 1])
def test_a_request_s_priority_counts_within_its_tenant_only(priority: int) -> None:
    runners = Runners()
    runners.run("begun", "a", 5, 5, priority)
    runners.run("further", "a", 5, 20)
    runners.run("of another", "b", 10, 50, -priority)
    assert runners.victim == ("begun" if priority > 0 else "further")


def test_of_equally_computed_sequences_the_newer_one_is_preempted() -> None:
    runners = Runners()
    for name in ("old", "new"):
        runners.run(name, "a", 5, 5)
    assert runners.victim == "new"


# -- first come, first served, whichever tenant sends the request ------------------------------------------------------


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


def test_peek_of_a_fifo_queue_skips_the_excluded_tenants() -> None:
    queue, a, b = FifoQueue(), make_tenant("a"), make_tenant("b")
    first, second, third = make_sequence(a), make_sequence(a), make_sequence(b)
    for sequence in (first, second, third):
        queue.push(sequence)
    assert [queue.peek(over) for over in ([], [b], [a], [a, b])] == [first, first, third, None]


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
