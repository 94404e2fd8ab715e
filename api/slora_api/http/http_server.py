"""uvicorn's server with this package's own acceptor, connection limits and deadlines.

uvicorn still handles requests, keep-alive and the shutdown of connections.
"""

import asyncio
import logging
import math
import resource
import socket
from contextlib import suppress

import uvicorn
from starlette.types import ASGIApp

from slora_api.core.host_board import HostBoard
from slora_api.core.rate_limited_log import get_rate_limited_logger
from slora_api.http.acceptor import Acceptor
from slora_api.http.http_protocol import ConnectionLimits, Connections, HttpProtocol

logger = logging.getLogger(__name__)

# Descriptors for everything but connections: the database, the store, sockets of the child processes, uploads, and
# refused connections that are being closed. A busy server needs about 60 of them (measured).
_OTHER_DESCRIPTORS = 128


class HttpServer(uvicorn.Server):
    """Serves `app` until `stop` is called.

    drain_s: how long requests in progress may continue after `stop`. board: None if this process is the
        only one that serves.
    """

    def __init__(
        self, app: ASGIApp, limits: ConnectionLimits, drain_s: float, board: HostBoard | None = None
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=HttpProtocol,
                lifespan="off",
                ws="none",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                # With proxy headers, clients could choose the address that the audit log shows.
                proxy_headers=False,
                timeout_keep_alive=math.ceil(limits.idle_s),
                timeout_graceful_shutdown=math.ceil(drain_s),
            )
        )
        # uvicorn logs a line for each request that is not valid HTTP, so the lines need a rate limit.
        get_rate_limited_logger("uvicorn.error")
        self._connections = Connections(limits, board)
        self._acceptors: list[Acceptor] = []
        self._sweeping: asyncio.Task[None] | None = None

    def stop(self, at_once: bool) -> None:
        """Makes `serve` end. at_once: do not wait for requests in progress."""
        self.force_exit = at_once
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts connections from the listening `sockets`. uvicorn itself gets no sockets."""
        await super().startup(sockets=[])
        self._acceptors = [
            Acceptor(listener, self._connections, self._make_protocol) for listener in sockets or []
        ]
        for acceptor in self._acceptors:
            acceptor.start()
        self._sweeping = asyncio.create_task(self._sweep())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Closes the connections, beginning with idle ones. Deadlines apply until the last connection is closed."""
        for acceptor in self._acceptors:
            acceptor.stop()
        await super().shutdown(sockets)
        if self._sweeping is not None:
            self._sweeping.cancel()
            with suppress(asyncio.CancelledError):
                await self._sweeping

    def _make_protocol(self) -> HttpProtocol:
        return HttpProtocol(self._connections, self.config, self.server_state)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._connections.limits.sweep_s)
            self._connections.sweep(asyncio.get_running_loop().time())


def raise_descriptor_limit() -> int:
    """Raises the soft limit of this process and its future children to the hard limit. Returns the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def fit_connections(max_connections: int, num_descriptors: int) -> int:
    """Returns how many connections the descriptors allow, at most `max_connections`."""
    if shortage := explain_few_descriptors(max_connections, num_descriptors):
        logger.warning("%s", shortage)
    return min(max_connections, _allowed_connections(num_descriptors))


def explain_few_descriptors(max_connections: int, num_descriptors: int) -> str:
    """If the descriptors allow fewer connections than `max_connections`, returns the reason and the remedy. Otherwise
    returns an empty string.
    """
    allowed = _allowed_connections(num_descriptors)
    if max_connections <= allowed:
        return ""
    return (
        f"this process may open {num_descriptors} files, which is enough for {allowed} of the {max_connections} "
        "connections that it would accept: raise the limit of open files (ulimit -Hn, LimitNOFILE=, or docker's "
        "--ulimit nofile=)"
    )


def _allowed_connections(num_descriptors: int) -> int:
    return num_descriptors - min(_OTHER_DESCRIPTORS, num_descriptors // 2)
