"""The memory page with which a child process reports heartbeats to its supervisor."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from slora_adapters.process.heartbeat import Beat, Heartbeat, HeartbeatPage, WorkProgress

WAIT_S = 300.0


@pytest.fixture
def page() -> Iterator[HeartbeatPage]:
    page = HeartbeatPage.create()
    yield page
    page.close()


def test_a_new_heartbeat_page_describes_a_starting_child(page: HeartbeatPage) -> None:
    assert page.read() == Beat(0, is_serving=False, is_busy=False, num_completed=0, computing_us=0)
    assert page.reason == ""


def test_another_process_writes_what_this_one_reads(page: HeartbeatPage) -> None:
    code = (
        "from slora_adapters.process.heartbeat import Beat, HeartbeatPage\n"
        f"page = HeartbeatPage({page.descriptor})\n"
        "page.write(Beat(7, True, True, 1 << 40, 5))\n"
        "page.explain('no GPU: \\u00fc' + 5000 * 'x')"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, pass_fds=[page.descriptor])
    assert page.read() == Beat(7, True, True, 1 << 40, 5)
    assert page.reason.startswith("no GPU: ü") and len(page.reason) < 4096


def beats_of(heartbeat: Heartbeat, page: HeartbeatPage, is_over: Callable[[Beat], bool]) -> list[Beat]:
    """All beats that the page showed until `is_over` returned True for one."""
    seen: list[Beat] = []

    async def main() -> None:
        beating = asyncio.create_task(heartbeat.run(lambda: WorkProgress(3, is_busy=True)))
        deadline = time.monotonic() + WAIT_S
        while not seen or not is_over(seen[-1]):
            assert time.monotonic() < deadline, seen[-1:]
            await asyncio.sleep(0.01)
            seen.append(page.read())
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)

    asyncio.run(main())
    return seen


def test_a_heartbeat_carries_its_measurements(page: HeartbeatPage) -> None:
    heartbeat = Heartbeat(os.dup(page.descriptor), computes_here=False)
    heartbeat.begin_serving()
    last = beats_of(heartbeat, page, lambda beat: beat.number >= 2)[-1]
    assert last == Beat(last.number, True, True, 3, 0)


def test_a_heartbeat_excludes_the_cpu_time_of_the_event_loop(page: HeartbeatPage) -> None:
    """The page is polled on the event loop's thread, which also computes. No other thread does, so the CPU time
    stays near 0."""
    heartbeat = Heartbeat(os.dup(page.descriptor), computes_here=True)
    begun_s = time.thread_time()

    def has_computed(beat: Beat) -> bool:
        sum(range(100_000))
        return time.thread_time() - begun_s > 0.3 and beat.number >= 2

    seen = [beat.computing_us for beat in beats_of(heartbeat, page, has_computed) if beat.number]
    assert seen[-1] - seen[0] < 0.1e6


def test_the_end_of_the_start_is_published_at_once(page: HeartbeatPage) -> None:
    """Born from a bug: a child that hung before its next heartbeat was considered to be starting, for ever."""
    Heartbeat(os.dup(page.descriptor), computes_here=True).begin_serving()
    assert page.read().is_serving
