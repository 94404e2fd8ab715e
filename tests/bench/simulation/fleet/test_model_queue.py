"""The queue of the replica model decides as the scheduler's fair queue does."""

import random

from bench.simulation.fleet.model_queue import ModelQueue
from bench.simulation.fleet.model_request import ModelRequest
from slora.memory.page_pool import PagePool
from slora.memory.tenant_account import TenantAccount
from slora.scheduler.waiting_queues import FairQueue
from tests.support.queueing import make_sequence, make_tenant


def make_request(number: int, tenant: TenantAccount) -> ModelRequest:
    return ModelRequest(number, 0.0, tenant, 0, 1, 1)


def test_both_queues_serve_the_same_requests_in_the_same_order() -> None:
    draw = random.Random(0)
    pairs = [(make_tenant(f"tenant-{i}"), make_tenant(f"tenant-{i}")) for i in range(4)]
    fair, model = FairQueue(), ModelQueue()
    numbers = {}
    for number in range(600):
        first, second = draw.choice(pairs)
        if draw.random() < 0.55:
            sequence, request = make_sequence(first), make_request(number, second)
            numbers[sequence] = number
            sequence.num_preemptions = request.num_preemptions = int(draw.random() < 0.2)
            fair.push(sequence), model.push(request)
        skipped = draw.choices(pairs, k=draw.randrange(2))
        head = fair.peek([one for one, _ in skipped])
        taken = model.peek([one for _, one in skipped])
        assert (head is None) == (taken is None)
        assert [numbers[one] for one in fair.upcoming(5)] == [one.number for one in model.upcoming(5)]
        if head is not None and taken is not None and draw.random() < 0.7:
            assert numbers[head] == taken.number
            fair.remove(head), model.remove_first(taken.tenant)
            for tenant in (head.tenant, taken.tenant):
                tenant.charge(1 + number % 7)
        assert len(fair) == len(model) == len(list(model))


def test_both_queues_preempt_the_same_request() -> None:
    draw = random.Random(1)
    for _ in range(100):
        pool = PagePool(1000)
        pairs = [(make_tenant(f"tenant-{i}"), make_tenant(f"tenant-{i}")) for i in range(4)]
        fair, model = FairQueue(), ModelQueue()
        sequences, requests = [], []
        pages: dict[TenantAccount, int] = {}
        for number in range(12):
            first, second = draw.choice(pairs)
            sequence, request = make_sequence(first), make_request(number, second)
            if draw.random() < 0.2:
                fair.push(sequence), model.push(request)
                continue
            sequence.num_computed = request.num_computed = draw.randrange(50)
            sequence.num_repeat_preemptions = request.num_repeats = draw.choice((0, 0, 0, 3))
            held = draw.randrange(1, 20)
            pool.allocate(held, first)
            pages[second] = pages.get(second, 0) + held
            sequences.append(sequence), requests.append(request)
        victim = sequences.index(fair.choose_victim(sequences))
        assert model.choose_victim(requests, pages) is requests[victim]
