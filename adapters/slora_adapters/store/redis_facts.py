"""Reads facts about a Redis, for `slora doctor`.

The module needs the package redis, so only modules that `store_url.load_optional` loads import it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import redis

from slora_adapters.store.durable_redis import as_unavailable, connect

__all__ = ["RedisFacts", "read_redis_facts"]

_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class RedisFacts:
    """Facts about a Redis. max_bytes: the setting maxmemory; 0 means no limit. eviction: the setting maxmemory-policy.
    is_logged: the setting appendonly.
    """

    version: str
    max_bytes: int
    used_bytes: int
    eviction: str
    is_logged: bool


def read_redis_facts(url: str) -> RedisFacts:
    """Reads the facts. Raises StoreUnavailable, within seconds even if the Redis hangs."""
    with _client(url) as client, as_unavailable():
        info: dict[str, Any] = {
            **client.info("server"),
            **client.info("memory"),
            **client.info("persistence"),
        }
        return RedisFacts(
            str(info.get("redis_version", "of unknown version")),
            int(info.get("maxmemory", 0)),
            int(info.get("used_memory", 0)),
            str(info.get("maxmemory_policy", "unknown")),
            bool(info.get("aof_enabled")),
        )


@contextmanager
def _client(url: str) -> Iterator["redis.Redis[bytes]"]:
    client = connect(url, _TIMEOUT_S, num_retries=0)
    try:
        yield client
    finally:
        client.close()
