"""Pinned adapters: loaded before the first request, evicted last, and never blocking other requests for good."""

import logging
from random import Random

import pytest

from slora.core.request import TenantShare
from slora.memory.residency import Resident
from slora_adapters.version import AdapterVersion
from tests.support.scheduler_bench import SchedulerBench

VERSIONS = [AdapterVersion("tenant", f"digest{n}") for n in range(5)]
PAGES = {version: pages for version, pages in zip(VERSIONS, (1, 1, 2, 3, 4), strict=True)}
SMALL, LARGE = VERSIONS[0], VERSIONS[3]


def find(bench: SchedulerBench, version: AdapterVersion) -> Resident:
    resident = bench.residency.find(version)
    assert resident is not None, f"{version} is not in the pool"
    return resident


def is_loaded(bench: SchedulerBench, version: AdapterVersion) -> bool:
    resident = bench.residency.find(version)
    return resident is not None and resident.is_loaded


def pin(bench: SchedulerBench, *versions: AdapterVersion) -> None:
    bench.scheduler.set_pins(versions)
    bench.come_to_rest()


def test_a_pinned_adapter_is_loaded_before_any_request_and_without_a_charge() -> None:
    bench = SchedulerBench(PAGES, num_pages=8)
    bench.scheduler.set_pins([LARGE])
    bench.step()
    assert bench.source.in_flight == {LARGE} and not bench.scheduler.has_work
    bench.deliver_and_step()
    assert find(bench, LARGE).is_loaded and find(bench, LARGE).is_pinned
    assert bench.source.num_pinned == 0 and bench.memory.tenants.find("tenant").service == 0
    assert not bench.scheduler.has_work and bench.scheduler.next_due_s is None
    bench.add("a", adapter=LARGE)
    assert [output.request_id for output in bench.step()] == ["a"], "it waited for a fetch"
    assert bench.source.num_fetches[LARGE] == bench.scheduler.adapters.num_loads == 1


def test_a_pinned_adapter_is_loaded_in_slices_beside_decoding_requests() -> None:
    bench = SchedulerBench(PAGES, num_pages=12, load_pages=1)
    bench.add("decodes", max_tokens=9)
    bench.step()
    bench.scheduler.set_pins([LARGE, SMALL])
    bench.step()
    bench.source.deliver()
    for number in range(3):
        assert not is_loaded(bench, LARGE)
        assert [output.request_id for output in bench.step()] == ["decodes"], number
        assert bench.residency.find(SMALL) is None, "it holds pages before its turn"
    assert is_loaded(bench, LARGE)
    list(bench.run_to_end(9))
    assert is_loaded(bench, SMALL)


def test_a_pin_never_takes_pages_that_a_running_prompt_still_needs() -> None:
    """Of 12 pages, the prompt takes 10 chunk by chunk. The adapter's 3 pages are free until shortly before the
    prompt's end."""
    bench = SchedulerBench(PAGES, num_pages=12, max_num_batched_tokens=8)
    bench.add("long", prompt=40, max_tokens=3)
    bench.step()
    bench.scheduler.set_pins([LARGE])
    while bench.scheduler.num_running:
        bench.deliver_and_step()
        assert bench.residency.find(LARGE) is None or not bench.scheduler.num_running
    assert bench.scheduler.num_preemptions == 0
    bench.come_to_rest()
    assert is_loaded(bench, LARGE)


def test_a_pin_does_not_evict_the_adapter_of_the_next_request() -> None:
    bench = SchedulerBench(PAGES, num_pages=20, num_slots=1, max_num_seqs=1)
    bench.add("first", adapter=SMALL)
    list(bench.run_to_end(9))
    bench.add("runs", max_tokens=6)
    bench.step()
    bench.add("next", adapter=SMALL)
    bench.scheduler.set_pins([LARGE])
    while bench.num_unfinished:
        bench.deliver_and_step()
    assert bench.source.num_fetches[SMALL] == 1, "it had to be fetched for the one that was next"
    bench.come_to_rest()
    assert is_loaded(bench, LARGE) and bench.residency.find(SMALL) is None


def test_sequences_are_preempted_before_a_pinned_adapter_is_evicted() -> None:
    bench = SchedulerBench(PAGES, num_pages=9)
    pin(bench, LARGE)
    for name in "abc":
        bench.add(name, prompt=8, max_tokens=8)
    for output in bench.run_to_end(50):
        assert output.error is None
        assert is_loaded(bench, LARGE)
    assert bench.scheduler.num_preemptions > 0, "there was no need"


def test_no_request_starts_on_the_last_unpinned_pages() -> None:
    """Of 8 pages, 3 are pinned, and the running request has 2 and soon 3. Another request of 3 pages would soon be
    preempted."""
    bench = SchedulerBench(PAGES, num_pages=8, max_num_batched_tokens=40)
    pin(bench, LARGE)
    bench.add("runs", prompt=8, max_tokens=3)
    bench.add("waits", prompt=11, max_tokens=2)
    assert [output.error for output in bench.run_to_end(9)] == [None] * 5
    assert bench.scheduler.num_preemptions == 0


def test_a_request_may_evict_a_pin_for_the_last_page_and_the_pin_is_reloaded() -> None:
    bench = SchedulerBench(PAGES, num_pages=8)
    pin(bench, LARGE)
    bench.add("large", prompt=24, max_tokens=4)  # its last token would begin an 8th page
    bench.add("none", prompt=24, max_tokens=6)
    left = False
    for output in bench.run_to_end(50):
        assert output.error is None
        left = left or bench.residency.find(LARGE) is None
    assert left and bench.scheduler.has_work, "nothing is left to do, and the pin is not back"
    bench.come_to_rest()
    assert is_loaded(bench, LARGE) and find(bench, LARGE).is_pinned


def test_a_request_preempted_three_times_is_not_preempted_for_a_pin() -> None:
    """Born from a bug: a pin leaves less room, so that a request and a beam search preempted each other for ever."""
    bench = SchedulerBench(PAGES, num_pages=9, max_num_batched_tokens=40)
    pin(bench, LARGE)
    bench.add("runs", prompt=5, max_tokens=3)
    bench.step()
    tired = bench.add("tired", prompt=17, max_tokens=4)
    bench.step()
    assert not tired.is_running and is_loaded(bench, LARGE)
    tired.num_repeat_preemptions = 3
    bench.step()
    assert tired.is_running and bench.residency.find(LARGE) is None
    while bench.scheduler.find("tired"):
        bench.deliver_and_step()
        assert bench.residency.find(LARGE) is None, "it came back before its time"
    list(bench.run_to_end(30))
    bench.come_to_rest()
    assert is_loaded(bench, LARGE)


def test_pins_beyond_half_of_the_pool_are_ordinary_adapters() -> None:
    bench = SchedulerBench(PAGES, num_pages=8)
    pin(bench, LARGE, VERSIONS[2])
    assert is_loaded(bench, LARGE) and bench.residency.find(VERSIONS[2]) is None
    assert bench.source.num_fetches[VERSIONS[2]] == 1, "its size is known from the first time"
    bench.add("asks", adapter=VERSIONS[2])
    list(bench.run_to_end(9))
    assert not find(bench, VERSIONS[2]).is_pinned
    for name in "ab":  # the two run side by side, so that neither may take the pinned pages
        bench.add(name, prompt=8, max_tokens=4)
    list(bench.run_to_end(9))
    assert bench.residency.find(VERSIONS[2]) is None and is_loaded(bench, LARGE)
    pin(bench, VERSIONS[2])
    assert find(bench, VERSIONS[2]).is_pinned


def test_setting_the_same_pins_is_a_no_op_and_other_pins_replace_them() -> None:
    bench = SchedulerBench(PAGES, num_pages=8)
    pin(bench, SMALL)
    first = find(bench, SMALL)
    pin(bench, SMALL)
    assert find(bench, SMALL) is first and bench.source.num_fetches[SMALL] == 1
    pin(bench, LARGE)
    assert not first.is_pinned and find(bench, SMALL) is first and find(bench, LARGE).is_pinned
    assert (bench.scheduler.pins.num_pins, bench.scheduler.pins.num_loaded) == (1, 1)
    pin(bench)
    assert (bench.residency.num_pinned, bench.residency.num_pinned_pages) == (0, 0)


def test_an_adapter_pinned_while_in_use_stays_loaded() -> None:
    bench = SchedulerBench(PAGES, num_pages=8)
    bench.add("uses", adapter=LARGE, max_tokens=3)
    bench.deliver_and_step()
    bench.scheduler.set_pins([LARGE])
    list(bench.run_to_end(9))
    assert find(bench, LARGE).is_pinned and bench.source.num_fetches[LARGE] == 1


def test_deleting_an_adapter_removes_its_pin() -> None:
    bench = SchedulerBench(PAGES, num_pages=8)
    pin(bench, SMALL, LARGE)
    bench.scheduler.remove_adapter(LARGE)
    bench.come_to_rest()
    assert bench.residency.find(LARGE) is None and bench.scheduler.pins.num_pins == 1
    assert bench.source.num_fetches[LARGE] == 1


def test_removing_a_pin_during_its_fetch_frees_the_host_copy() -> None:
    bench = SchedulerBench(PAGES, num_pages=8)
    bench.scheduler.set_pins([SMALL])
    bench.step()
    bench.scheduler.set_pins([])
    bench.deliver_and_step()
    assert bench.source.num_pinned == 0 and bench.residency.find(SMALL) is None


def test_a_pin_that_cannot_be_fetched_is_retried_with_backoff_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = SchedulerBench(PAGES, num_pages=8)
    bench.scheduler.set_pins([SMALL])
    pauses = []
    with caplog.at_level(logging.WARNING, "slora.scheduler.pins"):
        for number in range(1, 9):
            bench.step()
            bench.source.fail(SMALL, "unavailable")
            bench.step()
            assert bench.scheduler.pins.num_failures == number
            assert not bench.scheduler.has_work and not bench.source.in_flight
            next_s = bench.scheduler.next_due_s
            assert next_s is not None
            pauses.append(next_s - bench.now)
            bench.now = next_s - 0.01
            bench.step()
            assert not bench.source.in_flight, "too soon"
            bench.now = next_s
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    assert [SMALL.digest in record.message for record in caplog.records] == [True]
    bench.step()
    assert bench.scheduler.next_due_s is None, "it would be stepped on and on for what is under way"
    bench.deliver_and_step()
    assert is_loaded(bench, SMALL)
    # After a successful load, the pauses and the warnings start anew.
    assert bench.memory.evictor.make_room(8, bench.memory.tenants.find("other"), ignore_pins=True)
    bench.step()
    with caplog.at_level(logging.WARNING, "slora.scheduler.pins"):
        bench.source.fail(SMALL, "unavailable")
        bench.step()
    assert bench.scheduler.next_due_s == bench.now + 1 and len(caplog.records) == 2


def test_a_pin_whose_load_failed_is_retried_with_backoff() -> None:
    bench = SchedulerBench(PAGES, num_pages=8)
    bench.scheduler.set_pins([SMALL])
    for number, pause_s in enumerate((1, 2, 4), 1):
        bench.step()
        bench.source.deliver()
        bench.step(breaks=True)
        assert bench.residency.find(SMALL) is None and bench.residency.num_pinned == 0
        bench.come_to_rest()
        assert (bench.scheduler.pins.num_failures, bench.source.num_fetches[SMALL]) == (number, number)
        assert bench.scheduler.next_due_s == bench.now + pause_s
        bench.now += pause_s
    bench.come_to_rest()
    assert is_loaded(bench, SMALL)


def test_a_pin_without_room_in_the_pool_does_not_occupy_the_host_cache() -> None:
    """The host has room for one adapter copy. The pool has room for the pin only after the long request has ended."""
    bench = SchedulerBench(PAGES, num_pages=8, host_pages=0)
    bench.add("long", prompt=20, max_tokens=8)
    bench.step()
    bench.scheduler.set_pins([LARGE])
    bench.step()
    assert bench.source.in_flight == {LARGE}, "its size is not known yet"
    bench.add("asks", adapter=SMALL)
    assert bench.source.in_flight == {LARGE}
    bench.deliver_and_step()
    assert bench.source.in_flight == {SMALL} and bench.residency.find(LARGE) is None
    outputs = list(bench.run_to_end(20))
    assert all(output.error is None for output in outputs)
    bench.come_to_rest()
    assert is_loaded(bench, LARGE) and bench.source.num_fetches[LARGE] == 2


def test_a_pin_that_is_too_large_does_not_block_the_next_pin() -> None:
    """Born from a bug: the next pin was requested while the first one's copy was still on the host, and never again."""
    bench = SchedulerBench(PAGES, num_pages=4, host_pages=0)
    pin(bench, LARGE, SMALL)
    assert is_loaded(bench, SMALL) and bench.residency.find(LARGE) is None


def test_adapters_of_waiting_requests_are_fetched_before_pins() -> None:
    bench = SchedulerBench(PAGES, num_pages=8, host_pages=0)
    for number in (1, 2):
        bench.add(str(number), adapter=VERSIONS[number])
    bench.scheduler.set_pins([SMALL])
    order = []
    for _ in range(3):
        bench.step()
        order.append(*bench.source.in_flight)
        bench.source.deliver()
    assert order == [VERSIONS[1], VERSIONS[2], SMALL]


def test_a_tenant_at_its_ceiling_does_not_wait_for_its_own_pins() -> None:
    share = TenantShare(max_share=0.25)
    bench = SchedulerBench(PAGES, num_pages=16)
    bench.memory.tenants.set_share("tenant", share)
    pin(bench, LARGE)
    bench.add("other", max_tokens=30, tenant="other")
    bench.step()
    bench.add("own", prompt=8, max_tokens=3, share=share)
    assert "own" in [output.request_id for output in bench.step()]
    assert bench.residency.find(LARGE) is None
    list(bench.run_to_end(50))
    bench.come_to_rest()
    assert is_loaded(bench, LARGE)


def test_pins_of_one_tenant_never_evict_each_other_at_its_ceiling() -> None:
    bench = SchedulerBench(PAGES, num_pages=16)
    bench.memory.tenants.set_share("tenant", TenantShare(max_share=0.25))
    pin(bench, LARGE, VERSIONS[2])
    assert is_loaded(bench, LARGE) and bench.residency.find(VERSIONS[2]) is None
    assert bench.residency.num_evictions == 0


def test_a_tenant_below_its_floor_may_evict_pins_of_other_tenants() -> None:
    """Of 12 pages, 4 are pinned, and 3 belong to a running tenant without a floor. The entitled tenant's floor is 9
    pages.

    Both the pin and the running sequence have to release their pages.
    """
    share = TenantShare(min_share=0.75)
    bench = SchedulerBench(PAGES, num_pages=12, max_num_batched_tokens=40, load_pages=1)
    pin(bench, VERSIONS[4])
    runs = bench.add("runs", prompt=9, max_tokens=4, tenant="other")
    bench.add("runs, too", max_tokens=4, tenant="third", share=share)
    bench.step()
    bench.add("entitled", prompt=32, tenant="third", share=share)
    assert "entitled" in [output.request_id for output in bench.step()]
    assert runs.num_preemptions == 1 and bench.residency.find(VERSIONS[4]) is None
    assert all(output.error is None for output in bench.run_to_end(9))


def test_a_pin_does_not_starve_a_request_behind_a_tenant_below_its_floor() -> None:
    """New requests of a tenant below its floor always overtake a request that waits for pages.

    Of 12 pages, 7 would be free for the waiting request, which needs 6, if 4 pages were not pinned.
    """
    share = TenantShare(min_share=0.4)
    bench = SchedulerBench(PAGES, num_pages=12, max_num_seqs=4)
    pin(bench, VERSIONS[4])
    random = Random(0)
    for number in range(10):
        bench.add(f"u{number}", prompt=4, max_tokens=random.randint(4, 8), tenant="floored", share=share)
    bench.step()
    bench.add("waits", prompt=20, max_tokens=4, tenant="other")
    for number in range(10, 60):
        bench.add(f"u{number}", prompt=4, max_tokens=random.randint(4, 8), tenant="floored", share=share)
        bench.step()
        assert bench.scheduler.num_running > 0
        if not bench.scheduler.find("waits"):
            return
    raise AssertionError("it waits for good")
