import asyncio
import gc
import json
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.support.slow_callbacks import (
    Recorder,
    SlowCallback,
    append_to,
    read_slow_callbacks,
    recording,
    repeated_if_slow,
)


def spin(cpu_s: float) -> None:
    end = time.thread_time() + cpu_s
    while time.thread_time() < end:
        pass


async def spin_in_the_middle(cpu_s: float) -> None:
    await asyncio.sleep(0)
    spin(cpu_s)
    await asyncio.sleep(0)


def record(cpu_s: float) -> Recorder:
    with recording() as recorder:
        asyncio.run(spin_in_the_middle(cpu_s))
    return recorder


def test_a_callback_over_the_bound_is_named_with_its_cpu_time() -> None:
    slow = record(0.05).slow()
    assert len(slow) == 1
    assert 50 <= slow[0].cpu_ms < 1e4
    assert "spin_in_the_middle" in slow[0].name
    assert "test_slow_callbacks.py" in slow[0].where and "spin" in slow[0].where


@pytest.mark.parametrize("generation", [1, 2])
def test_a_garbage_collection_of_older_objects_is_not_the_callbacks_time(generation: int) -> None:
    gc.disable()
    objects = [[number] for number in range(500_000)]
    gc.enable()

    async def collect() -> None:
        gc.collect(generation)

    with recording() as recorder:
        asyncio.run(collect())
    assert len(objects) == 500_000 and not recorder.slow()


@pytest.mark.parametrize("slow_runs", [3, 4])
def test_a_test_fails_only_if_all_its_repeated_runs_are_slow(slow_runs: int) -> None:
    with recording() as recorder:
        runs = []

        @repeated_if_slow
        def slow_at_first(recorder: Recorder) -> None:
            runs.append(1)
            asyncio.run(spin_in_the_middle(0.03 if len(runs) <= slow_runs else 0.0))
            assert not recorder.slow()

        if slow_runs < 4:
            slow_at_first(recorder=recorder)
        else:
            with pytest.raises(AssertionError, match="spin_in_the_middle"):
                slow_at_first(recorder=recorder)
    assert len(runs) == 4


def test_short_callbacks_are_counted_and_not_kept() -> None:
    recorder = record(0.0)
    assert not recorder.slow() and recorder.num_callbacks > 2


def test_sleeping_on_the_loop_is_blocked_time_and_not_cpu_time() -> None:
    async def sleep() -> None:
        time.sleep(0.1)

    with recording() as recorder:
        asyncio.run(sleep())
    assert not recorder.slow()
    blocked = [one for one in recorder.found if "sleep" in one.name]
    assert len(blocked) == 1 and blocked[0].blocked_ms > 90


def test_waiting_for_a_thread_that_holds_the_interpreter_lock_is_blocked_time() -> None:
    switch_s = sys.getswitchinterval()

    async def work() -> None:
        thread = threading.Thread(target=spin, args=(0.5,))
        thread.start()
        while thread.is_alive():
            await asyncio.sleep(0)

    # A thread releases the interpreter lock only one second after another thread requests it.
    sys.setswitchinterval(1.0)
    try:
        with recording() as recorder:
            asyncio.run(work())
    finally:
        sys.setswitchinterval(switch_s)
    assert not recorder.slow()
    assert [one for one in recorder.found if one.blocked_ms > 20]


def test_nothing_is_recorded_after_the_context() -> None:
    recorder = record(0.0)
    before = recorder.num_callbacks
    asyncio.run(spin_in_the_middle(0.05))
    assert recorder.num_callbacks == before and not recorder.slow()


def test_recorded_callbacks_are_read_back_from_the_file(tmp_path: Path) -> None:
    file = tmp_path / "slow.jsonl"
    assert read_slow_callbacks(file) == []
    early, late = SlowCallback("a", 30.0, 0.0, 1.0), SlowCallback("b", 0.0, 40.0, 2.0, "c.py:1 d")
    append_to(file)(early)
    append_to(file)(late)
    assert read_slow_callbacks(file) == [early, late]
    assert read_slow_callbacks(file, since_s=1.5) == [late]
    assert json.loads(file.read_text(encoding="utf-8").splitlines()[0])["name"] == "a"
