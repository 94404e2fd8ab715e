"""Builds the objects with which operators watch and restart a server."""

from dataclasses import dataclass

from slora_adapters.database.audit_log import AuditLog
from slora_adapters.registry.registry import Registry
from slora_api.completions.generation import Generator
from slora_api.core.foundation import Foundation
from slora_api.keys.running_requests import RunningRequests
from slora_api.metrics.live_feed import LiveFeed, LiveServices
from slora_api.metrics.names import ServerNames
from slora_api.metrics.scraper import Scraper
from slora_api.operations.engine_routes import OperationServices
from slora_api.operations.engines import Engines
from slora_api.operations.health_routes import HealthServices
from slora_api.tenants.tenant_store import TenantStore
from slora_api.usage.usage_shipper import UsageShipper


@dataclass(frozen=True, slots=True)
class Operations:
    services: OperationServices
    health: HealthServices
    live: LiveServices


def build_operations(
    foundation: Foundation,
    generator: Generator,
    registry: Registry,
    tenant_store: TenantStore,
    running: RunningRequests,
    shipper: UsageShipper,
) -> Operations:
    client, limiter, database = foundation.client, generator.limiter, foundation.database
    engines = Engines(client, generator.metrics, foundation.board, database)
    names = ServerNames.of(registry, tenant_store)
    live = LiveFeed(client, names, lambda: limiter.stopping)
    scraper = Scraper(generator.metrics, client, generator.engine_info, names, foundation.reserve, shipper)
    return Operations(
        OperationServices(engines, tenant_store, AuditLog(database)),
        HealthServices(limiter, generator, foundation.reserve, engines, scraper),
        LiveServices(live, running),
    )
