"""The objects that routes use. The composition root creates them once. A route receives them through a parameter of
type `Wired`, and the tenant that its path names through one of type `NamedTenant`.
"""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from inspect import iscoroutinefunction
from typing import Annotated, Any

from fastapi import Depends, Request, Response
from fastapi.routing import APIRoute

from slora_adapters.database.audit_log import AuditLog
from slora_adapters.process.full_disk import DiskReserve
from slora_adapters.registry.registry import Registry
from slora_api.adapters.aliases import Aliases
from slora_api.adapters.local_adapters import LocalAdapters
from slora_api.adapters.model_catalog import ModelCatalog
from slora_api.adapters.pinning import Pinning
from slora_api.adapters.publisher import Publisher
from slora_api.adapters.quarantine import Quarantine
from slora_api.adapters.uploads import Uploads
from slora_api.batches.batches import Batches
from slora_api.completions.generation import Generator
from slora_api.completions.prompt_encoder import PromptEncoder
from slora_api.core.fair_slots import FairSlots
from slora_api.core.settings import Settings
from slora_api.core.threads import HOUSEKEEPING, tenant_slot
from slora_api.http.request_bounds import RequestBounds
from slora_api.keys.authentication import Operator
from slora_api.keys.key_store import KeyStore
from slora_api.keys.key_use import KeyUse
from slora_api.keys.running_requests import RunningRequests
from slora_api.metrics.adapter_references import AdapterReferences
from slora_api.metrics.gateway_answer import GatewayAnswer
from slora_api.metrics.live_feed import LiveFeed
from slora_api.operations.engines import Engines
from slora_api.quotas.quota_meter import QuotaMeter
from slora_api.quotas.quota_store import QuotaStore
from slora_api.sandbox.chat_templates import ChatTemplates
from slora_api.sandbox.grammar_checks import GrammarChecks
from slora_api.serve.change_follower import ChangeFollower
from slora_api.tenants.tenant_life import TenantLife
from slora_api.tenants.tenant_store import Tenant, TenantStore
from slora_api.usage.usage_report import UsageReport
from slora_api.usage.usage_shipper import UsageShipper

# The maximum number of usage queries that run concurrently, and of queries of one tenant that wait for a slot.
_READING_SLOTS = 3
_MAX_READING = 16


@dataclass(frozen=True, slots=True)
class Services:
    """The objects that the routes of one process use."""

    settings: Settings
    reserve: DiskReserve
    tenant_store: TenantStore
    audit_log: AuditLog
    key_store: KeyStore
    key_use: KeyUse
    running: RunningRequests
    catalog: ModelCatalog
    publisher: Publisher
    aliases: Aliases
    pinning: Pinning
    follower: ChangeFollower
    uploads: Uploads
    local_adapters: LocalAdapters
    cpu_slots: FairSlots
    templates: ChatTemplates
    grammars: GrammarChecks
    generator: Generator
    encoder: PromptEncoder
    usage: UsageReport
    tenant_life: TenantLife
    registry: Registry
    quota_store: QuotaStore
    quotas: QuotaMeter
    usage_shipper: UsageShipper
    quarantine: Quarantine
    batches: Batches
    engines: Engines
    live: LiveFeed
    references: AdapterReferences
    gateway_answer: GatewayAnswer = field(default_factory=GatewayAnswer)
    reading: FairSlots = field(
        default_factory=lambda: FairSlots(_READING_SLOTS, _MAX_READING, "queries of usage")
    )

    def bounds(self) -> RequestBounds:
        """Returns the bounds of a request. Raises Starting while there is no engine."""
        longest = self.encoder.tokenizer.longest_token_chars
        return RequestBounds.of(self.settings, self.generator.engine_info(), longest)


async def _services(request: Request) -> Services:
    # This is a coroutine, because FastAPI would call any other dependency on a thread.
    services: Services = request.app.state.services
    return services


Wired = Annotated[Services, Depends(_services)]


def find_named_tenant(tenant: str, _operator: Operator, services: Wired) -> Tenant:
    """Returns the tenant that the path of an operator's request names. Raises NotFound."""
    return services.tenant_store.find_named(tenant)


# Whatever a route does afterwards, it does with the id of the tenant, because the name may change meanwhile.
NamedTenant = Annotated[Tenant, Depends(find_named_tenant)]


class TenantRoute(APIRoute):
    """A route of tenants. FastAPI runs an endpoint that is a plain function on one of 40 threads, which it also needs
    for operators. So a tenant's request holds a slot of the tenants' threads meanwhile.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if iscoroutinefunction(self.endpoint):
            return handle

        async def handle_in_slot(request: Request) -> Response:
            async with tenant_slot(getattr(request.state.caller, "tenant", None) or HOUSEKEEPING):
                return await handle(request)

        return handle_in_slot
