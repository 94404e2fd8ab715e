"""Opens the registry by URL. Only this module chooses between SQLite and Redis."""

from urllib.parse import urlsplit

from slora_adapters.database.database import Database
from slora_adapters.registry.name_cache import NameCache
from slora_adapters.registry.registry import Registry
from slora_adapters.registry.sqlite_storage import SqliteStorage
from slora_adapters.store.store_url import REDIS_SCHEMES, load_optional

__all__ = ["open_registry"]


def open_registry(url: str, database: Database, server: str | None = None) -> Registry:
    """Opens the registry at `url`: redis://, rediss:// or unix:// for a Redis that several hosts share. An empty URL
    uses `database`, which the processes of one host share.

    server: see `open_redis_storage`. Raises ValueError for other URLs. Raises StoreUnavailable if the Redis does not
    answer or its settings allow data loss.
    """
    if not url:
        return Registry(SqliteStorage(database))
    scheme = urlsplit(url).scheme
    if scheme not in REDIS_SCHEMES:
        schemes = ", ".join(f"{one}://" for one in REDIS_SCHEMES)
        raise ValueError(
            f"a registry that several hosts share must be a Redis ({schemes}), not {scheme or url!r}"
        )
    storage = load_optional("registry.redis_storage", "redis", f"a {scheme}:// registry").open_redis_storage(
        url, server
    )
    # A lookup in Redis is a network round trip, and Redis may be unavailable.
    return Registry(storage, cache=NameCache())
