"""Opens the registry by URL; the only place that decides where it is kept."""

from urllib.parse import urlsplit

from slora_adapters.database.database import Database
from slora_adapters.registry.name_cache import NameCache
from slora_adapters.registry.registry import Registry
from slora_adapters.registry.sqlite_storage import SqliteStorage
from slora_adapters.store.store_url import REDIS_SCHEMES, load_optional

__all__ = ["open_registry"]


def open_registry(url: str, database: Database, server: str | None = None) -> Registry:
    """`url`: redis://, rediss:// or unix://, a Redis that several hosts share; empty for `database`, which processes of
    one host share. server: see `open_redis_storage`. Raises ValueError for other URLs, StoreUnavailable if the Redis
    does not answer or could lose names.
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
    # A lookup there is a round trip, and the Redis may be away.
    return Registry(storage, cache=NameCache())
