"""Runs an ASGI application under the HTTP server, on a thread of the test process and on a free port."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import uvicorn.server
from starlette.types import ASGIApp

from slora_api.core.server_address import open_listener
from slora_api.http.http_protocol import ConnectionLimits
from slora_api.http.http_server import HttpServer


class _ShortSleeps:
    """asyncio for uvicorn, which looks ten times a second whether to end and sleeps once more before it does."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / 10)


@contextmanager
def live_server(
    app: ASGIApp,
    background: Sequence[Callable[[], Coroutine[Any, Any, None]]] = (),
    at_end: Callable[[], Awaitable[None]] | None = None,
    limits: ConnectionLimits | None = None,
) -> Iterator[str]:
    """Yields the server's URL. The server and its thread are stopped at the end.

    background: coroutines that run on the server's event loop.
    at_end: awaited on this loop at the end.
    """
    listener = open_listener("127.0.0.1", 0)
    server = HttpServer(app, limits or ConnectionLimits(), drain_s=2)
    started = threading.Event()

    async def serve() -> None:
        tasks = [asyncio.create_task(work()) for work in background]
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        started.set()
        await serving
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in ended), ended
        if at_end is not None:
            await at_end()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    with patch.object(uvicorn.server, "asyncio", _ShortSleeps()):
        thread.start()
        started.wait()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
