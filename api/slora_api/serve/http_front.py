"""Serves HTTP in this process until a signal stops it."""

import asyncio
import gc
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from slora_adapters.process.shortage import Work, run_despite_shortage
from slora_api.core.settings import Settings
from slora_api.http.http_protocol import ConnectionLimits
from slora_api.http.http_server import fit_connections, raise_descriptor_limit
from slora_api.http.permit_pool import RequestLimiter


async def run_until_stopped(
    serve: Coroutine[Any, Any, None],
    stop_serving: Callable[[bool], None],
    limiter: RequestLimiter,
    work: Sequence[Work],
    announce_start: Callable[[], None] = lambda: None,
    announce_stop: Callable[[], None] = lambda: None,
) -> None:
    """Serves until a signal arrives or a part of `work` fails. Raises the error of the failed part.

    serve: answers requests, in this process or by API workers. It ends after `stop_serving` was called and the requests
        in progress have ended; with True, it does not wait for them.
    work: starts again after a pause if the machine lacks a resource, such as threads.
    announce_start: called as soon as signals are handled. announce_stop: called at the first signal.
    """

    def stop() -> None:
        # After a second signal, the server does not wait for requests in progress.
        is_second = limiter.stopping
        limiter.stop()
        stop_serving(is_second)
        if not is_second:
            announce_stop()

    def handle_signals() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop)

    # Twice, because uvicorn replaces the handlers.
    handle_signals()
    serving = asyncio.create_task(serve)
    await asyncio.sleep(0)
    handle_signals()
    announce_start()
    tasks = [asyncio.create_task(run_despite_shortage(one)) for one in work]
    watched = {serving, *tasks}
    try:
        while not serving.done():
            done, watched = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        if not serving.done():
            stop_serving(False)
        await asyncio.gather(serving, return_exceptions=True)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# The number of new objects after which Python collects garbage. A collection blocks the event loop for up to 5 ms.
_NEW_OBJECTS = 10_000

# With the default of 5 ms, each iteration of the event loop waits that long while a thread computes.
_SWITCH_INTERVAL_S = 5e-4


def limit_garbage_collection() -> None:
    """Turns garbage collection on and makes it cheaper. Call this after all objects that live as long as the process
    have been created.

    Later collections skip these objects. Otherwise, each full collection would block the event loop for 50 ms. New
    objects are collected less often than by default, because the objects of requests in progress survive most
    collections. With many requests in progress, collections took a tenth of this process's CPU time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS)
    gc.enable()


def prefer_event_loop() -> None:
    """Makes threads that compute, for example for a batch, hand the interpreter over to the event loop sooner."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


def connection_limits(settings: Settings) -> ConnectionLimits:
    """Raises this process's limit of open files and derives the number of connections from it."""
    share = -(-settings.max_connections // settings.api_workers)
    max_connections = fit_connections(share, raise_descriptor_limit())
    return ConnectionLimits(
        max_connections, settings.max_connections_per_address, num_processes=settings.api_workers
    )
