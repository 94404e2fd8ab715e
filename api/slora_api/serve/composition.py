"""The composition root: the objects of one API process.

All objects belong to one process. State that all processes of the host share is in the database, in files of the data
directory, or on the board. The main process has the same objects as a worker. It serves requests with them if it is the
only API process. Otherwise, it uses them for the tasks of the host.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from slora_adapters.process.shortage import Work
from slora_api.adapters.base_model import BaseModelFiles
from slora_api.adapters.build import AdapterNeeds, build_adapters
from slora_api.adapters.operator_routes import OperatorServices
from slora_api.batches.batch_runner import BatchRunner
from slora_api.batches.routes import build_batches
from slora_api.completions.services import Generator, Obstacles, build_answers, open_templates
from slora_api.core.fair_slots import cpu_slots
from slora_api.core.foundation import Foundation
from slora_api.http.permit_pool import RequestLimiter
from slora_api.http.request_bounds import ServerBounds
from slora_api.keys.routes import KeyServices, build_keys
from slora_api.metrics.history import HealthRecorder
from slora_api.metrics.metrics import Metrics
from slora_api.operations.routes import build_operations
from slora_api.operations.tenant_purge import TenantPurges
from slora_api.processes.replica_list import ReplicaList
from slora_api.quotas.routes import QuotaServices, build_quotas
from slora_api.serve.app import make_router
from slora_api.serve.background import ChangeFollower, DiskWatch
from slora_api.serve.services import Services
from slora_api.tenants.routes import TenantServices
from slora_api.tenants.tenant_store import TenantStore
from slora_api.usage.prices import PriceStore
from slora_api.usage.routes import UsageServices, build_usage
from slora_api.usage.usage_report import UsageReport


def build_services(
    foundation: Foundation,
    model: BaseModelFiles,
    metrics: Path | None = None,
    replicas: ReplicaList | None = None,
) -> Services:
    """metrics: see `Metrics`. replicas: the engines of other hosts; None if there are none."""
    settings, client = foundation.settings, foundation.client
    slots = cpu_slots(settings.max_concurrent_per_tenant, settings.api_workers)
    templates = open_templates(foundation, model.tokenizer, slots)
    limiter = RequestLimiter(
        max_requests=settings.max_concurrent_requests,
        max_uploads=settings.max_concurrent_uploads,
        board=foundation.board,
    )
    counted = Metrics(model.name, metrics)
    obstacles = Obstacles(engines=frozenset(client.health))
    client.is_stalled = lambda name: (
        name in obstacles.stalls or (replicas is not None and name in replicas.stalled)
    )
    keys = build_keys(foundation)
    tenant_store = TenantStore(foundation.database, keys.store)
    usage = build_usage(foundation, counted.requests.count)
    generator = Generator(client, model.tokenizer, limiter, counted, usage.recorder, obstacles)
    quotas = build_quotas(foundation, usage.ledger, limiter, counted.count_refusal)
    bounds = ServerBounds(settings, generator.engine_info, model.tokenizer.longest_token_chars)
    adapters = build_adapters(
        foundation, AdapterNeeds(model, tenant_store, templates, quotas.adapters.check, limiter, bounds)
    )
    registry, pinning, catalog = adapters.registry, adapters.pinning, adapters.services.catalog
    operations = build_operations(
        foundation, generator, registry, tenant_store, keys.running, usage.shipper, model.started_at
    )
    batches = build_batches(foundation, adapters, limiter)
    report = UsageReport(
        usage.ledger, registry.find_names, partial(tenant_store.find_names, include_former=True), model.name
    )
    follower = ChangeFollower(
        registry,
        keys.store,
        quotas.store,
        client,
        pinning.refresh,
        foundation.changes if settings.api_workers > 1 else None,
    )
    return Services(
        foundation,
        keys,
        tenant_store,
        adapters.services.publisher,
        pinning,
        generator,
        batches.batches,
        operations.services.engines,
        quotas.meter.counters,
        usage.shipper,
        for_routes=(
            build_answers(foundation, catalog, slots, templates, generator, quotas.meter),
            adapters.services,
            batches,
            KeyServices(
                keys.admin,
                lambda name: tenant_store.find_named(name).tenant_id,
                catalog.check_key_adapter,
                catalog.read_allow_list,
            ),
            tenant_store,
            TenantServices(tenant_store, pinning.change_share),
            TenantPurges(tenant_store, usage.ledger, adapters.stored, client),
            OperatorServices(tenant_store, pinning, catalog, registry),
            QuotaServices(quotas.meter, registry, quotas.store, tenant_store),
            UsageServices(tenant_store.find_id, report),
            PriceStore(foundation.database),
            operations.services,
            operations.health,
            operations.live,
        ),
        work=[
            follower.run,
            keys.running.run,
            keys.use.run,
            quotas.meter.run,
            usage.shipper.run,
            DiskWatch(foundation.reserve, keys.admin).run,
        ],
    )


def make_batch_runner(services: Services) -> BatchRunner:
    """Makes the batch runner. Each API process that serves requests has one."""
    return BatchRunner(
        services.batches,
        make_router(services),
        services.generator,
        services.keys.store,
        services.keys.running,
        services.settings.batch_lines_in_flight,
    )


def record_health(services: Services, metrics: Metrics) -> Work:
    """Returns the task that records the health of the host. metrics: has the counts of all API processes."""
    generator = services.generator
    recorder = HealthRecorder(
        services.foundation,
        metrics,
        generator.metrics.restarts,
        lambda: generator.missing() is None,
        services.shipper,
    )
    return recorder.run


def background_work(services: Services, on_hello: Callable[[], None] = lambda: None) -> list[Work]:
    """Returns the background tasks of each API process. `serve.py` adds the tasks that the main process does for the
    host. on_hello: see `ReplicaGroup.run`.
    """
    return [partial(services.foundation.client.run, on_hello), *services.work]
