"""Detects event-loop callbacks that run too long. It measures CPU time, so a busy machine does not change the
result.

While a callback runs, the process serves no other request. A callback's wall-clock time has three parts: CPU time of
the loop's thread, time in the kernel's run queue, and time blocked. Only the time in the run queue depends on other
programs.

- `cpu_ms`: CPU time of the loop's thread, without garbage collections of more than the youngest objects. Those of a
  test's process look at all that the tests have imported, and at what a scripted engine has kept. A server freezes what
  it has at its start.
- `blocked_ms`: time that the callback waited for a disk, a lock, or the interpreter lock (GIL) held by another thread.

The loop itself may wait for the interpreter lock after a poll. That wait is reported as a callback named `POLL`. Polls
are cut to 10 ms to measure it, so the reported wait may be up to 11 ms too small.

In a test: `with recording() as recorder: asyncio.run(...)`, then `recorder.slow()`. For a server process, see
`tests/support/recorded_slora.py`.
"""

import asyncio
import gc
import json
import os
import selectors
import sys
import threading
import time
from asyncio import events
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial, wraps
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = [
    "BOUND_MS",
    "POLL",
    "Recorder",
    "SlowCallback",
    "read_slow_callbacks",
    "recording",
    "repeated_if_slow",
]

# No request, accepted or refused, may keep the event loop busy for longer than this.
BOUND_MS = 20.0
POLL = "the poll of the event loop, which waited for the interpreter lock"
_TICK_S = 0.01
_STACK_DEPTH = 6
_YOUNGEST = 0  # generation


@dataclass(frozen=True, slots=True)
class SlowCallback:
    """at_s: `time.time()` when the callback ended. where: the innermost Python stack lines of each sample taken."""

    name: str
    cpu_ms: float
    blocked_ms: float
    at_s: float
    where: str = ""


class _RunQueue:
    """The kernel's run queue, as the thread that creates this sees it."""

    def __init__(self) -> None:
        self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    def waited_s(self) -> float:
        """How long the thread has waited for a CPU."""
        return int(os.pread(self._file, 64, 0).split()[1]) * 1e-9

    def __del__(self) -> None:
        os.close(self._file)


class _OfThread(threading.local):
    """Closed when its thread ends. A loop may still be polling when the recording has ended."""

    def __init__(self) -> None:
        self.run_queue = _RunQueue()


_of_thread = _OfThread()


class _LoopThread:
    """A thread that runs an event loop: its clocks and the callback that it runs now.

    running_since: when the current callback started.
    sampled: stack lines at which the callback was seen.
    """

    def __init__(self) -> None:
        self.id = threading.get_ident()
        self.running_since: float | None = None
        self.sampled = ""
        self.collected_s = self._collecting_since = 0.0

    def note_collection(self, phase: str, info: dict[str, int]) -> None:
        """A callback of `gc`, called on the thread that collects."""
        if info["generation"] != _YOUNGEST and threading.get_ident() == self.id:
            if phase == "start":
                self._collecting_since = time.thread_time()
            else:
                self.collected_s += time.thread_time() - self._collecting_since

    def read_clocks(self) -> tuple[float, float, float]:
        """Three times in seconds: wall-clock time and CPU time of this thread, both without those collections, and its
        wait for a CPU in the kernel's run queue. Called by the thread."""
        wall, cpu = time.perf_counter() - self.collected_s, time.thread_time() - self.collected_s
        return wall, cpu, _of_thread.run_queue.waited_s()


class Recorder:
    """Holds the callbacks that used the CPU, or were blocked, for longer than `bound_ms`.

    on_slow: called on the loop's thread with each such callback.
    """

    def __init__(self, bound_ms: float, on_slow: Callable[[SlowCallback], None] | None = None) -> None:
        self.bound_ms = bound_ms
        self.found: list[SlowCallback] = []
        self.worst_cpu_ms = 0.0
        self.num_callbacks = 0
        self._on_slow = on_slow
        self._threads: dict[int, _LoopThread] = {}

    def slow(self) -> list[SlowCallback]:
        """Callbacks whose CPU time is over the bound, the worst first."""
        over = [one for one in self.found if one.cpu_ms > self.bound_ms]
        return sorted(over, key=lambda one: -one.cpu_ms)

    def run_measured(self, handle: events.Handle, run: Callable[[events.Handle], None]) -> None:
        thread = self._this_thread()
        # A callback that cancels its own handle sets this attribute to None.
        callback = handle._callback
        thread.sampled = ""
        wall, cpu, queued = thread.read_clocks()
        thread.running_since = time.perf_counter()
        try:
            run(handle)
        finally:
            thread.running_since = None
            end_wall, end_cpu, end_queued = thread.read_clocks()
            cpu_s = end_cpu - cpu
            self.num_callbacks += 1
            self.worst_cpu_ms = max(self.worst_cpu_ms, 1e3 * cpu_s)
            blocked_s = end_wall - wall - cpu_s - (end_queued - queued)
            if 1e3 * max(cpu_s, blocked_s) > self.bound_ms:
                self._add(_name(callback), cpu_s, blocked_s, thread.sampled)

    def poll_measured(self, poll: Callable[[float], Any], timeout: float | None) -> Any:
        thread = self._this_thread()
        # Cut the poll short. Otherwise the wait for events could not be told from the wait for the interpreter lock.
        limit = _TICK_S if timeout is None else min(max(0.0, timeout), _TICK_S)
        wall, cpu, queued = thread.read_clocks()
        found = poll(limit)
        end_wall, end_cpu, end_queued = thread.read_clocks()
        cpu_s = end_cpu - cpu
        # epoll rounds its timeout up to a whole millisecond.
        blocked_s = end_wall - wall - cpu_s - (end_queued - queued) - limit - 0.001
        if 1e3 * blocked_s > self.bound_ms:
            self._add(POLL, cpu_s, blocked_s, "")
        return found

    def sample(self) -> None:
        """Records the stack lines of slow callbacks. Code that holds the interpreter lock all the time cannot be
        sampled."""
        for thread in list(self._threads.values()):
            since = thread.running_since
            if since is not None and 1e3 * (time.perf_counter() - since) > self.bound_ms / 2:
                where = _describe(sys._current_frames().get(thread.id))
                if thread.running_since == since and where not in thread.sampled:
                    thread.sampled = f"{thread.sampled} || {where}" if thread.sampled else where

    def _this_thread(self) -> _LoopThread:
        thread = self._threads.get(threading.get_ident())
        if thread is None:
            thread = self._threads[threading.get_ident()] = _LoopThread()
            gc.callbacks.append(thread.note_collection)
        return thread

    def close(self) -> None:
        for thread in self._threads.values():
            gc.callbacks.remove(thread.note_collection)

    def _add(self, name: str, cpu_s: float, blocked_s: float, where: str) -> None:
        slow = SlowCallback(name, round(1e3 * cpu_s, 2), round(1e3 * blocked_s, 2), time.time(), where)
        self.found.append(slow)
        if self._on_slow is not None:
            self._on_slow(slow)


@contextmanager
def recording(
    bound_ms: float = BOUND_MS, on_slow: Callable[[SlowCallback], None] | None = None
) -> Iterator[Recorder]:
    """Records the callbacks of every event loop of this process for the duration of the context."""
    recorder = Recorder(bound_ms, on_slow)
    run, poll = events.Handle._run, selectors.EpollSelector.select

    def run_measured(handle: events.Handle) -> None:
        recorder.run_measured(handle, run)

    def poll_measured(selector: selectors.EpollSelector, timeout: float | None = None) -> Any:
        return recorder.poll_measured(partial(poll, selector), timeout)

    done = threading.Event()

    def sample() -> None:
        while not done.wait(bound_ms / 2e3):
            recorder.sample()

    sampler = threading.Thread(target=sample, daemon=True)
    events.Handle._run = run_measured  # type: ignore[method-assign,assignment]
    selectors.EpollSelector.select = poll_measured  # type: ignore[method-assign,assignment]
    sampler.start()
    try:
        yield recorder
    finally:
        events.Handle._run = run  # type: ignore[method-assign,assignment]
        selectors.EpollSelector.select = poll  # type: ignore[method-assign,assignment]
        done.set()
        sampler.join()
        recorder.close()


def repeated_if_slow(test: Callable[..., None]) -> Callable[..., None]:
    """Decorates a test that expects no slow callback in its fixture `recorder`. A run that found one is repeated, at
    most three times.

    A callback that does too much is slow every time. A virtual machine now and then counts time that its host took from
    it as CPU time.
    """

    @wraps(test)
    def run(*args: Any, recorder: Recorder, **kwargs: Any) -> None:
        for runs_left in (3, 2, 1, 0):
            recorder.found.clear()
            try:
                return test(*args, recorder=recorder, **kwargs)
            except AssertionError:
                if not (runs_left and recorder.slow()):
                    raise

    return run


def _describe(frame: FrameType | None) -> str:
    """The innermost lines of a stack, without the lines of this module."""
    lines: list[str] = []
    while frame is not None and len(lines) < _STACK_DEPTH:
        code = frame.f_code
        if code.co_filename != __file__:
            lines.append(f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return " < ".join(lines)


def _name(callback: Any) -> str:
    """The coroutine's name for a task, else the function's name. A task is described by the line at which its
    coroutine waits now."""
    task = getattr(callback, "__self__", None)
    if not isinstance(task, asyncio.Task):
        return str(getattr(callback, "__qualname__", callback))
    coroutine: Any = task.get_coro()
    names = []
    while coroutine is not None and hasattr(coroutine, "cr_frame"):
        frame = coroutine.cr_frame
        names.append(f"{coroutine.__qualname__}:{frame.f_lineno}" if frame else coroutine.__qualname__)
        coroutine = coroutine.cr_await
    return " > ".join(names[:1] + names[-3:] if len(names) > 4 else names)


def append_to(file: Path) -> Callable[[SlowCallback], None]:
    """Returns a function that writes each callback as one JSON line at once, so another process can read it any
    time.

    The file stays open until the process ends. A server that has run out of file descriptors is therefore recorded too.
    """
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def append(slow: SlowCallback) -> None:
        os.write(descriptor, json.dumps(asdict(slow)).encode() + b"\n")

    return append


def read_slow_callbacks(file: Path, since_s: float = 0.0) -> list[SlowCallback]:
    """The callbacks that `append_to` wrote at or after `since_s` (seconds since the epoch), in order of time."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    found = [SlowCallback(**json.loads(line)) for line in lines]
    return [one for one in found if one.at_s >= since_s]
