"""Opens the objects of one API process: those that routes use, and its limits of connections."""

from contextlib import AsyncExitStack
from pathlib import Path

from slora.engine.client import RemoteEngine
from slora_adapters.database.audit_log import AuditLog
from slora_adapters.database.database import Database
from slora_adapters.disk_reserve import DiskReserve
from slora_adapters.registry.catalog import SHARED_GRACE_S, Catalog
from slora_adapters.registry.registry import Registry
from slora_adapters.registry.registry_storage import RegistryStorage
from slora_adapters.store.store_url import open_store
from slora_api.adapters.aliases import Aliases
from slora_api.adapters.canary import Canary
from slora_api.adapters.change_follower import ChangeFollower
from slora_api.adapters.inspector import InspectionBounds, Inspector
from slora_api.adapters.local_adapters import LocalAdapters
from slora_api.adapters.model_catalog import ModelCatalog
from slora_api.adapters.pinning import Pinning
from slora_api.adapters.publisher import Publisher
from slora_api.adapters.quarantine import Quarantine
from slora_api.adapters.uploads import Uploads
from slora_api.data_dir import DataDir
from slora_api.generation.chat_templates import ChatTemplates
from slora_api.generation.generation import Generator
from slora_api.generation.metrics import Metrics
from slora_api.generation.prompt_encoder import PromptEncoder
from slora_api.generation.request_limiter import RequestLimiter
from slora_api.routes.services import Services
from slora_api.server.base_model_files import BaseModelFiles
from slora_api.server.children import store_url
from slora_api.server.connection_limits import ConnectionLimits
from slora_api.server.descriptors import fit_connections, raise_descriptor_limit
from slora_api.settings import Settings
from slora_api.tenants.adapter_quota import AdapterQuota
from slora_api.tenants.api_key import Pepper
from slora_api.tenants.key_store import KeyStore
from slora_api.tenants.revocation_journal import RevocationJournal
from slora_api.tenants.tenant_store import TenantStore
from slora_api.tenants.usage_ledger import UsageLedger
from slora_api.tenants.usage_report import UsageReport

__all__ = ["connection_limits", "open_services"]


async def open_services(
    stack: AsyncExitStack,
    settings: Settings,
    model: BaseModelFiles,
    data: DataDir,
    pepper: Pepper,
    client: RemoteEngine,
) -> Services:
    """Creates the objects that routes use. The stack closes them."""
    reserve = DiskReserve(data.reserve)
    database = Database(settings.database or data.database, reserve)
    stack.callback(database.close)
    store = open_store(store_url(settings, data), settings.redis or None)
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
    key_store = KeyStore(database, pepper, journal, settings.auth_stale_seconds)
    tenant_store = TenantStore(database, key_store)
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
        AuditLog(database),
        key_store,
        ModelCatalog(base, adapters, client, pinning),
        Publisher(
            base, quarantine, inspector, templates, quota, tenant_store, adapters, canary, client, pinning
        ),
        Aliases(registry, pinning),
        pinning,
        ChangeFollower(registry, key_store, client, pinning.refresh),
        Uploads(quarantine),
        LocalAdapters(
            Path(settings.lora_root) if settings.lora_root else None, quarantine, settings.max_upload_bytes
        ),
        templates,
        Generator(client, model.tokenizer, limiter, Metrics(model.name)),
        PromptEncoder(model.tokenizer, settings.max_concurrent_per_tenant),
        UsageReport(UsageLedger(database), registry.find_names, model.name),
    )


def connection_limits(settings: Settings) -> ConnectionLimits:
    """Raises this process's limit of open files and derives the number of connections from it."""
    max_connections = fit_connections(settings.max_connections, raise_descriptor_limit())
    return ConnectionLimits(max_connections, settings.max_connections_per_address)
