"""The time of the last use of a key costs requests nothing, and survives a database that is away for a while."""

import asyncio
from contextlib import closing, suppress
from pathlib import Path

from sqlalchemy import Engine, event

from slora_adapters.database.database import Database
from slora_adapters.errors import StoreUnavailable
from slora_api.keys.key_admin import KeyAdmin
from slora_api.keys.key_record import Caller
from slora_api.keys.key_store import KeyStore
from slora_api.keys.key_use import KeyUse
from slora_api.tenants.tenant_store import TenantStore
from tests.api.platform import open_key_store, post, running_platform
from tests.api.scripted_engine import ScriptedEngine, deltas_of
from tests.api.served import wait_until
from tests.postgresql_server import PostgresqlServer
from tests.support.clock import Clock
from tests.support.file_limit import largest_file


def make_keys(database: Database, folder: Path, count: int) -> tuple[KeyStore, list[Caller]]:
    store = open_key_store(database, folder)
    tenant = TenantStore(database, store).create_tenant("acme").tenant_id
    return store, [KeyAdmin(store).create_key(tenant)[0] for _ in range(count)]


def read_times(store: KeyStore, key: Caller) -> list[int | None]:
    """Returns when each key of the tenant was used."""
    assert key.tenant is not None
    return [key.last_used_at for key in KeyAdmin(store).list_keys(key.tenant)]


def test_each_key_is_written_once_a_minute_at_most(database: Database, tmp_path: Path) -> None:
    clock, statements = Clock(1000.0), 0
    store, (key,) = make_keys(database, tmp_path, 1)
    use = KeyUse(database, clock)

    def count(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        nonlocal statements
        statements += statement.startswith("UPDATE")

    event.listen(Engine, "before_cursor_execute", count)
    for clock.now in range(1000, 1060):
        for _ in range(100):
            use.note(key)
        asyncio.run(use.write())
    event.remove(Engine, "before_cursor_execute", count)
    assert statements == 1 and read_times(store, key) == [1000]
    clock.now = 1060.0
    use.note(key)
    asyncio.run(use.write())
    assert read_times(store, key) == [1060] and len(use) == 1
    clock.now = 2000.0
    asyncio.run(use.write())
    assert not len(use), "what is remembered of a key that is not used any more is bounded"


def test_a_time_never_goes_back_when_two_processes_write(database: Database, tmp_path: Path) -> None:
    clock = Clock(1000.0)
    store, keys = make_keys(database, tmp_path, 3)
    early, late = KeyUse(database, clock), KeyUse(database, clock)
    for key in keys:
        early.note(key)
    clock.now = 1030.0
    for key in keys:
        late.note(key)
    asyncio.run(late.write())
    asyncio.run(early.write())
    assert read_times(store, key) == [1030] * 3


def test_times_wait_while_the_database_is_away(postgresql_server: PostgresqlServer, tmp_path: Path) -> None:
    clock = Clock(1000.0)
    with closing(Database(postgresql_server.make_database())) as database:
        store, (key,) = make_keys(database, tmp_path, 1)
        use = KeyUse(database, clock)
        postgresql_server.kill()
        use.note(key)
        asyncio.run(use.write())
        clock.now = 1030.0
        postgresql_server.start()

        def is_written() -> bool:
            asyncio.run(use.write())
            with suppress(StoreUnavailable):  # the connections of before
                return read_times(store, key) == [1000]
            return False

        wait_until(is_written)


def test_times_wait_while_the_disk_is_full(tmp_path: Path) -> None:
    with closing(Database(tmp_path / "slora.db")) as database:
        store, (key,) = make_keys(database, tmp_path, 1)
        use = KeyUse(database, Clock(1000.0))
        use.note(key)
        with largest_file(0):
            asyncio.run(use.write())
        assert read_times(store, key) == [None]
        asyncio.run(use.write())
        assert read_times(store, key) == [1000]


def test_a_request_notes_the_use_of_its_key(tmp_path: Path) -> None:
    with running_platform(tmp_path, ScriptedEngine([deltas_of(b"ok")])) as platform:
        key, idle = platform.key("acme"), platform.key("acme")
        assert post(platform, key, "/v1/completions", {"model": "base", "prompt": "x"}).status_code == 200
        asyncio.run(platform.services.keys.use.write())
        keys = platform.services.keys.admin.list_keys(platform.tenant_id("acme"))
        used = {one.key_id: one.last_used_at for one in keys}
        assert used[key.split("_")[1]] is not None and used[idle.split("_")[1]] is None
