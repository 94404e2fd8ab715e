"""What an engine is told about changes, whichever process made them."""

import asyncio
from collections.abc import Callable, Collection
from contextlib import closing, suppress
from pathlib import Path

import pytest
from sqlalchemy import update

from slora.core.errors import EngineUnavailable
from slora_adapters.database import schema
from slora_adapters.database.change_feed import Changes
from slora_adapters.database.database import Database
from slora_adapters.errors import StoreUnavailable
from slora_adapters.registry.record import AdapterDetails
from slora_adapters.registry.registry import Registry
from slora_adapters.version import AdapterVersion
from slora_api.core.errors import NotFound
from slora_api.quotas.quota import NO_QUOTA
from slora_api.quotas.quota_store import QuotaStore
from slora_api.serve.background import ChangeFollower
from slora_api.tenants.tenant_store import TenantStore
from tests.api.platform import open_key_store

D1, D2, D3 = "1" * 64, "2" * 64, "3" * 64
DETAILS = AdapterDetails(2, ("q_proj",), 100)


class FakeEngine:
    """versions: the versions that were sent to the engine. It receives no messages while `is_there` is False."""

    def __init__(self, *versions: AdapterVersion) -> None:
        self.sent_versions = set(versions)
        self.is_there = True
        self.purged: list[str] = []

    async def purge_tenant(self, tenant: str) -> None:
        self.purged.append(tenant)

    async def remove_adapter(self, version: AdapterVersion) -> None:
        if not self.is_there:
            raise EngineUnavailable("it is not there")
        self.sent_versions.discard(version)


class FailingRegistry(Registry):
    """A registry that fails at the second read of changes, and at the first query for the named versions."""

    num_read = num_asked = 0

    def changes(self, cursor: str | None = None) -> Changes:
        self.num_read += 1
        if self.num_read == 2:
            raise StoreUnavailable("locked")
        return super().changes(cursor)

    def named(self, versions: Collection[AdapterVersion]) -> set[AdapterVersion]:
        self.num_asked += 1
        if self.num_asked == 1:
            raise StoreUnavailable("locked")
        return super().named(versions)


def _v(digest: str) -> AdapterVersion:
    return AdapterVersion("t1", digest)


def follow(
    database: Database,
    registry: Registry,
    engine: FakeEngine,
    change: Callable[[], None],
    is_done: Callable[[list[None]], bool],
) -> list[None]:
    """Makes a change after the follower has started, and waits. Returns one entry for each report that pins have
    moved."""
    moved: list[None] = []
    assert database.path is not None
    key_store = open_key_store(database, database.path.parent)
    quota_store = QuotaStore(database, NO_QUOTA)

    async def main() -> None:
        follower = ChangeFollower(registry, key_store, quota_store, engine, lambda: moved.append(None))
        running = asyncio.create_task(follower.run())
        async with asyncio.timeout(300):
            while not moved:  # the follower has started
                await asyncio.sleep(0.001)
            change()
            while not is_done(moved):
                await asyncio.sleep(0.001)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(main())
    return moved


def test_deleted_adapters_are_removed_from_the_engine_despite_registry_errors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(Database(tmp_path / "slora.db")) as database:
        registry, other = FailingRegistry(database), Registry(database)
        other.put("a", _v(D1), DETAILS)
        other.put("b", _v(D2), DETAILS)
        engine = FakeEngine(_v(D1), _v(D2))
        moved = follow(
            database,
            registry,
            engine,
            lambda: other.delete("t1", "a") and None,
            lambda moved: len(engine.sent_versions) < 2,
        )
    assert engine.sent_versions == {_v(D2)} and len(moved) == 1
    assert registry.num_asked >= 2 and caplog.text.count("changes are not seen") >= 1


def test_a_late_report_of_a_purge_leaves_a_new_tenant_with_the_name_alone(tmp_path: Path) -> None:
    with closing(Database(tmp_path / "slora.db")) as database:
        registry = Registry(database)
        tenant_store = TenantStore(database, open_key_store(database, tmp_path))
        old, new = tenant_store.create_tenant("leaver").tenant_id, ""

        def change() -> None:
            nonlocal new
            tenant_store.begin_purge(old)
            tenant_store.finish_purge(old, {})
            new = tenant_store.create_tenant("leaver").tenant_id

        engine = FakeEngine()
        follow(database, registry, engine, change, lambda moved: len(moved) > 1)
    assert set(engine.purged) == {old} and new != old


def test_the_engine_ends_a_tenant_when_its_purge_begins_and_when_it_ends(tmp_path: Path) -> None:
    with closing(Database(tmp_path / "slora.db")) as database:
        registry = Registry(database)
        tenant_store = TenantStore(database, open_key_store(database, tmp_path))
        leaver = tenant_store.create_tenant("leaver").tenant_id
        engine = FakeEngine()

        def is_done(moved: list[None]) -> bool:
            if engine.purged == [leaver]:
                with suppress(NotFound):
                    tenant_store.finish_purge(leaver, {})
            return len(engine.purged) > 1

        follow(database, registry, engine, lambda: tenant_store.begin_purge(leaver), is_done)
    assert engine.purged == [leaver] * 2


def test_an_adapter_that_was_deleted_and_pushed_again_is_kept(tmp_path: Path) -> None:
    with closing(Database(tmp_path / "slora.db")) as database:
        registry = Registry(database)
        for name, digest in (("a", D1), ("b", D2)):
            registry.put(name, _v(digest), DETAILS)
        engine = FakeEngine(_v(D1), _v(D2))

        def change() -> None:
            registry.delete("t1", "a")
            registry.put("a", _v(D1), DETAILS)
            registry.delete("t1", "b")

        follow(database, registry, engine, change, lambda moved: len(engine.sent_versions) < 2)
    assert engine.sent_versions == {_v(D1)}


def test_after_a_resync_every_adapter_of_the_engine_is_looked_up(tmp_path: Path) -> None:
    with closing(Database(tmp_path / "slora.db")) as database:
        registry = Registry(database)
        for digest in (D1, D2):
            registry.put("a", _v(digest), DETAILS)
        engine = FakeEngine(_v(D1), _v(D3))
        follow(database, registry, engine, lambda: None, lambda moved: _v(D3) not in engine.sent_versions)
        assert engine.sent_versions == {_v(D1)}
        engine.sent_versions.add(_v(D3))
        engine.is_there = False

        def lose_history() -> None:
            with database.transaction() as connection:
                connection.execute(update(schema.changes).values(nonce="another"))

        follow(database, registry, engine, lose_history, lambda moved: len(moved) == 2)


def test_pins_are_sent_to_the_engine_only_when_they_change(tmp_path: Path) -> None:
    with closing(Database(tmp_path / "slora.db")) as database:
        registry = Registry(database)
        for digest in (D1, D2):
            registry.put("a", _v(digest), DETAILS)
            registry.put("b", _v(digest), DETAILS)

        def change() -> None:
            registry.roll_back("t1", "b", "latest")
            registry.pin("t1", "a", lambda one, others: None)
            registry.delete("t1", "b@2")

        engine = FakeEngine(_v(D2))
        moved = follow(database, registry, engine, change, lambda moved: len(moved) > 1)
    assert len(moved) == 2, "once to begin with, once for what was read together"
