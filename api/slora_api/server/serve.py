"""`slora serve`: the composition root, which creates and closes all parts of a server.

The order is: data directory and its lock, secrets, database, adapters, child processes, HTTP. The socket is open before
the engine is ready (see /readyz), and is closed first at the end.
"""

import argparse
import asyncio
import gc
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slora.engine.client import RemoteEngine
from slora.errors import ConfigError, SloraError
from slora.models.model_spec_reader import read_model_spec
from slora.setting import SettingRefused
from slora.text.generation_defaults import read_model_defaults
from slora.text.tokenizer import Tokenizer
from slora_adapters.database.database import Database
from slora_adapters.disk_reserve import DiskReserve
from slora_adapters.errors import DiskFull
from slora_adapters.full_disk import is_full
from slora_adapters.limits import AdapterLimits
from slora_adapters.loader.loader_config import LoaderConfig
from slora_adapters.registry.catalog import SHARED_GRACE_S, Catalog
from slora_adapters.registry.registry import Registry
from slora_adapters.registry.registry_storage import RegistryStorage
from slora_adapters.store.store_url import open_store
from slora_api.adapters.aliases import Aliases
from slora_api.adapters.base_identity import BaseIdentity
from slora_api.adapters.base_model import DEFAULT_MODEL, BaseModelInfo
from slora_api.adapters.canary import Canary
from slora_api.adapters.change_follower import ChangeFollower
from slora_api.adapters.inspector import InspectionBounds, Inspector
from slora_api.adapters.local_adapters import LocalAdapters
from slora_api.adapters.model_catalog import ModelCatalog
from slora_api.adapters.pinning import Pinning
from slora_api.adapters.publisher import Publisher
from slora_api.adapters.quarantine import Quarantine
from slora_api.adapters.uploads import Uploads
from slora_api.data_dir import DataDir, open_data_dir
from slora_api.generation.chat_templates import ChatTemplates
from slora_api.generation.generation import Generator
from slora_api.generation.metrics import Metrics
from slora_api.generation.prompt_encoder import PromptEncoder
from slora_api.generation.request_limiter import RequestLimiter
from slora_api.routes.services import Services
from slora_api.server.app import make_app
from slora_api.server.child_environment import ENGINE_VARIABLES, LOADER_VARIABLES, pass_on
from slora_api.server.connection_limits import ConnectionLimits
from slora_api.server.demo import (
    DemoTenant,
    describe_demo,
    find_demo_adapters,
    find_demo_directory,
    set_up_demo,
)
from slora_api.server.descriptors import fit_connections, raise_descriptor_limit
from slora_api.server.disk_watch import DiskWatch
from slora_api.server.http_server import HttpServer
from slora_api.server.listener import open_listener
from slora_api.server.supervisor import Child, Supervisor
from slora_api.settings import Settings, read_settings, unknown_variables
from slora_api.tenants.adapter_quota import AdapterQuota
from slora_api.tenants.admin_key import AdminKey, open_admin_key
from slora_api.tenants.api_key import Pepper
from slora_api.tenants.revocation_journal import RevocationJournal
from slora_api.tenants.tenant_store import TenantStore

__all__ = ["main", "serve_demo"]

logger = logging.getLogger("slora.serve")

_POLL_S = 0.05
_DEMO = "demo"
# Linux's limit of the path of a Unix socket, without the terminating zero byte.
_SOCKET_PATH_BYTES = 107


class _Model:
    """What the API knows about the base model, read from its directory without the engine. Raises ConfigError."""

    def __init__(self, settings: Settings) -> None:
        self.directory = settings.engine.model
        self.config = read_model_spec(self.directory, settings.engine.model_impl)
        self.dtype = self.config.resolve_dtype(settings.engine.dtype)
        self.shape = self.config.shape(self.dtype)
        self.name = settings.engine.model_name or self.directory.resolve().name
        if self.name == DEFAULT_MODEL:
            raise ConfigError(
                f"the base model is named {DEFAULT_MODEL!r}, but that name selects the default adapter of the "
                "request's API key; set another --model-name"
            )
        self.tokenizer = Tokenizer.from_directory(self.directory)
        self.limits = AdapterLimits(
            max_lora_rank=settings.engine.max_lora_rank,
            max_tensor_bytes=settings.max_upload_bytes,
            served_dtype=self.dtype,
            vocab_size=self.config.vocab_size,
            base_directory=self.directory,
        )

    def base(self) -> BaseModelInfo:
        identity = BaseIdentity(self.directory, (self.name, self.directory.resolve().name))
        return BaseModelInfo(self.name, identity, read_model_defaults(self.directory), int(time.time()))


@dataclass(frozen=True, slots=True)
class _Sockets:
    """The Unix sockets of the child processes."""

    directory: Path

    @property
    def engine(self) -> Path:
        return self.directory / "engine.sock"

    @property
    def loader(self) -> Path:
        return self.directory / "loader.sock"


def _open_sockets(stack: AsyncExitStack, data: DataDir) -> _Sockets:
    """Returns the paths of the sockets.

    They are in the data directory if its path is short enough and its disk has room, else in a temporary directory. A
    kill -9 leaves the temporary directory behind.
    """
    sockets = _Sockets(data.path / "run")
    if len(os.fsencode(sockets.engine)) > _SOCKET_PATH_BYTES:
        return _Sockets(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slora-"))))
    try:
        sockets.directory.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        if not is_full(error):
            raise
        return _Sockets(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slora-"))))
    # Remove the sockets of a killed server. Its children may still run for a moment and must not be mistaken for ours.
    for stale in (sockets.engine, sockets.loader):
        stale.unlink(missing_ok=True)
    return sockets


def _url(listener: socket.socket) -> str:
    """Returns the URL of the server for clients on this machine."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _store_url(settings: Settings, data: DataDir) -> str:
    return settings.store or str(data.adapters)


def _split_names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _children(settings: Settings, model: _Model, data: DataDir, sockets: _Sockets) -> list[Child]:
    engine: dict[str, Any] = {
        "socket": str(sockets.engine),
        "loader_socket": str(sockets.loader),
        "engine": asdict(settings.engine) | {"model": str(model.directory), "model_name": model.name},
    }
    loader = LoaderConfig(
        socket=sockets.loader,
        store=_store_url(settings, data),
        warm=settings.redis or None,
        shape=model.shape,
        dtype=model.dtype,
        host_cache_bytes=settings.host_cache_bytes,
        max_lora_rank=settings.engine.max_lora_rank,
    )
    return [
        # In a file: the URLs of the stores may contain passwords, and every user of the machine can read a command
        # line.
        Child(
            "loader",
            "slora_adapters.loader.loader_process",
            [data.write_arguments("--config", loader.to_json())],
            pass_on(os.environ, (*LOADER_VARIABLES, *_split_names(settings.store_environment))),
            waits_for_others=True,
        ),
        Child(
            "engine",
            "slora.engine.process",
            ["--config", json.dumps(engine)],
            pass_on(os.environ, ENGINE_VARIABLES),
        ),
    ]


async def _open_services(
    stack: AsyncExitStack,
    settings: Settings,
    model: _Model,
    data: DataDir,
    pepper: Pepper,
    client: RemoteEngine,
) -> Services:
    """Creates the objects that routes use. The stack closes them."""
    reserve = DiskReserve(data.reserve)
    database = Database(settings.database or data.database, reserve)
    stack.callback(database.close)
    store = open_store(_store_url(settings, data), settings.redis or None)
    stack.callback(store.close)
    registry = Registry(RegistryStorage(database))
    adapters = Catalog(registry, store, grace_s=SHARED_GRACE_S if settings.store else 0.0)
    templates = ChatTemplates(model.tokenizer, settings.max_concurrent_per_tenant)
    stack.push_async_callback(templates.close)
    limiter = RequestLimiter(
        max_requests=settings.max_concurrent_requests,
        max_per_tenant=settings.max_concurrent_per_tenant,
        max_uploads=settings.max_concurrent_uploads,
    )
    journal = RevocationJournal(data.revocations)
    stack.callback(journal.close)
    tenant_store = TenantStore(database, pepper, journal, settings.auth_stale_seconds)
    pinning = Pinning(registry, tenant_store, client)
    quarantine = Quarantine(data.quarantine, reserve)
    inspector = Inspector(model.shape, model.limits, InspectionBounds())
    quota = AdapterQuota(settings.max_versions_per_tenant, settings.max_adapter_bytes_per_tenant)
    canary = Canary(client, model.tokenizer)
    base = model.base()
    return Services(
        settings,
        reserve,
        tenant_store,
        ModelCatalog(base, adapters, client, pinning),
        Publisher(
            base, quarantine, inspector, templates, quota, tenant_store, adapters, canary, client, pinning
        ),
        Aliases(registry, pinning),
        pinning,
        ChangeFollower(registry, tenant_store, client, pinning.refresh),
        Uploads(quarantine),
        LocalAdapters(
            Path(settings.lora_root) if settings.lora_root else None, quarantine, settings.max_upload_bytes
        ),
        templates,
        Generator(client, model.tokenizer, limiter, Metrics(model.name)),
        PromptEncoder(model.tokenizer, settings.max_concurrent_per_tenant),
    )


def _connection_limits(settings: Settings) -> ConnectionLimits:
    """Raises this process's limit of open files and derives the number of connections from it."""
    max_connections = fit_connections(settings.max_connections, raise_descriptor_limit())
    return ConnectionLimits(max_connections, settings.max_connections_per_address)


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
            tenants = await set_up_demo(adapters, services.tenant_store, services.publisher, data.demo_keys)
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
    limits = _connection_limits(settings)
    model = _Model(settings)
    async with AsyncExitStack() as stack:
        data = stack.enter_context(open_data_dir(Path(settings.data_dir)))
        listener = stack.enter_context(open_listener(settings.host, settings.port))
        sockets = _open_sockets(stack, data)
        pepper = Pepper.from_file(data.pepper)
        client = RemoteEngine(sockets.engine)
        services = await _open_services(stack, settings, model, data, pepper, client)
        if settings.demo:
            services.generator.readiness.unfinished[_DEMO] = "the demo's adapters are being published"
        # Created after the steps that may refuse to start: a new key is shown only once, and a failed start would lose
        # it.
        admin_key = open_admin_key(settings.admin_key, data.path, pepper)
        supervisor = Supervisor(
            _children(settings, model, data, sockets),
            settings.stall_seconds,
            services.generator.readiness.stalls,
            services.generator.metrics.restarted,
        )
        work = [
            supervisor.run(),
            client.run(services.pinning.refresh),
            services.pinning.run(),
            services.follower.run(),
            DiskWatch(services.reserve, services.tenant_store).run(),
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
