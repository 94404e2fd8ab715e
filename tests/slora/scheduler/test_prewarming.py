"""Prewarmed adapters: loaded only into free memory, without preemption. Their location is reported, and they are not
kept."""

import logging

import pytest

from slora.core.engine_state import AdapterPlace
from slora.core.request import TenantShare
from slora_adapters.version import AdapterVersion
from tests.support.scheduler_bench import SchedulerBench

VERSIONS = [AdapterVersion("tenant", f"digest{n}") for n in range(3)]
PAGES = {version: pages for version, pages in zip(VERSIONS, (1, 2, 3), strict=True)}
SMALL, MEDIUM, LARGE = VERSIONS


def test_prewarming_loads_an_idle_adapter_and_reports_its_place() -> None:
    bench = SchedulerBench(PAGES, num_pages=8, load_pages=1)
    assert bench.scheduler.prewarm(LARGE) is AdapterPlace.FETCHING
    bench.step()
    assert bench.source.in_flight == {LARGE} and not bench.scheduler.has_work
    assert bench.scheduler.prewarm(LARGE) is AdapterPlace.FETCHING
    bench.deliver_and_step()
    assert bench.scheduler.prewarm(LARGE) is AdapterPlace.LOADING
    bench.come_to_rest()
    assert bench.scheduler.prewarm(LARGE) is AdapterPlace.POOL
    resident = bench.residency.find(LARGE)
    assert resident is not None and resident.num_users == 0 and not resident.is_pinned
    assert bench.source.num_pinned == 0 and bench.memory.tenants.find("tenant").service == 0
    bench.add("a", adapter=LARGE)
    assert [output.request_id for output in bench.step()] == ["a"], "it waited for a fetch"
    assert bench.source.num_fetches[LARGE] == bench.scheduler.adapters.num_loads == 1


@pytest.mark.parametrize("short_of", ["pages", "slots", "share"])
def test_prewarming_evicts_nothing_and_falls_back_to_the_host_cache(short_of: str) -> None:
    bench = SchedulerBench(PAGES, num_pages=4, num_slots=1 if short_of == "slots" else 4)
    bench.add("a", adapter=MEDIUM)
    list(bench.run_to_end(9))
    assert bench.residency.find(MEDIUM) is not None and not bench.scheduler.num_running
    wanted = LARGE if short_of == "pages" else SMALL
    if short_of == "share":
        bench.memory.tenants.set_share("tenant", TenantShare(max_share=0.5))
    for place in (AdapterPlace.FETCHING, AdapterPlace.HOST):
        assert bench.scheduler.prewarm(wanted) is place
        bench.come_to_rest()
    assert bench.residency.find(wanted) is None and bench.residency.find(MEDIUM) is not None
    assert bench.source.num_pinned == 0, "the host could not let it go"


def test_prewarming_never_takes_pages_that_a_running_prompt_still_needs() -> None:
    """Of 6 pages, the prompt takes 5 chunk by chunk."""
    bench = SchedulerBench(PAGES, num_pages=6, max_num_batched_tokens=4)
    bench.add("long", prompt=20, max_tokens=1)
    bench.step()
    bench.scheduler.prewarm(LARGE)
    while bench.scheduler.num_running:
        bench.deliver_and_step()
        assert bench.residency.find(LARGE) is None
    assert bench.scheduler.num_preemptions == 0


def test_an_adapter_both_prewarmed_and_requested_is_loaded_once() -> None:
    bench = SchedulerBench(PAGES, num_pages=8)
    bench.scheduler.prewarm(LARGE)
    bench.step()
    bench.add("a", adapter=LARGE)
    bench.come_to_rest()
    assert bench.source.num_fetches[LARGE] == bench.scheduler.adapters.num_loads == 1
    assert bench.scheduler.prewarm(LARGE) is AdapterPlace.POOL


def test_prewarming_does_not_fetch_an_adapter_that_is_on_the_host() -> None:
    """Born from a bug: the adapter was fetched again, and its copy was counted twice."""
    bench = SchedulerBench(PAGES, num_pages=9, max_num_seqs=1, max_num_batched_tokens=24)
    bench.add("runs", prompt=24, max_tokens=5)
    bench.step()
    bench.add("next", adapter=LARGE, prompt=8)
    bench.step()
    bench.deliver_and_step()
    assert bench.residency.find(LARGE) is None and bench.source.num_pinned == 1
    assert bench.scheduler.prewarm(LARGE) is AdapterPlace.FETCHING
    bench.step()
    assert not bench.source.in_flight and bench.scheduler.prewarm(LARGE) is AdapterPlace.HOST
    list(bench.run_to_end(40))
    assert bench.source.num_fetches[LARGE] == 1


def test_an_adapter_pinned_during_prewarming_is_loaded_once_and_pinned() -> None:
    bench = SchedulerBench(PAGES, num_pages=8)
    bench.scheduler.prewarm(LARGE)
    bench.step()
    bench.scheduler.set_pins([LARGE])
    bench.come_to_rest()
    resident = bench.residency.find(LARGE)
    assert resident is not None and resident.is_pinned and bench.scheduler.adapters.num_loads == 1


def test_an_adapter_deleted_during_prewarming_is_not_loaded(caplog: pytest.LogCaptureFixture) -> None:
    bench = SchedulerBench(PAGES, num_pages=8)
    bench.scheduler.prewarm(SMALL)
    bench.step()
    bench.scheduler.remove_adapter(SMALL)
    bench.come_to_rest()
    assert bench.residency.find(SMALL) is None and bench.source.num_pinned == 0
    with caplog.at_level(logging.INFO):
        bench.scheduler.prewarm(LARGE)
        bench.step()
        bench.source.fail(LARGE, "unavailable")
        bench.come_to_rest()
    assert "cannot be fetched (unavailable)" in caplog.text
    assert bench.scheduler.prewarm(LARGE) is AdapterPlace.FETCHING, "it was one try, and this is another"
    bench.come_to_rest()
    assert bench.scheduler.prewarm(LARGE) is AdapterPlace.POOL
