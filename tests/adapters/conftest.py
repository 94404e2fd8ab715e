from tests.adapters.registry_places import database_place, empty_database, open_database
from tests.postgresql_server import mortal_postgresql, postgresql_server, shared_postgresql
from tests.redis_server import make_redis, redis_server, shared_redis

__all__ = [
    "database_place",
    "empty_database",
    "make_redis",
    "mortal_postgresql",
    "open_database",
    "postgresql_server",
    "redis_server",
    "shared_postgresql",
    "shared_redis",
]
