"""What a request is billed for: its tokens, the adapter loads that it caused, and its part of the pages over time.

Each step of the bench takes 0.25 s. A page has 4 tokens.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slora.core.engine_state import ServedCounts
from slora.core.request import EngineRequest, RequestTiming, RequestUsage, TenantShare, single_adapter
from slora.core.sampling_params import SamplingParams
from slora.scheduler.charges import charge_load, charge_mask, charge_prompt
from slora.scheduler.sequence import Sequence
from slora.scheduler.served_counts import OTHERS, ServedRequests
from slora_adapters.version import AdapterVersion
from tests.support.queueing import make_sequence, make_tenant
from tests.support.scheduler_bench import COSTS, SchedulerBench
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
    bench.run_steps(2)
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


# -- when requests pass the stages of the engine -----------------------------------------------------------------------


def time_requests(bench: SchedulerBench) -> dict[str, RequestTiming]:
    run(bench)
    return bench.timings


def test_a_request_waits_in_the_queue_until_it_is_admitted_then_prefills_then_decodes() -> None:
    bench = make_bench(max_num_seqs=1, max_num_batched_tokens=8)
    bench.add("first", prompt=16, max_tokens=3)
    bench.add("second", max_tokens=1)
    timings = time_requests(bench)
    assert timings["first"] == RequestTiming(0.0, 0.0, False, 0.0, 0.0, 0.5, 1.0)
    assert timings["second"] == RequestTiming(0.0, 0.0, False, 1.0, 1.0, 1.25, 1.25)
    assert (timings["first"].queue_s, timings["second"].queue_s) == (0.0, 1.0)


def test_a_cold_request_waits_for_the_fetch_and_then_for_the_load() -> None:
    bench = make_bench(load_pages=1)
    bench.add("decodes", max_tokens=20)
    bench.add("cold", adapter=VERSION, max_tokens=1)
    bench.run_steps(2)
    bench.source.deliver()
    timing = time_requests(bench)["cold"]
    # The fetch is collected by the third step, which starts to load one of two pages. The fourth step computes.
    assert timing == RequestTiming(0.0, 0.5, True, 0.5, 0.75, 1.0, 1.0)
    assert (timing.queue_s, timing.load_s) == (0.0, 0.25)
    bench.add("warm", adapter=VERSION, max_tokens=1)
    warm = time_requests(bench)["warm"]
    assert not warm.is_cold and warm.load_s == 0.0


def test_a_request_that_joins_a_load_in_progress_is_cold() -> None:
    bench = SchedulerBench({VERSION: 3}, num_pages=40, load_pages=1)
    bench.add("decodes", max_tokens=20)
    bench.add("first", adapter=VERSION, max_tokens=1)
    bench.step()
    bench.deliver_and_step()
    bench.add("second", adapter=VERSION, max_tokens=1)
    timing = time_requests(bench)["second"]
    assert timing.is_cold and timing.fetch_s == 0.0


def test_a_request_that_never_ran_has_no_later_stages() -> None:
    bench = make_bench()
    bench.add("a", adapter=VERSION, max_tokens=1)
    bench.step()
    bench.scheduler.abort("a")
    bench.step()
    assert bench.timings["a"] == RequestTiming(0.0, 0.25, True, None, None, None, 0.25)
    assert (bench.timings["a"].queue_s, bench.timings["a"].load_s) == (0.0, 0.0)


def test_preemptions_are_counted_and_change_no_earlier_time() -> None:
    bench = SchedulerBench({}, num_pages=6)
    bench.add("a", prompt=8, max_tokens=12)
    bench.add("b", prompt=8, max_tokens=12)
    timings = time_requests(bench)
    assert timings["b"].num_preemptions > 0
    assert (timings["b"].admitted_at, timings["b"].first_token_at) == (0.0, 0.25)
    kinds = bench.scheduler.preemptions_by_kind
    assert kinds == {"swap": 0, "recompute": bench.scheduler.num_preemptions, "background": 0}


def test_all_choices_of_a_request_share_its_times() -> None:
    bench = make_bench()
    bench.add("a", prompt=4, max_tokens=3, n=3)
    assert time_requests(bench)["a"] == RequestTiming(0.0, 0.0, False, 0.0, 0.0, 0.25, 0.75)


def test_gaps_between_tokens_are_counted_once_for_each_sequence() -> None:
    bench = make_bench()
    bench.add("a", max_tokens=3)
    bench.step()
    assert bench.scheduler.token_gaps == []
    bench.add("b", max_tokens=3)
    bench.step()
    assert bench.scheduler.token_gaps == [(0.25, 1)]
    bench.step()
    # The first sequence has its third token, and the second one its second.
    assert bench.scheduler.token_gaps == [(0.25, 2)]


def test_loads_are_counted_by_what_caused_them() -> None:
    bench = SchedulerBench({VERSION: 2, AdapterVersion("tenant", "pinned"): 2}, num_pages=40)
    bench.scheduler.set_pins([AdapterVersion("tenant", "pinned")])
    bench.add("a", adapter=VERSION, max_tokens=1)
    bench.come_to_rest()
    bench.scheduler.remove_adapter(VERSION)
    assert bench.scheduler.adapters.loads == {"request": 1, "pin": 1, "prewarm": 0}
    assert bench.scheduler.adapters.fetches == {"fetched": 2, "not_found": 0, "unavailable": 0, "corrupt": 0}
    assert bench.residency.evictions == {"pages": 0, "slot": 0, "removed": 1}


# -- charges: each token once, by weight; a load or a mask as the tokens of its duration -----------------------------


def test_cached_tokens_found_after_a_preemption_are_not_charged() -> None:
    """Born from a bug: a sequence preempted before its first token was charged for prefix blocks that others had
    computed."""
    tenant = make_tenant("a")
    sequence = make_sequence(tenant, prompt=20)
    sequence.num_computed = 16
    charge_prompt(sequence, 4)
    assert tenant.service == 4


def test_a_load_is_charged_as_the_prefill_tokens_of_its_duration() -> None:
    """Loading 10,000 bytes takes 1 ms. Computing one token takes as long."""
    tenant = make_tenant("a", TenantShare(weight=2))
    charge_load(make_sequence(tenant), 10_000, COSTS)
    assert tenant.service == pytest.approx(0.5)


def test_a_mask_is_charged_as_the_prefill_tokens_of_its_cpu_time() -> None:
    tenant = make_tenant("a")
    sequence = make_sequence(tenant)
    charge_mask(sequence, COSTS)
    assert tenant.service == 0  # a sequence without a grammar has no masks
    sequence.mask_s = 0.003
    charge_mask(sequence, COSTS)
    assert tenant.service == pytest.approx(3)


# -- counts of the metrics: few names, and no counter of a listed name ever shrinks ----------------------------------

USAGE = RequestUsage(5, 3, 2)


def ask(tenant: str, digest: str | None = None, *, is_background: bool = False) -> EngineRequest:
    version = None if digest is None else AdapterVersion(tenant, digest)
    params = SamplingParams()
    return EngineRequest("r", tenant, [1], single_adapter(version), params, is_background=is_background)


def at(seconds: float, *, is_cold: bool = False) -> RequestTiming:
    return RequestTiming(seconds - 4, 1.0, is_cold, seconds - 1, seconds - 1, seconds, seconds)


def test_requests_are_counted_by_tenant_and_by_adapter() -> None:
    served = ServedRequests(4)
    served.add(ask("a", "0" * 64), USAGE, at(10, is_cold=True))
    served.add(ask("a"), USAGE, at(11))
    served.add(ask("b", is_background=True), USAGE, at(12, is_cold=True))
    both = ServedCounts(2, 10, 6, 4, 1, 4.0)
    # A background request may wait for hours, so only its tokens count.
    assert served.tenants == {"a": both, "b": ServedCounts(0, 5, 3, 2), OTHERS: ServedCounts()}
    assert served.adapters == {"a/" + "0" * 12: ServedCounts(1, 5, 3, 2, 1, 2.0), OTHERS: ServedCounts()}


def test_a_tenant_that_becomes_much_busier_takes_the_place_of_an_idle_one() -> None:
    served = ServedRequests(2)
    for tenant in ("a", "b", "c", "c", "other"):
        served.add(ask(tenant), USAGE, at(10))
    assert served.tenants.keys() == {"a", "b", OTHERS} and served.tenants[OTHERS].requests == 3
    served.add(ask("c"), USAGE, at(200))
    assert served.tenants.keys() == {"b", "c", OTHERS}
    assert served.tenants["c"] == ServedCounts(), "what it did before was counted with the others"
    served.add(ask("c"), USAGE, at(201))
    assert (served.tenants["c"].requests, served.tenants[OTHERS].requests) == (1, 4)


@given(
    st.lists(st.tuples(st.sampled_from([*"abcdefgh", OTHERS]), st.integers(0, 200)), max_size=60),
    st.integers(0, 4),
)
def test_counters_are_few_and_never_shrink_while_they_are_listed(
    steps: list[tuple[str, int]], most: int
) -> None:
    served, now = ServedRequests(most), 10.0
    for tenant, seconds in steps:
        before = served.tenants
        now += seconds
        served.add(ask(tenant), USAGE, at(now))
        after = served.tenants
        assert len(after) <= most + 1 and len(after.keys() - before.keys()) <= 1
        kept = before.keys() & after.keys()
        assert all(after[name].requests >= before[name].requests for name in kept)
        new = sum(after[name].requests for name in after.keys() - kept)
        assert new + sum(after[name].requests - before[name].requests for name in kept) == 1
