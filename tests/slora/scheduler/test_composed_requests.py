"""Sequences that need several adapters: they wait for all, hold all, and never wait for each other's copies."""

import pytest

from slora.core.errors import AdapterFetchFailed, ContextTooLong
from slora.core.request import WeightedAdapter
from slora_adapters.version import AdapterVersion
from tests.support.scheduler_bench import SchedulerBench
from tests.support.scripted_source import FULL_PAGE_BYTES

VERSIONS = [AdapterVersion("tenant", f"digest{number}") for number in range(4)]
PAGES = dict.fromkeys(VERSIONS, 2)


def weigh(*numbers: int) -> list[WeightedAdapter]:
    return [WeightedAdapter(VERSIONS[number], 1.0 + number) for number in numbers]


def test_a_sequence_starts_when_its_last_adapter_has_arrived_and_holds_all_of_them() -> None:
    bench = SchedulerBench(PAGES, num_pages=12)
    bench.add("sum", adapters=weigh(0, 1), max_tokens=3)
    bench.step()
    assert bench.source.in_flight == {VERSIONS[0], VERSIONS[1]}
    bench.source.deliver([VERSIONS[1]])
    bench.step()
    assert bench.scheduler.num_running == 0 and bench.scheduler.num_awaiting_adapter == 1
    bench.source.deliver([VERSIONS[0]])
    bench.step()
    (sequence,) = bench.scheduler.find("sum")
    assert [one.version for one in sequence.residents] == [VERSIONS[0], VERSIONS[1]]
    assert len(list(bench.run_to_end(5))) == 2
    assert bench.usage["sum"].adapter_bytes == 4 * FULL_PAGE_BYTES
    assert bench.source.num_pinned == 0 and bench.pool.num_held == 0


@pytest.mark.parametrize("host_pages", [0, 4, 6, 100])
def test_requests_that_share_adapters_do_not_wait_for_each_other_in_a_small_host_cache(
    host_pages: int,
) -> None:
    """If each held one copy and waited for room for the other one, none would ever start."""
    bench = SchedulerBench(PAGES, num_pages=12, host_pages=host_pages)
    for number, pair in enumerate([(0, 1), (1, 2), (2, 3), (3, 0), (0, 2), (1, 3)]):
        bench.add(str(number), adapters=weigh(*pair))
    outputs = []
    for _ in range(200):
        if not bench.num_unfinished:
            break
        bench.source.deliver(sorted(bench.source.in_flight, key=str)[:1])
        outputs += bench.step()
    assert len(outputs) == 6 and all(output.error is None for output in outputs)
    assert bench.source.num_pinned == 0


def test_an_adapter_that_is_evicted_while_the_other_is_fetched_is_fetched_again() -> None:
    bench = SchedulerBench(PAGES, num_pages=6)
    bench.add("first", adapter=VERSIONS[0])
    assert len(list(bench.run_to_end(5))) == 1 and bench.residency.find(VERSIONS[0]) is not None
    bench.add("sum", adapters=weigh(0, 1))
    bench.step()
    assert bench.source.in_flight == {VERSIONS[1]}
    bench.add("large", prompt=16, max_tokens=5)
    bench.run_steps(2)
    assert bench.residency.find(VERSIONS[0]) is None, "the large prompt needed its pages"
    assert all(output.error is None for output in bench.run_to_end(10))
    assert bench.source.num_fetches[VERSIONS[0]] == 2 and bench.usage["sum"].generated_tokens == 1


def test_a_sum_whose_adapters_leave_no_page_for_kv_is_refused_and_harms_no_other_request() -> None:
    bench = SchedulerBench(PAGES, num_pages=4)
    bench.add("plain", adapters=weigh(1))
    bench.add("sum", adapters=weigh(0, 2))
    errors = {output.request_id: output.error for output in bench.run_to_end(10) if output.error is not None}
    assert errors.keys() == {"sum"} and isinstance(errors["sum"], ContextTooLong)
    assert "2 adapters" in str(errors["sum"]) and bench.source.num_pinned == 0


def test_one_adapter_that_cannot_be_fetched_ends_the_request_and_releases_the_others() -> None:
    bench = SchedulerBench(PAGES, num_pages=12)
    bench.add("sum", adapters=weigh(0, 1))
    bench.step()
    bench.source.deliver([VERSIONS[0]])
    bench.step()
    bench.source.fail(VERSIONS[1], "corrupt")
    (output,) = bench.step()
    assert isinstance(output.error, AdapterFetchFailed)
    assert bench.source.num_pinned == 0 and bench.scheduler.num_awaiting_adapter == 0


def test_a_deleted_adapter_is_dropped_when_the_last_sum_with_it_has_ended() -> None:
    bench = SchedulerBench(PAGES, num_pages=20, prefix_cache="tenant")
    bench.add("sum", adapters=weigh(0, 1), prompt=9, max_tokens=2)
    bench.step()
    bench.deliver_and_step()
    bench.scheduler.remove_adapter(VERSIONS[1])
    assert bench.residency.find(VERSIONS[1]) is not None
    assert all(output.error is None for output in bench.run_to_end(5))
    assert bench.residency.find(VERSIONS[1]) is None and bench.residency.find(VERSIONS[0]) is not None
    assert bench.pool.num_cached == len(bench.residency.find(VERSIONS[0]).pages), (
        "prefixes of the sum are left"
    )


def test_a_sum_that_exceeds_the_tenants_ceiling_is_refused_by_name() -> None:
    bench = SchedulerBench(PAGES, num_pages=20)
    share = bench.memory.tenants.find("tenant").share
    bench.add("sum", adapters=weigh(0, 1, 2), share=type(share)(max_share=0.3))
    (output,) = list(bench.run_to_end(5))
    assert isinstance(output.error, ContextTooLong)
    assert "6 for its 3 adapters" in str(output.error) and "max_pool_share" in str(output.error)
