"""`slora serve`: the composition root, which creates and closes all parts of a server.

The order is: data directory and its lock, secrets, database, adapters, child processes, HTTP. The socket is open before
the engine is ready (see /readyz), and is closed first at the end.
"""

import argparse
import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from slora.engine.client import RemoteEngine
from slora.errors import ConfigError, SloraError
from slora.setting import SettingRefused
from slora_adapters.errors import DiskFull
from slora_api.data_dir import DataDir, open_data_dir
from slora_api.generation.request_limiter import RequestLimiter
from slora_api.routes.services import Services
from slora_api.server.api_process import connection_limits, open_services
from slora_api.server.app import make_app
from slora_api.server.base_model_files import BaseModelFiles
from slora_api.server.children import engine_and_loader
from slora_api.server.demo import (
    DemoTenant,
    describe_demo,
    find_demo_adapters,
    find_demo_directory,
    set_up_demo,
)
from slora_api.server.disk_watch import DiskWatch
from slora_api.server.http_server import HttpServer
from slora_api.server.listener import open_listener
from slora_api.server.sockets import open_sockets
from slora_api.server.supervisor import Supervisor
from slora_api.settings import Settings, read_settings, unknown_variables
from slora_api.tenants.admin_key import AdminKey, open_admin_key
from slora_api.tenants.api_key import Pepper

__all__ = ["main", "serve_demo"]

logger = logging.getLogger("slora.serve")

_POLL_S = 0.05
_DEMO = "demo"


def _url(listener: socket.socket) -> str:
    """Returns the URL of the server for clients on this machine."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _announce(services: Services, data: DataDir, url: str, admin_key: AdminKey) -> None:
    """Prints the server's URL, sets up the demo if it is configured, and prints when the engine is ready."""
    settings, client = services.settings, services.generator.client
    print(f"slora: listening on {url}; the engine is starting", flush=True)
    if admin_key.shown_once is not None:
        print(f"slora: admin key, shown only once: {admin_key.shown_once}", flush=True)
    # Checked first, so that a demo without adapters fails before the engine has started.
    adapters = find_demo_adapters(Path(settings.demo) / "adapters") if settings.demo else []
    while not client.ready:
        await asyncio.sleep(_POLL_S)
    tenants: Sequence[DemoTenant] = ()
    if adapters:
        try:
            tenants = await set_up_demo(
                adapters, services.tenant_store, services.key_store, services.publisher, data.demo_keys
            )
        except DiskFull as error:
            logger.error("the demo could not be set up: %s", error)
    services.generator.readiness.unfinished.pop(_DEMO, None)
    info = client.info
    kept = "" if info.kv_cache_dtype == "auto" else f" with KV in {info.kv_cache_dtype}"
    print(
        f"slora: ready; {info.model_name} on {info.device} in {info.dtype}{kept}, {info.num_pages} pages",
        flush=True,
    )
    if tenants:
        print(describe_demo(url, tenants), flush=True)


async def _run_until_stopped(
    server: HttpServer, listener: socket.socket, limiter: RequestLimiter, work: list[asyncio.Task[None]]
) -> None:
    """Serves until a signal arrives, or until a task of `work` fails, whose error is then raised."""
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    # uvicorn installs its signal handlers when it starts. The handlers below replace them.
    await asyncio.sleep(0)

    def stop() -> None:
        # After a second signal, the server does not wait for requests in progress.
        server.force_exit = limiter.stopping
        if not limiter.stopping:
            print(
                f"slora: stopping; {limiter.num_generations} answers in progress may finish, for "
                f"{server.config.timeout_graceful_shutdown} s at most; a second signal stops at once",
                flush=True,
            )
        limiter.stop()
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    watched = {serving, *work}
    try:
        while not serving.done():
            done, watched = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)


async def _serve(settings: Settings) -> None:
    limits = connection_limits(settings)
    model = BaseModelFiles(settings)
    async with AsyncExitStack() as stack:
        data = stack.enter_context(open_data_dir(Path(settings.data_dir)))
        listener = stack.enter_context(open_listener(settings.host, settings.port))
        sockets = open_sockets(stack, data)
        pepper = Pepper.from_file(data.pepper)
        client = RemoteEngine(sockets.engine)
        services = await open_services(stack, settings, model, data, pepper, client)
        if settings.demo:
            services.generator.readiness.unfinished[_DEMO] = "the demo's adapters are being published"
        # Created after the steps that may refuse to start: a new key is shown only once, and a failed start would lose
        # it.
        admin_key = open_admin_key(settings.admin_key, data.path, pepper)
        supervisor = Supervisor(
            engine_and_loader(settings, model, data, sockets),
            settings.stall_seconds,
            services.generator.readiness.stalls,
            services.generator.metrics.restarted,
        )
        work = [
            supervisor.run(),
            client.run(services.pinning.refresh),
            services.pinning.run(),
            services.follower.run(),
            DiskWatch(services.reserve, services.key_store).run(),
            services.publisher.sweep(),
            _announce(services, data, _url(listener), admin_key),
        ]
        server = HttpServer(make_app(services, admin_key), limits, settings.drain_seconds)
        # All objects so far live as long as the process. If they were not frozen, each full collection would block the
        # event loop for 50 ms.
        gc.collect()
        gc.freeze()
        await _run_until_stopped(
            server,
            listener,
            services.generator.limiter,
            [asyncio.create_task(one) for one in work],
        )


def main(arguments: argparse.Namespace) -> int:
    """Runs a server until a signal stops it. Returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        settings = read_settings(vars(arguments), os.environ)
    except (ConfigError, SettingRefused) as error:
        print(f"slora: {error}", file=sys.stderr)
        return 2
    for name, meant in unknown_variables(os.environ).items():
        logger.warning("%s is not a setting%s", name, f"; did you mean {meant}?" if meant else "")
    try:
        asyncio.run(_serve(settings))
    except (SloraError, OSError, ValueError) as error:
        print(f"slora: {error}", file=sys.stderr)
        return 1
    return 0


def serve_demo(arguments: argparse.Namespace) -> int:
    """Serves the demo that is part of slora, as `main` does."""
    try:
        arguments.demo = str(find_demo_directory())
    except ConfigError as error:
        print(f"slora: {error}", file=sys.stderr)
        return 1
    return main(arguments)
