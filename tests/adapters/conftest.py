from tests.adapters.registry_places import open_storage
from tests.redis_server import make_redis, redis_server, shared_redis

__all__ = ["make_redis", "open_storage", "redis_server", "shared_redis"]
