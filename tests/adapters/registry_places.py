"""The databases of registries. Every test of the registry's contract runs on each database."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Executable

from slora_adapters.database.database import Database
from slora_adapters.registry.registry import Registry
from tests.support.migrated_file import write_migrated_database


class WatchedDatabase(Database):
    """Calls `before` and `after` with the statement and the parameters of each read."""

    before: Callable[[Executable, Any], None] = staticmethod(lambda _statement, _parameters: None)
    after: Callable[[Executable, Any], None] = staticmethod(lambda _statement, _parameters: None)

    def read(self, statement: Executable, parameters: Mapping[str, Any] | None = None) -> Sequence[Any]:
        self.before(statement, parameters)
        rows = super().read(statement, parameters)
        self.after(statement, parameters)
        return rows


@dataclass
class OpenDatabase:
    """Opens a registry's database. A second call opens the same database, as another process would. place: as
    `Database` takes it."""

    stack: ExitStack
    place: str

    def __call__(self) -> Database:
        return self.stack.enter_context(closing(Database(self.place)))


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database without tables: the path of a new file, or the URL of a PostgreSQL database."""
    if request.param == "postgresql":
        return str(request.getfixturevalue("shared_postgresql").empty_database())
    return str(tmp_path / "slora.db")


@pytest.fixture(params=["sqlite", "postgresql"])
def database_place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database with the schema of this release: its path or URL."""
    if request.param == "postgresql":
        return str(request.getfixturevalue("shared_postgresql").migrated_database())
    write_migrated_database(tmp_path / "slora.db")
    return str(tmp_path / "slora.db")


@pytest.fixture
def open_database(database_place: str) -> Iterator[OpenDatabase]:
    with ExitStack() as stack:
        yield OpenDatabase(stack, database_place)


@contextmanager
def reserved(registry: Registry, digest: str) -> Iterator[str]:
    """Holds a reservation, as an upload does between its blob and its version."""
    reservation = registry.blobs.reserve(digest)
    try:
        yield reservation
    finally:
        registry.blobs.release(reservation)
