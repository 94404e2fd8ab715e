"""Builds the objects of adapters."""

from dataclasses import dataclass
from pathlib import Path

from slora_adapters.registry.registry import SHARED_GRACE_S, Registry, StoredAdapters
from slora_adapters.store.store_url import open_store
from slora_api.adapters.base_model import BaseModelFiles
from slora_api.adapters.model_catalog import ModelCatalog
from slora_api.adapters.pinning import Pinning
from slora_api.adapters.publisher import Canary, CheckQuota, InspectionBounds, Inspector, Publisher
from slora_api.adapters.quarantine import HubAdapters, LocalAdapters, Quarantine, Uploads
from slora_api.adapters.routes import AdapterServices
from slora_api.core.data_dir import store_url
from slora_api.core.foundation import Foundation
from slora_api.http.permit_pool import RequestLimiter
from slora_api.http.request_bounds import ServerBounds
from slora_api.sandbox.chat_templates import ChatTemplates
from slora_api.tenants.tenant_store import TenantStore


@dataclass(frozen=True, slots=True)
class Adapters:
    services: AdapterServices
    stored: StoredAdapters
    pinning: Pinning
    quarantine: Quarantine

    @property
    def registry(self) -> Registry:
        return self.stored.registry


@dataclass(frozen=True, slots=True)
class AdapterNeeds:
    """What adapters need of other features."""

    model: BaseModelFiles
    tenant_store: TenantStore
    templates: ChatTemplates
    check_quota: CheckQuota
    limiter: RequestLimiter
    bounds: ServerBounds


def build_adapters(foundation: Foundation, needs: AdapterNeeds) -> Adapters:
    settings, data, client, model = foundation.settings, foundation.data, foundation.client, needs.model
    store = open_store(store_url(settings, data), settings.redis or None)
    foundation.stack.callback(store.close)
    registry = Registry(foundation.database)
    stored = StoredAdapters(registry, store, grace_s=SHARED_GRACE_S if settings.store else 0.0)
    pinning = Pinning(registry, needs.tenant_store, client)
    # Each process empties its own folder when it starts. The folders of the workers are in the main process's folder.
    folder = data.quarantine if foundation.is_main else data.quarantine / str(foundation.board.process)
    quarantine = Quarantine(folder, foundation.reserve)
    inspector = Inspector(model.shape, model.limits, InspectionBounds(), settings.api_workers)
    base = model.base()
    services = AdapterServices(
        limiter=needs.limiter,
        uploads=Uploads(quarantine),
        publisher=Publisher(
            base,
            quarantine,
            inspector,
            needs.templates,
            needs.check_quota,
            needs.tenant_store,
            stored,
            Canary(client, model.tokenizer),
            client,
            pinning,
        ),
        catalog=ModelCatalog(base, stored, client, pinning),
        local_adapters=LocalAdapters(
            Path(settings.lora_root) if settings.lora_root else None, quarantine, settings.max_upload_bytes
        ),
        hub_adapters=HubAdapters(
            settings.max_upload_bytes, settings.min_body_bytes_per_s, settings.api_workers
        ),
        tenant_store=needs.tenant_store,
        bounds=needs.bounds,
    )
    return Adapters(services, stored, pinning, quarantine)
