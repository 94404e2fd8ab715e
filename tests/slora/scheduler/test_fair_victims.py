"""Which sequence is preempted under fair scheduling: the one with the least work, among tenants that hold many
pages."""

import pytest

from slora.core.request import EngineRequest, TenantShare
from slora.core.sampling_params import SamplingParams
from slora.memory.page_pool import PagePool
from slora.memory.tenant_account import TenantAccounts
from slora.scheduler.sequence import Sequence
from slora.scheduler.waiting_queues import FairQueue


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
        return Sequence(request, self.tenants.find(tenant), 8, frozenset(), 0, 4)


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


def test_a_tenant_at_its_page_floor_is_preempted_last() -> None:
    runners = Runners(a=TenantShare(min_share=0.5))
    runners.run("at its floor", "a", 50, 1)
    runners.run("other", "b", 1, 90)
    assert runners.victim == "other"


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
