from tests.redis_server import make_redis, redis_server

__all__ = ["make_redis", "redis_server"]
