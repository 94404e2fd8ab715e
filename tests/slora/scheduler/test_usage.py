"""What a request is billed for: its tokens, the adapter loads that it caused, and its part of the pages over time.

Each step of the bench takes 0.25 s. A page has 4 tokens.
"""

import pytest

from slora.core.request import RequestUsage
from slora.scheduler.sequence import Sequence
from slora_adapters.version import AdapterVersion
from tests.support.scheduler_bench import SchedulerBench
from tests.support.scripted_source import FULL_PAGE_BYTES

VERSION = AdapterVersion("tenant", "digest")
OTHER = AdapterVersion("other", "digest")


def make_bench(num_pages: int = 40, **options: object) -> SchedulerBench:
    return SchedulerBench({VERSION: 2, OTHER: 2}, num_pages=num_pages, **options)  # type: ignore[arg-type]


def run(bench: SchedulerBench) -> dict[str, RequestUsage]:
    list(bench.run_to_end(patience=20))
    bench.step()  # collects the usage of a request that was aborted after the last step
    total = sum(bench.usage.values(), start=RequestUsage())
    assert total == bench.scheduler.total_usage
    assert total.page_seconds == pytest.approx(bench.page_seconds, abs=1e-5)
    return bench.usage


def test_a_request_is_billed_for_its_tokens_and_for_its_pages_while_it_runs() -> None:
    bench = make_bench()
    bench.add("a", prompt=4, max_tokens=3)
    # Three steps: one with 1 page, two with 2 pages.
    assert run(bench) == {"a": RequestUsage(4, 0, 3, 0, 0.25 + 2 * 0.5)}


def test_time_that_a_request_waits_costs_no_pages() -> None:
    bench = make_bench(max_num_seqs=1)
    bench.add("a", prompt=4, max_tokens=3)
    bench.add("b", prompt=4, max_tokens=1)
    bench.step()
    bench.now = 1000.0  # the first request runs for so long
    assert run(bench)["b"] == RequestUsage(4, 0, 1, 0, 0.25)


def test_a_request_that_never_ran_is_billed_nothing() -> None:
    bench = make_bench(max_num_seqs=1)
    bench.add("a", max_tokens=3)
    bench.add("waits", prompt=9)
    bench.step()
    bench.scheduler.abort("waits")
    assert run(bench)["waits"] == RequestUsage()


def test_an_aborted_request_is_billed_for_what_was_computed() -> None:
    bench = make_bench(max_num_batched_tokens=8)
    bench.add("prefilling", prompt=30, max_tokens=5)
    bench.step()
    bench.step()
    bench.scheduler.abort("prefilling")
    assert run(bench)["prefilling"] == RequestUsage(16, 0, 0, 0, (2 + 4) * 0.25)


def test_cached_prompt_tokens_are_told_apart() -> None:
    bench = make_bench(prefix_cache="tenant")
    bench.add("first", prompt=10)
    run(bench)
    bench.add("second", prompt=10)
    usage = run(bench)["second"]
    assert (usage.prompt_tokens, usage.cached_tokens, usage.page_seconds) == (10, 8, 3 * 0.25)


def test_a_page_that_two_requests_hold_is_divided_between_them() -> None:
    bench = make_bench(prefix_cache="tenant", max_num_batched_tokens=12)
    bench.add("first", prompt=9, max_tokens=3)
    bench.step()  # holds 3 pages
    bench.add("second", prompt=9, max_tokens=2)
    usage = run(bench)
    # Two steps side by side: 2 shared pages, and one of its own for each.
    assert usage["second"].page_seconds == 2 * (2 / 2 + 1) * 0.25
    assert usage["first"].page_seconds == 3 * 0.25 + 2 * (2 / 2 + 1) * 0.25


def test_all_choices_are_billed_and_their_shared_pages_once() -> None:
    bench = make_bench()
    bench.add("a", prompt=4, max_tokens=3, n=4)
    # The prompt's page is shared. From the second step on, each choice has a page of its own, too.
    assert run(bench) == {"a": RequestUsage(4, 0, 12, 0, 0.25 + 2 * (1 + 4) * 0.25)}


def test_a_page_that_is_copied_before_it_is_written_is_billed_to_its_choice() -> None:
    bench = make_bench(num_pages=4, num_slots=1)
    for number in range(8):  # later requests get pages that earlier ones shared
        bench.add(f"a{number}", prompt=6, max_tokens=2, n=3)
        assert run(bench)[f"a{number}"] == RequestUsage(6, 0, 6, 0, (2 + (1 + 3)) * 0.25)
        bench.add(f"b{number}", prompt=1 + 4 * (number % 4))
        run(bench)
    assert bench.num_copies == 16


def test_every_beam_is_billed_for_each_of_its_tokens() -> None:
    bench = make_bench()
    bench.add("a", prompt=4, max_tokens=3, beams=3)
    usage = run(bench)["a"]
    assert usage.prompt_tokens == 4 and usage.generated_tokens == 1 + 3 + 3


def test_the_request_that_caused_a_load_is_billed_for_its_bytes() -> None:
    bench = make_bench(load_pages=99)
    bench.add("first", adapter=VERSION)
    run(bench)
    bench.add("second", adapter=VERSION)
    usage = run(bench)
    assert usage["first"].adapter_bytes == bench.residency.find(VERSION).num_bytes > FULL_PAGE_BYTES
    assert usage["second"].adapter_bytes == 0


def test_the_pages_of_an_adapter_are_divided_among_the_sequences_that_run_on_it() -> None:
    bench = make_bench(load_pages=99)
    bench.add("first", adapter=VERSION, prompt=4, max_tokens=1)
    bench.add("second", adapter=VERSION, prompt=4, max_tokens=1)
    usage = run(bench)
    assert [usage[name].page_seconds for name in ("first", "second")] == [(1 + 2 / 2) * 0.25] * 2


def test_an_adapter_that_no_request_runs_on_is_billed_to_none() -> None:
    bench = make_bench(load_pages=1)
    bench.scheduler.set_pins([VERSION])
    bench.come_to_rest()
    bench.now = 100.0
    assert bench.residency.find(VERSION).is_loaded and run(bench) == {}
    bench.add("a", adapter=VERSION)
    assert run(bench)["a"] == RequestUsage(1, 0, 1, 0, (1 + 2) * 0.25)


@pytest.mark.parametrize("way", ["swap", "recompute"])
def test_a_preempted_request_is_billed_once_for_its_tokens_and_not_for_its_absence(way: str) -> None:
    bench = make_bench(num_pages=6, preemption=way, swap_pages=20, choose=_never_stop)
    bench.add("a", prompt=8, max_tokens=12)
    bench.add("b", prompt=8, max_tokens=12)
    usage = run(bench)
    assert bench.scheduler.num_preemptions > 0
    assert (bench.scheduler.swapping.num_pages_out > 0) == (way == "swap")
    for one in usage.values():
        assert (one.prompt_tokens, one.generated_tokens) == (8, 12)


def _never_stop(sequence: Sequence) -> int:
    return 1


def test_a_reload_that_another_tenant_caused_is_not_billed() -> None:
    """The fair scheduler does not charge it either."""
    bench = make_bench(num_pages=6, num_slots=1, load_pages=99)
    bench.add("a", adapter=VERSION)
    run(bench)
    bench.add("held", prompt=12, max_tokens=9, tenant="other")
    bench.step()  # `other` is over its share now
    bench.add("b", adapter=OTHER, tenant="other")
    run(bench)
    assert bench.residency.was_displaced(VERSION)
    bench.add("c", adapter=VERSION)
    usage = run(bench)
    assert usage["b"].adapter_bytes > 0 and usage["c"].adapter_bytes == 0
