"""When requests pass the stages of the engine. Each step of the bench takes 0.25 s."""

from slora.core.request import RequestTiming
from slora_adapters.version import AdapterVersion
from tests.support.scheduler_bench import SchedulerBench

VERSION = AdapterVersion("tenant", "digest")


def make_bench(**options: object) -> SchedulerBench:
    return SchedulerBench({VERSION: 2}, num_pages=40, **options)  # type: ignore[arg-type]


def run(bench: SchedulerBench) -> dict[str, RequestTiming]:
    list(bench.run_to_end(patience=20))
    bench.step()
    return bench.timings


def test_a_request_waits_in_the_queue_until_it_is_admitted_then_prefills_then_decodes() -> None:
    bench = make_bench(max_num_seqs=1, max_num_batched_tokens=8)
    bench.add("first", prompt=16, max_tokens=3)
    bench.add("second", max_tokens=1)
    timings = run(bench)
    assert timings["first"] == RequestTiming(0.0, 0.0, False, 0.0, 0.0, 0.5, 1.0)
    assert timings["second"] == RequestTiming(0.0, 0.0, False, 1.0, 1.0, 1.25, 1.25)
    assert (timings["first"].queue_s, timings["second"].queue_s) == (0.0, 1.0)


def test_a_cold_request_waits_for_the_fetch_and_then_for_the_load() -> None:
    bench = make_bench(load_pages=1)
    bench.add("decodes", max_tokens=20)
    bench.add("cold", adapter=VERSION, max_tokens=1)
    bench.step()
    bench.step()
    bench.source.deliver()
    timing = run(bench)["cold"]
    # The fetch is collected by the third step, which starts to load one of two pages. The fourth step computes.
    assert timing == RequestTiming(0.0, 0.5, True, 0.5, 0.75, 1.0, 1.0)
    assert (timing.queue_s, timing.load_s) == (0.0, 0.25)
    bench.add("warm", adapter=VERSION, max_tokens=1)
    warm = run(bench)["warm"]
    assert not warm.is_cold and warm.load_s == 0.0


def test_a_request_that_joins_a_load_in_progress_is_cold() -> None:
    bench = SchedulerBench({VERSION: 3}, num_pages=40, load_pages=1)
    bench.add("decodes", max_tokens=20)
    bench.add("first", adapter=VERSION, max_tokens=1)
    bench.step()
    bench.source.deliver()
    bench.step()
    bench.add("second", adapter=VERSION, max_tokens=1)
    timing = run(bench)["second"]
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
    timings = run(bench)
    assert timings["b"].num_preemptions > 0
    assert (timings["b"].admitted_at, timings["b"].first_token_at) == (0.0, 0.25)
    kinds = bench.scheduler.preemptions_by_kind
    assert kinds == {"swap": 0, "recompute": bench.scheduler.num_preemptions, "background": 0}


def test_all_choices_of_a_request_share_its_times() -> None:
    bench = make_bench()
    bench.add("a", prompt=4, max_tokens=3, n=3)
    assert run(bench)["a"] == RequestTiming(0.0, 0.0, False, 0.0, 0.0, 0.25, 0.75)


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
