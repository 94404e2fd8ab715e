"""The quotas of tenants and keys: the operator's routes, and /v1/quotas for the tenant itself."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast

from fastapi import APIRouter
from pydantic import BaseModel
from typing_extensions import TypedDict

from slora_adapters.errors import DiskFull
from slora_adapters.registry.registry import Registry
from slora_adapters.store.store_url import check_redis_url, load_optional
from slora_api.core.data_dir import DataDir
from slora_api.core.errors import NotFound, QuotaExceeded
from slora_api.core.foundation import Foundation
from slora_api.core.listing import ListObject
from slora_api.core.threads import control_thread, tenant_thread
from slora_api.http.field_types import STRICT
from slora_api.http.openapi import errors
from slora_api.http.permit_pool import RequestLimiter
from slora_api.http.wiring import Wired
from slora_api.keys.authentication import Operator, UsageReader
from slora_api.quotas.host_counters import HostCounters
from slora_api.quotas.quota import default_quota
from slora_api.quotas.quota_counters import QuotaCounters, Subject
from slora_api.quotas.quota_meter import QuotaMeter
from slora_api.quotas.quota_store import AdapterQuota, QuotaStore, check_stored
from slora_api.tenants.named_tenant import NamedTenant
from slora_api.tenants.tenant_store import TenantStore
from slora_api.usage.usage_ledger import UsageLedger

logger = logging.getLogger(__name__)

router = APIRouter(tags=["quotas"])


@dataclass(frozen=True, slots=True)
class QuotaServices:
    """What the routes of quotas use."""

    quotas: QuotaMeter
    registry: Registry
    quota_store: QuotaStore
    tenant_store: TenantStore


class QuotaChanges(BaseModel):
    """The body of PATCH requests that change the quota of a tenant or a key. A field that is left out keeps its value;
    null removes the limit.
    """

    model_config = STRICT
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None
    concurrent_answers: int | None = None
    composed_adapters: int | None = None
    adapter_versions: int | None = None
    stored_bytes: int | None = None


class QuotaLimits(TypedDict):
    """The limits that apply, including the defaults of the server. A field is null if there is no limit.
    composed_adapters: limits each request separately, so `used` does not have this field.
    """

    requests_per_minute: int | None
    tokens_per_minute: int | None
    tokens_per_day: int | None
    tokens_per_month: int | None
    concurrent_answers: int | None
    composed_adapters: int | None
    adapter_versions: int | None
    stored_bytes: int | None


class QuotaUse(TypedDict):
    """How much of each limit is used, including the reservations of requests in progress. adapter_versions,
    stored_bytes: 0 for a key, because adapters belong to its tenant.
    """

    requests_per_minute: int
    tokens_per_minute: int
    tokens_per_day: int
    tokens_per_month: int
    concurrent_answers: int
    adapter_versions: int
    stored_bytes: int


class QuotaObject(TypedDict):
    """The quota of a tenant or a key. key_id: null for the quota of the tenant."""

    object: Literal["quota"]
    tenant: str
    key_id: str | None
    limits: QuotaLimits
    used: QuotaUse


async def _describe(services: QuotaServices, tenant_name: str, subject: Subject) -> QuotaObject:
    use = await services.quotas.read(subject)
    num_versions = num_bytes = 0
    if not subject.key_id:
        stored = await tenant_thread(subject.tenant, services.registry.storage_usage, subject.tenant, "")
        num_versions, num_bytes = stored.num_versions, stored.num_bytes
    limits = subject.quota
    return {
        "object": "quota",
        "tenant": tenant_name,
        "key_id": subject.key_id or None,
        "limits": {
            "requests_per_minute": limits.requests_per_minute,
            "tokens_per_minute": limits.tokens_per_minute,
            "tokens_per_day": limits.tokens_per_day,
            "tokens_per_month": limits.tokens_per_month,
            "concurrent_answers": limits.concurrent_answers,
            "composed_adapters": limits.composed_adapters,
            "adapter_versions": limits.adapter_versions,
            "stored_bytes": limits.stored_bytes,
        },
        "used": {
            "requests_per_minute": use.requests,
            "tokens_per_minute": use.tokens,
            "tokens_per_day": use.tokens_today,
            "tokens_per_month": use.tokens_this_month,
            "concurrent_answers": use.answers,
            "adapter_versions": num_versions,
            "stored_bytes": num_bytes,
        },
    }


async def _describe_tenant(services: QuotaServices, tenant: str, tenant_name: str) -> QuotaObject:
    quota = await control_thread(services.quota_store.find_tenant_quota, tenant)
    return await _describe(services, tenant_name, Subject(tenant, "", quota))


async def _describe_key(services: QuotaServices, key_id: str) -> QuotaObject:
    subject = await control_thread(services.quota_store.find_key_subject, key_id)
    owner = await control_thread(services.tenant_store.find_tenant, subject.tenant)
    return await _describe(services, owner.name, subject)


@router.get("/v1/quotas")
async def list_quotas(key: UsageReader, services: Wired[QuotaServices]) -> ListObject[QuotaObject]:
    """Lists the quotas that apply to requests with this key: the quota of its tenant and the quota of the key."""
    own = await _describe_key(services, key.key_id)
    return {"object": "list", "data": [await _describe_tenant(services, key.tenant, key.tenant_name), own]}


@router.get("/admin/tenants/{tenant}/quota", responses=errors(NotFound))
async def get_tenant_quota(
    tenant: NamedTenant, _operator: Operator, services: Wired[QuotaServices]
) -> QuotaObject:
    return await _describe_tenant(services, tenant.tenant_id, tenant.name)


@router.patch("/admin/tenants/{tenant}/quota", responses=errors(NotFound, QuotaExceeded, DiskFull))
async def change_tenant_quota(
    tenant: NamedTenant, body: QuotaChanges, _operator: Operator, services: Wired[QuotaServices]
) -> QuotaObject:
    changes = body.model_dump(exclude_unset=True)

    def check() -> None:
        check_stored(changes, tenant.name, services.registry.storage_usage(tenant.tenant_id, ""))

    await control_thread(services.quota_store.change_tenant_quota, tenant.tenant_id, changes, check)
    return await _describe_tenant(services, tenant.tenant_id, tenant.name)


@router.get("/admin/keys/{key_id}/quota", responses=errors(NotFound))
async def get_key_quota(key_id: str, _operator: Operator, services: Wired[QuotaServices]) -> QuotaObject:
    return await _describe_key(services, key_id)


@router.patch("/admin/keys/{key_id}/quota", responses=errors(NotFound, DiskFull))
async def change_key_quota(
    key_id: str, body: QuotaChanges, _operator: Operator, services: Wired[QuotaServices]
) -> QuotaObject:
    changes = body.model_dump(exclude_unset=True)
    await control_thread(services.quota_store.change_key_quota, key_id, changes)
    return await _describe_key(services, key_id)


@dataclass(frozen=True, slots=True)
class Quotas:
    store: QuotaStore
    meter: QuotaMeter
    adapters: AdapterQuota


def build_quotas(
    foundation: Foundation,
    ledger: UsageLedger,
    limiter: RequestLimiter,
    count_refusal: Callable[[str], None],
) -> Quotas:
    """limiter, count_refusal: see `QuotaMeter`."""
    settings, database = foundation.settings, foundation.database
    store = QuotaStore(database, default_quota(settings))
    counters = open_counters(foundation.data, settings.quota_redis, foundation.board.process)
    if foundation.is_main and database.path is None and not settings.quota_redis:
        logger.warning(
            "quotas are counted on this host alone: if several hosts share the database, give all of them the same "
            "--quota-redis (SLORA_QUOTA_REDIS)"
        )
    foundation.stack.push_async_callback(counters.close)
    meter = QuotaMeter(store, counters, ledger, limiter, count_refusal)
    return Quotas(store, meter, AdapterQuota(store, count_refusal))


def open_counters(data: DataDir, redis_url: str, process: int) -> QuotaCounters:
    """Opens the quota counters. With `redis_url`, all hosts that use this Redis share the counters. Otherwise, only the
    processes of this host share them. process: see `HostCounters`.
    """
    host = HostCounters(data.quotas, process)
    if not redis_url:
        return host
    check_redis_url(redis_url, "--quota-redis")
    module = load_optional("slora_api.quotas.redis_counters", "redis", "--quota-redis")
    return cast(QuotaCounters, module.open_redis_counters(redis_url, host))
