"""Builds the objects of quotas."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from slora_adapters.store.store_url import check_redis_url, load_optional
from slora_api.core.data_dir import DataDir
from slora_api.core.foundation import Foundation
from slora_api.quotas.adapter_quota import AdapterQuota
from slora_api.quotas.host_counters import HostCounters
from slora_api.quotas.quota import default_quota
from slora_api.quotas.quota_counters import QuotaCounters
from slora_api.quotas.quota_meter import QuotaMeter
from slora_api.quotas.quota_store import QuotaStore
from slora_api.quotas.request_limiter import RequestLimiter
from slora_api.usage.usage_ledger import UsageLedger

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Quotas:
    store: QuotaStore
    meter: QuotaMeter
    adapters: AdapterQuota


def build_quotas(
    foundation: Foundation,
    ledger: UsageLedger,
    limiter: RequestLimiter,
    refused: Callable[[str], None],
) -> Quotas:
    """limiter, refused: see `QuotaMeter`."""
    settings, database = foundation.settings, foundation.database
    store = QuotaStore(database, default_quota(settings), foundation.changes.is_behind)
    counters = open_counters(foundation.data, settings.quota_redis)
    if foundation.is_main and database.path is None and not settings.quota_redis:
        logger.warning(
            "quotas are counted on this host alone: if several hosts share the database, give all of them the same "
            "--quota-redis (SLORA_QUOTA_REDIS)"
        )
    foundation.stack.push_async_callback(counters.close)
    meter = QuotaMeter(store, counters, ledger, limiter, refused)
    return Quotas(store, meter, AdapterQuota(store, refused))


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
