"""The main process of a server: it creates and closes all parts but the engines and the loader, which run already.

The order is: secrets, database, adapters, HTTP. The server accepts connections before the engine is ready (see
/readyz). At the end, HTTP stops first.
"""

import asyncio
import logging
import math
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from slora.client.replica_group import ReplicaGroup
from slora.core.errors import SloraError
from slora_adapters.errors import DiskFull
from slora_adapters.process.durable_file import replace_durably
from slora_adapters.process.logs import print_line
from slora_adapters.process.shortage import Work
from slora_api.adapters.base_model import BaseModelFiles
from slora_api.core.data_dir import DataDir
from slora_api.core.foundation import lay_foundation
from slora_api.core.host_board import BoardSize, HostBoard
from slora_api.core.server_address import own_url
from slora_api.core.settings import Settings
from slora_api.core.threads import control_thread
from slora_api.core.tracing import open_tracing
from slora_api.http.http_server import HttpServer
from slora_api.http.permit_pool import RequestLimiter
from slora_api.keys.key_admin import KeyAdmin
from slora_api.keys.key_record import AdminKey, open_admin_key
from slora_api.metrics.metrics import Metrics, open_metrics_files
from slora_api.processes.children import SANDBOXES, await_sandboxes
from slora_api.processes.replica_list import ReplicaList
from slora_api.serve.api_workers import ApiWorkers
from slora_api.serve.app import make_app
from slora_api.serve.background import HostState
from slora_api.serve.composition import background_work, build_services, make_batch_runner, record_health
from slora_api.serve.demo import Demo
from slora_api.serve.demo_tenants import DemoTenant, describe_demo, set_up_demo
from slora_api.serve.host import Host
from slora_api.serve.http_front import (
    connection_limits,
    limit_garbage_collection,
    prefer_event_loop,
    run_until_stopped,
)
from slora_api.serve.services import Services

logger = logging.getLogger("slora.serve")

_POLL_S = 0.05
_DEMO = "demo"
# How long the address is valid that signs an operator in to the console.
_LINK_S = 300


def _url(listener: socket.socket) -> str:
    """Returns the URL of the server for clients on this machine."""
    host, port = listener.getsockname()[:2]
    return own_url(host, port)


async def _announce_ready(services: Services, data: DataDir, board: HostBoard, url: str) -> None:
    """Sets up the demo if it is configured, and prints when all processes are ready."""
    settings, client = services.settings, services.generator.client
    # Check the demo first, so that a demo without adapters fails before the engine has started.
    demo = Demo.read(Path(settings.demo)) if settings.demo else None
    unfinished = services.generator.obstacles.unfinished

    async def await_processes() -> None:
        while SANDBOXES in unfinished or not (client.ready and board.are_others_ready()):
            await asyncio.sleep(_POLL_S)

    tenants: Sequence[DemoTenant] = ()
    if demo is not None:
        try:
            tenants = await set_up_demo(
                demo,
                services.tenant_store,
                services.keys.admin,
                services.publisher,
                data.demo_keys,
                await_processes,
            )
        except DiskFull as error:
            logger.error("the demo could not be set up: %s", error)
    await await_processes()
    unfinished.pop(_DEMO, None)
    info = client.info
    formats = {"weights": info.weight_form, "KV": info.kv_cache_dtype}
    kept = [f"{what} in {form}" for what, form in formats.items() if form not in (None, "auto")]
    others = f" with {' and '.join(kept)}" if kept else ""
    print_line(
        f"slora: ready; {info.model_name} on {info.device} in {info.dtype}{others}, {info.num_pages} pages"
    )
    is_terminal = sys.stdout.isatty()
    if tenants:
        print_line(describe_demo(url, tenants, data.demo_keys, shows_keys=is_terminal))
    if is_terminal:
        await _show_sign_in_link(services.keys.admin, url)
    await control_thread(_show_admin_key, data, settings, is_terminal)


async def _show_sign_in_link(key_admin: KeyAdmin, url: str) -> None:
    """Prints an address of the console with an operator's key, which the console exchanges for another at once."""
    expires_at = int(time.time()) + _LINK_S
    try:
        _, key = await control_thread(key_admin.create_operator_key, "sign-in link", expires_at)
    except (SloraError, OSError) as error:
        logger.warning("there is no address that signs in to the console: %s", error)
    else:
        print_line(
            f"\nThe console, for the operator, once within {_LINK_S // 60} minutes: {url}/console#sign-in={key.secret}"
        )


def _show_admin_key(data: DataDir, settings: Settings, is_terminal: bool) -> None:
    """Shows a generated admin key that nobody has seen yet: on a terminal, or else where its file is."""
    path = data.unseen_admin_key
    if settings.admin_key or not path.exists():
        return
    if is_terminal:
        print_line(f"\nThe admin key, shown only this time: {path.read_text(encoding='utf-8')}")
        path.unlink()
    else:
        print_line(
            f"slora: the admin key is in {path}; delete the file when you have stored the key elsewhere"
        )


def keep_until_seen(data: DataDir, admin_key: AdminKey | None) -> None:
    """Writes a new admin key to a file until it has been shown. If the disk is full, the next start makes another."""
    if admin_key is not None and admin_key.shown_once is not None:
        try:
            replace_durably(data.unseen_admin_key, admin_key.shown_once.encode())
        except OSError:
            data.admin_key.unlink()
            raise


def _announce_stop(limiter: RequestLimiter, drain_s: float) -> None:
    print_line(
        f"slora: stopping; {limiter.num_generations} answers in progress may finish, for "
        f"{math.ceil(drain_s)} s at most; a second signal stops at once"
    )


async def run_main_process(
    stack: AsyncExitStack, host: Host, flags: Mapping[str, Any], model: BaseModelFiles
) -> None:
    """Serves until a signal stops the server. flags: see `read_settings`."""
    settings, cluster, data = host.settings, host.cluster, host.data
    limits = connection_limits(settings)
    client = ReplicaGroup(() if cluster else host.sockets.engines)
    replicas = ReplicaList(cluster.files, client) if cluster else None
    # The main process answers requests itself, or starts workers that answer them.
    num_processes = 1 if settings.api_workers == 1 else 1 + settings.api_workers
    board = HostBoard.create(BoardSize(num_processes, limits.max_connections))
    stack.callback(board.close)
    foundation = lay_foundation(stack, settings, data, client, board)
    services = build_services(foundation, model, replicas=replicas)
    generator = services.generator
    if cluster is None:
        generator.obstacles.stalls = host.stalls
    host.restarts.update(generator.metrics.restarts)  # Its names have series from the start.
    restarts = generator.metrics.restarts = host.restarts
    if settings.demo:
        generator.obstacles.unfinished[_DEMO] = "the demo's adapters are being published"
    # The key is created after the steps that may fail: a new key is shown only once, so a failed start would lose it.
    is_needed = not services.keys.admin.has_operator_key()
    admin_key = open_admin_key(settings.admin_key, data.path, services.keys.store.pepper, is_needed=is_needed)
    await control_thread(keep_until_seen, data, admin_key)
    url = _url(host.listener)
    data.advertise(url)
    generator.obstacles.unfinished[SANDBOXES] = "the processes for uploads and templates are being tried"
    work: list[Work] = [
        host.supervise,
        *background_work(services, services.pinning.refresh),
        partial(await_sandboxes, generator.obstacles.unfinished),
        services.pinning.run,
        services.publisher.sweep,
        partial(_announce_ready, services, data, board, url),
        *([replicas.follow] if replicas else []),
    ]
    front: HttpServer | ApiWorkers
    if settings.api_workers == 1:
        app = make_app(services, admin_key, board, open_tracing(stack, os.environ))
        work += [make_batch_runner(services).run, record_health(services, generator.metrics)]
        front = HttpServer(app, limits, settings.drain_seconds, board)
        serve = front.serve([host.listener])
    else:
        work.append(HostState(generator, services.engines, board).publish)
        metrics = open_metrics_files(stack, data, settings.api_workers)
        work.append(record_health(services, Metrics(model.name, metrics)))

        def forget_worker(name: str, number: int) -> None:
            board.clear(number)
            services.quota_counters.release(number)
            restarts.update([name])

        front = ApiWorkers(host, flags, model.started_at, metrics, board, forget_worker)
        serve = front.run()
    limit_garbage_collection()
    prefer_event_loop()
    await run_until_stopped(
        serve,
        front.stop,
        generator.limiter,
        work,
        lambda: print_line(f"slora: listening on {url}; the engine is starting"),
        lambda: _announce_stop(generator.limiter, settings.drain_seconds),
    )
