"""Database, store and Redis are checked as a server uses them, and stay as they were."""

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from slora_adapters.errors import StoreUnavailable
from slora_adapters.store.file_store import FileStore
from slora_api.core.settings import Settings
from slora_api.doctor.checks import Severity, check_database, check_redis, check_store
from tests.api.doctor.test_machine import SETTINGS, worst
from tests.redis_server import RedisServer
from tests.support.migrated_file import running_release, write_migrated_database, write_next_release


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return replace(SETTINGS, data_dir=str(tmp_path))


def test_a_database_of_this_release_is_in_order(settings: Settings, database_place: str) -> None:
    status, text = worst(check_database(replace(settings, database=database_place)))
    assert status is Severity.OK and "has the schema of this release" in text


@pytest.mark.parametrize(
    ("revision", "words"), [("0009", "made before the first release"), ("9999", "written by a newer release")]
)
def test_a_database_that_cannot_be_migrated_is_refused(
    settings: Settings, tmp_path: Path, revision: str, words: str
) -> None:
    file = tmp_path / "slora.db"
    write_migrated_database(file)
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("UPDATE slora_schema SET version_num = ?", (revision,))
    with pytest.raises(StoreUnavailable, match=words):
        worst(check_database(settings))


def test_a_database_of_an_older_release_is_read_and_not_migrated(settings: Settings, tmp_path: Path) -> None:
    file = tmp_path / "slora.db"
    write_migrated_database(file)
    before = file.read_bytes()
    with running_release(write_next_release(tmp_path)):
        found, text = worst(check_database(settings))
    assert found is Severity.WARNING and "migrates it to next" in text
    assert file.read_bytes() == before


def test_a_database_that_does_not_exist_is_not_created(settings: Settings, tmp_path: Path) -> None:
    assert worst(check_database(settings))[0] is Severity.OK
    assert list(tmp_path.iterdir()) == []


def test_a_store_of_files_is_tried_and_keeps_nothing(settings: Settings, tmp_path: Path) -> None:
    assert worst(check_store(settings))[0] is Severity.OK
    assert list(tmp_path.iterdir()) == []
    store = FileStore(tmp_path / "adapters")
    status, text = worst(check_store(settings))
    assert status is Severity.OK and "a blob was written, read and deleted" in text
    assert list(store.digests()) == [] and not any((tmp_path / "adapters" / "tmp").iterdir())


def test_a_store_that_changes_bytes_fails(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(tmp_path / "adapters")
    put = FileStore.put
    monkeypatch.setattr(
        FileStore, "put", lambda self, digest, members: put(self, digest, {"probe": bytes(64)})
    )
    with pytest.raises(StoreUnavailable, match="different bytes from those written"):
        worst(check_store(settings))
    assert list(store.digests()) == []


def test_a_redis_that_is_away_is_told_in_one_sentence(settings: Settings) -> None:
    with pytest.raises(StoreUnavailable, match=r"[^.]; check its URL"):
        worst(check_redis(replace(settings, redis="redis://127.0.0.1:1/0")))


def test_a_redis_that_is_the_store_is_tried_and_left_empty(
    settings: Settings, shared_redis: RedisServer
) -> None:
    with shared_redis.client() as client:
        before = set(client.keys())
        chosen = replace(settings, store=shared_redis.tcp_url, redis=shared_redis.tcp_url)
        chosen = replace(chosen, quota_redis=shared_redis.tcp_url)
        assert worst(check_store(chosen))[0] is Severity.OK
        status, text = worst(check_redis(chosen))
        assert status is Severity.OK
        assert "maxmemory-policy noeviction, appendonly yes" in text
        assert set(client.keys()) == before


def test_a_redis_that_may_lose_data_is_refused_as_store_and_warned_about_for_quotas(
    settings: Settings, make_redis
) -> None:
    server = make_redis("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")
    with pytest.raises(StoreUnavailable, match="appendonly yes"):
        worst(check_store(replace(settings, store=server.tcp_url)))
    status, text = worst(check_redis(replace(settings, quota_redis=server.tcp_url)))
    assert status is Severity.WARNING and "set maxmemory-policy noeviction" in text
    status, text = worst(check_redis(replace(settings, redis=server.tcp_url)))
    assert status is Severity.OK and "used of 100 MiB" in text
