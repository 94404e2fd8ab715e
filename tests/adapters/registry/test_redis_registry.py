"""Registries that release 0.1 kept in Redis are copied into the database."""

import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis

from slora_adapters.database.database import Database
from slora_adapters.errors import StoreUnavailable, StoreUnfit
from slora_adapters.peft.adapter import AdapterExtras
from slora_adapters.registry import redis_registry
from slora_adapters.registry.redis_registry import copy_registry
from slora_adapters.registry.registry import AdapterDetails, Registry
from slora_adapters.registry.registry_storage import RegistryStorage
from slora_adapters.version import AdapterVersion
from tests.adapters.database.test_migration import OLD, check_old_names
from tests.redis_server import RedisServer

VOICE = "slora:registry:versions:acme/voice"


@pytest.fixture
def old(shared_redis: RedisServer) -> Iterator[redis.Redis]:
    """A Redis with a registry that release 0.1 has written."""
    with shared_redis.client() as client:
        client.flushall()
        for line in (OLD / "registry.redis.jsonl").read_text().splitlines():
            client.execute_command(*json.loads(line))
        yield client


@pytest.fixture
def database(database_place: str) -> Iterator[Database]:
    with closing(Database(database_place)) as database:
        yield database


def dump(client: redis.Redis) -> dict[bytes, Any]:
    return {key: client.dump(key) for key in client.keys("*")}


def test_all_names_are_copied_with_the_id_and_redis_is_not_changed(
    old: redis.Redis, shared_redis: RedisServer, database: Database
) -> None:
    before = dump(old)
    registry = Registry(RegistryStorage(database))
    cursor = registry.changes().cursor
    assert copy_registry(shared_redis.url, database) == 4
    assert registry.changes(cursor).resync, "a server that runs already looks everything up again"
    assert registry.registry.encode() == old.get("slora:registry:id")
    check_old_names(registry)
    assert dump(old) == before
    assert copy_registry(shared_redis.url, database) is None, "it may be repeated"


def test_texts_inside_the_versions_of_schema_1_are_copied(
    old: redis.Redis, shared_redis: RedisServer, database: Database
) -> None:
    fields = json.loads(old.hget(VOICE, 3))
    for name in ("blob_bytes", "template_bytes", "defaults_bytes", "extras_digest"):
        del fields[name]
    old.hset(VOICE, 3, json.dumps(fields | {"chat_template": "{{ m }}", "generation_config": None}))
    old.hdel("slora:registry:extras:acme/voice", 3)
    old.set("slora:registry:schema", 1)
    copy_registry(shared_redis.url, database)
    record, extras = Registry(RegistryStorage(database)).serve("acme", "voice@3")
    assert extras == AdapterExtras("{{ m }}") and record.extras.template_bytes == 7


def test_a_copy_that_fails_changes_nothing(
    old: redis.Redis, shared_redis: RedisServer, database: Database
) -> None:
    old.hset(VOICE, 1, "damaged")
    with pytest.raises(ValueError):
        copy_registry(shared_redis.url, database)
    registry = Registry(RegistryStorage(database))
    assert registry.list("acme") == [] and registry.registry.encode() != old.get("slora:registry:id")


def test_a_registry_that_changes_in_the_meantime_is_refused(
    old: redis.Redis, shared_redis: RedisServer, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = redis_registry._parse_alias

    def change_and_parse(raw: bytes) -> Any:
        old.xadd("slora:registry:changes", {"nonce": "n"})
        return plain(raw)

    monkeypatch.setattr(redis_registry, "_parse_alias", change_and_parse)
    with pytest.raises(StoreUnfit, match="stop all servers"):
        copy_registry(shared_redis.url, database)
    assert Registry(RegistryStorage(database)).list("acme") == []


def test_a_database_with_names_is_refused(
    old: redis.Redis, shared_redis: RedisServer, database: Database
) -> None:
    registry = Registry(RegistryStorage(database))
    registry.put("own", AdapterVersion("t", "1" * 64), AdapterDetails(8, ("q_proj",), 1))
    with pytest.raises(StoreUnfit, match="has 1 adapter names already"):
        copy_registry(shared_redis.url, database)
    assert [one.label for one in registry.list("t")] == ["own"] and registry.list("acme") == []


def test_a_redis_without_a_registry_or_with_a_newer_one_is_refused(
    old: redis.Redis, shared_redis: RedisServer, database: Database, tmp_path: Path
) -> None:
    old.set("slora:registry:schema", 3)
    with pytest.raises(StoreUnavailable, match="version 3 of the registry schema"):
        copy_registry(shared_redis.url, database)
    old.flushall()
    with pytest.raises(StoreUnfit, match="has no registry of slora"):
        copy_registry(shared_redis.url, database)
    with pytest.raises(StoreUnavailable, match=re.escape("Redis is unavailable")):
        copy_registry(f"unix://{tmp_path}/nothing", database)
