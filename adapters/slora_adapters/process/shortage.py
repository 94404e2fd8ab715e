"""Recognizes errors that say that the machine lacks a resource, such as threads. Later, the same work may succeed."""

import asyncio
import errno
import logging
import os
import sys
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_log = logging.getLogger(__name__)

# Background work that runs until it is cancelled.
Work = Callable[[], Coroutine[Any, Any, None]]

_PROCESSES = "processes or threads (ulimit -u, pids.max)"
_SHORT = {
    errno.EAGAIN: _PROCESSES,
    errno.EMFILE: "open files (ulimit -n)",
    errno.ENFILE: "open files of the machine (fs.file-max)",
    errno.ENOMEM: "memory",
}
_MIN_PAUSE_S, _MAX_PAUSE_S = 1.0, 30.0


def find_shortage(error: BaseException) -> str | None:
    """Returns what the machine lacks, or None if the error has another cause."""
    if isinstance(error, BaseExceptionGroup):
        found = [find_shortage(inner) for inner in error.exceptions]
        return found[0] if all(found) else None
    if isinstance(error, MemoryError):
        return _SHORT[errno.ENOMEM]
    if isinstance(error, OSError):
        return _SHORT.get(error.errno or 0)
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return _PROCESSES
    return None


async def run_despite_shortage(work: Work) -> None:
    """Runs background work. If the machine lacks a resource, the work starts again after a pause."""
    pause_s = _MIN_PAUSE_S
    while True:
        try:
            return await work()
        except Exception as error:
            if (lacking := find_shortage(error)) is None:
                raise
            name = getattr(work, "__qualname__", "background work")
            _log.error("the machine lacks %s: %s starts again in %.0f s (%s)", lacking, name, pause_s, error)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _MAX_PAUSE_S)


class _Threads(ThreadPoolExecutor):
    """A pool that goes on with fewer threads if the machine does not allow more. The first one must start."""

    def _adjust_thread_count(self) -> None:
        try:
            super()._adjust_thread_count()
        except RuntimeError as error:
            # The call is in the queue already, so one of the running threads will take it.
            if find_shortage(error) is None or not self._threads:
                raise
            _log.warning("the machine lacks %s: %d threads do the work", _PROCESSES, len(self._threads))


def run_event_loop(
    work: Coroutine[Any, Any, None], make_loop: Callable[[], asyncio.AbstractEventLoop] | None = None
) -> None:
    """Runs `work` like asyncio.run, on an event loop that needs as few threads as possible."""
    is_done = False

    async def run() -> None:
        nonlocal is_done
        _prepare_event_loop()
        try:
            await work
        finally:
            if sys.version_info < (3, 12):
                asyncio.set_child_watcher(None)  # type: ignore[arg-type]  # It works only with this loop.
        is_done = True

    try:
        with asyncio.Runner(loop_factory=make_loop) as runner:
            runner.run(run())
    except RuntimeError as error:
        # In the end, asyncio joins the threads of the loop from one more thread.
        if not is_done or find_shortage(error) is None:
            raise


def _prepare_event_loop() -> None:
    loop = asyncio.get_running_loop()
    loop.set_default_executor(_Threads(min(32, (os.cpu_count() or 1) + 4), "asyncio"))
    if sys.version_info < (3, 12) and _has_pidfd():
        # The default watcher starts a thread for each child process. Later versions of Python use this one, too.
        watcher = asyncio.PidfdChildWatcher()
        watcher.attach_loop(loop)
        asyncio.set_child_watcher(watcher)


def _has_pidfd() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:  # An old kernel, or a container that forbids the call.
        return False
    return True
