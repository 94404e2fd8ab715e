"""Builds the objects with which operators watch and restart a server."""

from dataclasses import dataclass

from slora_adapters.database.audit_log import AuditLog
from slora_adapters.registry.registry import Registry
from slora_api.completions.generation import Generator
from slora_api.core.foundation import Foundation
from slora_api.keys.running_requests import RunningRequests
from slora_api.metrics.adapter_references import AdapterReferences
from slora_api.metrics.live_feed import LiveFeed
from slora_api.metrics.live_routes import LiveServices
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
    live = LiveFeed(client, registry.find_names, tenant_store.find_names, lambda: limiter.stopping)
    references = AdapterReferences(registry.find_references)
    return Operations(
        OperationServices(engines, tenant_store, AuditLog(database)),
        HealthServices(limiter, generator, foundation.reserve, engines, shipper, tenant_store, references),
        LiveServices(live, running),
    )
