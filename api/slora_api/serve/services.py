"""What `serve` uses of the features of one API process."""

from dataclasses import dataclass

from slora_adapters.process.shortage import Work
from slora_api.adapters.pinning import Pinning
from slora_api.adapters.publisher import Publisher
from slora_api.batches.batches import Batches
from slora_api.completions.services import Generator
from slora_api.core.foundation import Foundation
from slora_api.core.settings import Settings
from slora_api.keys.routes import Keys
from slora_api.operations.engines import Engines
from slora_api.quotas.quota_counters import QuotaCounters
from slora_api.tenants.tenant_store import TenantStore
from slora_api.usage.usage_shipper import UsageShipper


@dataclass(frozen=True, slots=True)
class Services:
    """for_routes: the objects of the routes; see `wiring`. work: the background tasks of each API process, beside the
    client's.
    """

    foundation: Foundation
    keys: Keys
    tenant_store: TenantStore
    publisher: Publisher
    pinning: Pinning
    generator: Generator
    batches: Batches
    engines: Engines
    quota_counters: QuotaCounters
    shipper: UsageShipper
    for_routes: tuple[object, ...]
    work: list[Work]

    @property
    def settings(self) -> Settings:
        return self.foundation.settings
