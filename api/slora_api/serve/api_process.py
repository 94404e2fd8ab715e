"""An API process: the objects that its routes use, and the entry point of an API worker.

All objects of `open_services` belong to one process. State that all processes of the host share is in the database, in
files of the data directory, or on the board. The main process opens the same objects. It serves requests with them if
it is the only API process. Otherwise, it uses them for the tasks of the host. The main process has number 0 on the
board; see `api_workers.py`.
"""

import gc

if __name__ == "__main__":
    # Garbage collection is off until all modules are imported. It would take a tenth of the import time and find no
    # garbage.
    gc.disable()

import argparse
import logging
import os
import socket
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import cast

from slora.client.replica_group import ReplicaGroup
from slora.core.errors import ConfigError, SloraError
from slora.core.setting import SettingRefused
from slora.core.usage_journal import UsageJournal
from slora_adapters.database.audit_log import AuditLog
from slora_adapters.database.database import Database
from slora_adapters.errors import StoreUnavailable
from slora_adapters.process.children import end_with_stdin
from slora_adapters.process.full_disk import DiskReserve
from slora_adapters.process.heartbeat import Heartbeat, WorkProgress
from slora_adapters.process.logs import set_up_logging
from slora_adapters.process.shortage import Work, run_event_loop
from slora_adapters.registry.catalog import SHARED_GRACE_S, Catalog
from slora_adapters.registry.registry import Registry
from slora_adapters.store.store_url import check_redis_url, load_optional, open_store
from slora_api.adapters.aliases import Aliases
from slora_api.adapters.canary import Canary
from slora_api.adapters.inspector import InspectionBounds, Inspector
from slora_api.adapters.local_adapters import LocalAdapters
from slora_api.adapters.model_catalog import ModelCatalog
from slora_api.adapters.pinning import Pinning
from slora_api.adapters.publisher import Publisher
from slora_api.adapters.quarantine import Quarantine
from slora_api.adapters.uploads import Uploads
from slora_api.batches.batch_runner import BatchRunner
from slora_api.batches.batches import Batches
from slora_api.batches.files import FileLimits, Files
from slora_api.completions.generation import Generator, Readiness
from slora_api.completions.prompt_encoder import PromptEncoder
from slora_api.core.data_dir import DataDir
from slora_api.core.fair_slots import cpu_slots
from slora_api.core.host_board import HostBoard, HostChanges
from slora_api.core.key_masking import mask_keys
from slora_api.core.request_context import RequestFields
from slora_api.core.settings import Settings, read_settings
from slora_api.http.connections import ConnectionLimits
from slora_api.http.http_server import HttpServer
from slora_api.keys.api_key import Pepper, open_admin_key
from slora_api.keys.key_store import KeyStore
from slora_api.keys.key_use import KeyUse
from slora_api.keys.revocation_journal import RevocationJournal
from slora_api.keys.running_requests import RunningRequests
from slora_api.metrics.adapter_references import AdapterReferences
from slora_api.metrics.live_feed import LiveFeed
from slora_api.metrics.metrics import Metrics, share_metrics
from slora_api.operations.engines import Engines
from slora_api.quotas.adapter_quota import AdapterQuota
from slora_api.quotas.host_counters import HostCounters
from slora_api.quotas.quota import default_quota
from slora_api.quotas.quota_counters import QuotaCounters
from slora_api.quotas.quota_meter import QuotaMeter
from slora_api.quotas.quota_store import QuotaStore
from slora_api.quotas.request_limiter import RequestLimiter
from slora_api.sandbox.chat_templates import ChatTemplates
from slora_api.sandbox.grammar_checks import GrammarChecks
from slora_api.serve.api_workers import WorkerConfig
from slora_api.serve.app import make_app, make_router
from slora_api.serve.base_model_files import BaseModelFiles
from slora_api.serve.change_follower import ChangeFollower
from slora_api.serve.children import store_url
from slora_api.serve.descriptors import fit_connections, raise_descriptor_limit
from slora_api.serve.disk_watch import DiskWatch
from slora_api.serve.host_state import HostState
from slora_api.serve.http_front import HttpFront, run_until_stopped
from slora_api.serve.replica_list import ReplicaList
from slora_api.serve.services import Services
from slora_api.serve.tracing import open_tracing
from slora_api.tenants.tenant_life import TenantLife
from slora_api.tenants.tenant_store import TenantStore
from slora_api.usage.usage_ledger import UsageLedger
from slora_api.usage.usage_recorder import UsageRecorder
from slora_api.usage.usage_report import UsageReport
from slora_api.usage.usage_shipper import UsageShipper

logger = logging.getLogger("slora.api")

# The number of new objects after which Python collects garbage. A collection blocks the event loop for up to 5 ms.
_NEW_OBJECTS = 10_000
# With the default of 5 ms, each iteration of the event loop waits that long while a thread computes.
_SWITCH_INTERVAL_S = 5e-4

# Exit codes for the supervisor. _REFUSED_EXIT: the settings can never work. _TRY_LATER_EXIT: something outside this
# process is not ready.
_REFUSED_EXIT, _FAILED_EXIT, _TRY_LATER_EXIT = 2, 1, os.EX_TEMPFAIL


async def open_services(
    stack: AsyncExitStack,
    settings: Settings,
    model: BaseModelFiles,
    data: DataDir,
    pepper: Pepper,
    client: ReplicaGroup,
    board: HostBoard,
    metrics: Path | None = None,
    replicas: ReplicaList | None = None,
) -> Services:
    """Creates the objects that routes use. `stack` closes them at the end.

    metrics: see `Metrics`. replicas: the engines of other hosts; None if there are none.
    """
    is_main, num_serving = board.process == 0, settings.api_workers
    host_changes = HostChanges(board)
    reserve = DiskReserve(data.reserve, is_keeper=is_main)
    database = Database(settings.database or data.database, reserve, host_changes.announce)
    stack.callback(database.close)
    store = open_store(store_url(settings, data), settings.redis or None)
    stack.callback(store.close)
    registry = Registry(database, is_behind=host_changes.is_behind)
    adapters = Catalog(registry, store, grace_s=SHARED_GRACE_S if settings.store else 0.0)
    slots = cpu_slots(settings.max_concurrent_per_tenant, num_serving)
    templates = ChatTemplates(model.tokenizer, slots, num_processes=num_serving)
    stack.push_async_callback(templates.close)
    grammars = GrammarChecks(slots, num_processes=num_serving)
    stack.push_async_callback(grammars.close)
    limiter = RequestLimiter(
        max_requests=settings.max_concurrent_requests,
        max_uploads=settings.max_concurrent_uploads,
        board=board,
    )
    journal = RevocationJournal(data.revocations)
    stack.callback(journal.close)
    key_store = KeyStore(
        database, pepper, journal, settings.auth_stale_seconds, is_behind=host_changes.is_behind
    )
    tenant_store = TenantStore(database, key_store)
    pinning = Pinning(registry, tenant_store, client)
    # Each process empties its own folder when it starts. The folders of the workers are in the main process's folder.
    quarantine = Quarantine(data.quarantine if is_main else data.quarantine / str(board.process), reserve)
    inspector = Inspector(model.shape, model.limits, InspectionBounds(), num_serving)
    counted = Metrics(model.name, metrics)
    counted.read_replicas = lambda: client.health
    readiness = Readiness(engines=frozenset(client.health))
    client.is_stalled = lambda name: (
        name in readiness.stalls or (replicas is not None and name in replicas.stalled)
    )
    ledger = UsageLedger(database)
    quota_store = QuotaStore(database, default_quota(settings), host_changes.is_behind)
    counters = open_counters(data, settings.quota_redis)
    if is_main and database.path is None and not settings.quota_redis:
        logger.warning(
            "quotas are counted on this host alone: if several hosts share the database, give all of them the same "
            "--quota-redis (SLORA_QUOTA_REDIS)"
        )
    stack.push_async_callback(counters.close)
    quotas = QuotaMeter(quota_store, counters, ledger, limiter, counted.quota_refused)
    adapter_quota = AdapterQuota(quota_store, counted.quota_refused)
    canary = Canary(client, model.tokenizer)
    base = model.base()
    usage_journal = UsageJournal(data.usage)
    stack.callback(usage_journal.close)
    shipper = UsageShipper(usage_journal, data.usage, ledger, settings.usage_days if is_main else None)
    stack.callback(shipper.ship)
    recorder = UsageRecorder(client, usage_journal, observe=counted.requests.count)
    stack.callback(recorder.close)
    return Services(
        settings,
        reserve,
        tenant_store,
        AuditLog(database),
        key_store,
        KeyUse(database),
        RunningRequests(key_store),
        ModelCatalog(base, adapters, client, pinning),
        Publisher(
            base,
            quarantine,
            inspector,
            templates,
            adapter_quota,
            tenant_store,
            adapters,
            canary,
            client,
            pinning,
        ),
        Aliases(registry, pinning),
        pinning,
        ChangeFollower(
            registry,
            key_store,
            quota_store,
            client,
            pinning.refresh,
            host_changes if num_serving > 1 else None,
        ),
        Uploads(quarantine),
        LocalAdapters(
            Path(settings.lora_root) if settings.lora_root else None, quarantine, settings.max_upload_bytes
        ),
        slots,
        templates,
        grammars,
        Generator(client, model.tokenizer, limiter, counted, recorder, readiness),
        PromptEncoder(model.tokenizer, slots),
        UsageReport(ledger, registry.find_names, tenant_store, model.name),
        TenantLife(tenant_store, ledger, adapters, client),
        registry,
        quota_store,
        quotas,
        shipper,
        quarantine,
        Batches(database, Files(database, adapters, file_limits(settings)), settings.max_batches_per_tenant),
        Engines(client, counted, board, database),
        LiveFeed(client, registry.find_names, tenant_store.find_names, lambda: limiter.stopping),
        AdapterReferences(registry.find_references),
    )


def file_limits(settings: Settings) -> FileLimits:
    return FileLimits(settings.max_files_per_tenant, settings.max_file_bytes_per_tenant)


def make_batch_runner(services: Services) -> BatchRunner:
    """Makes the batch runner. Each API process that serves requests has one."""
    return BatchRunner(
        services.batches,
        make_router(services),
        services.generator,
        services.key_store,
        services.running,
        services.settings.batch_lines_in_flight,
    )


def open_counters(data: DataDir, redis_url: str) -> QuotaCounters:
    """Opens the quota counters. With `redis_url`, all hosts that use this Redis share the counters. Otherwise, only the
    processes of this host share them.
    """
    host = HostCounters(data.quotas)
    if not redis_url:
        return host
    check_redis_url(redis_url, "--quota-redis")
    module = load_optional("slora_api.quotas.redis_counters", "redis", "--quota-redis")
    return cast(QuotaCounters, module.open_redis_counters(redis_url, host))


def connection_limits(settings: Settings) -> ConnectionLimits:
    """Raises this process's limit of open files and derives the number of connections from it."""
    share = -(-settings.max_connections // settings.api_workers)
    max_connections = fit_connections(share, raise_descriptor_limit())
    return ConnectionLimits(
        max_connections, settings.max_connections_per_address, num_processes=settings.api_workers
    )


def background_work(
    services: Services, client: ReplicaGroup, on_hello: Callable[[], None] = lambda: None
) -> list[Work]:
    """Returns the background tasks of each API process. `serve.py` adds the tasks that the main process does for the
    host. on_hello: see `ReplicaGroup.run`.
    """
    return [
        partial(client.run, on_hello),
        services.follower.run,
        services.running.run,
        services.key_use.run,
        services.quotas.run,
        services.usage_shipper.run,
        DiskWatch(services.reserve, services.key_store).run,
    ]


def limit_garbage_collection() -> None:
    """Makes garbage collection cheaper. Call this after all objects that live as long as the process have been created.

    Later collections skip these objects. Otherwise, each full collection would block the event loop for 50 ms. New
    objects are collected less often than by default, because the objects of requests in progress survive most
    collections. With many requests in progress, collections took a tenth of this process's CPU time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS)


def prefer_event_loop() -> None:
    """Makes threads that compute, for example for a batch, hand the interpreter over to the event loop sooner."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


async def _serve(settings: Settings, config: WorkerConfig, heartbeat: Heartbeat) -> None:
    limits = connection_limits(settings)
    model = BaseModelFiles(settings, config.started_at)
    share_metrics(config.metrics, config.number)
    async with AsyncExitStack() as stack:
        data = DataDir(Path(settings.data_dir).resolve())
        listener = stack.enter_context(socket.socket(fileno=config.listener))
        board = HostBoard(config.board, config.board_size, config.number)
        pepper = Pepper.from_file(data.pepper)
        client = ReplicaGroup(config.engine_sockets)
        replicas = ReplicaList(config.replicas, client) if config.replicas else None
        services = await open_services(
            stack, settings, model, data, pepper, client, board, config.metrics, replicas
        )
        # A worker never generates a key, because the main process has to print it.
        admin_key = open_admin_key(settings.admin_key, data.path, pepper, is_needed=False)
        app = make_app(services, admin_key, board, open_tracing(stack, os.environ))
        work: list[Work] = [
            *background_work(services, client),
            *([replicas.follow] if replicas else []),
            make_batch_runner(services).run,
            HostState(services.generator, services.engines, board).follow,
            partial(heartbeat.run, lambda: WorkProgress(0, is_busy=False)),
        ]
        limit_garbage_collection()
        prefer_event_loop()
        heartbeat.begin_serving()
        await run_until_stopped(
            HttpFront(HttpServer(app, limits, settings.drain_seconds, board), listener),
            services.generator.limiter,
            work,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description="An API worker of slora. `slora serve` starts it.")
    parser.add_argument("--config", required=True, help="WorkerConfig as JSON")
    parser.add_argument("--heartbeat", type=int, help="file descriptor of the shared page for heartbeats")
    arguments = parser.parse_args()
    config = WorkerConfig.from_json(arguments.config)
    end_with_stdin()
    heartbeat = Heartbeat(arguments.heartbeat, computes_here=False)
    try:
        settings = read_settings(config.flags, os.environ)
        set_up_logging(
            settings.log_format,
            f"API worker {config.number}",
            RequestFields(),
            label=f"[{config.number}] ",
            mask=mask_keys,
        )
        run_event_loop(_serve(settings, config, heartbeat))
    except (SloraError, OSError, ValueError) as error:
        logger.error("%s", error)
        heartbeat.explain(str(error))
        if isinstance(error, ConfigError | SettingRefused):
            return _REFUSED_EXIT
        return _TRY_LATER_EXIT if isinstance(error, StoreUnavailable) else _FAILED_EXIT
    return 0


if __name__ == "__main__":
    gc.enable()
    sys.exit(main())
