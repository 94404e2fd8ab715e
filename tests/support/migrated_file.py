"""SQLite databases with the tables of this release. One is migrated for all tests, and the others are copies of it:
a migration takes ten times as long as a copy."""

import sqlite3
import tempfile
import uuid
from contextlib import closing
from functools import cache
from pathlib import Path

from slora_adapters.database.database import Database

__all__ = ["write_migrated_database"]


def write_migrated_database(path: Path) -> None:
    """Writes a database as `Database` would make it. Like that one, it has an id and a feed of its own."""
    path.touch(mode=0o600)
    path.write_bytes(_template())
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("UPDATE platform SET id = ?", (uuid.uuid4().hex,))
        connection.execute("UPDATE changes SET nonce = ?", (uuid.uuid4().hex,))


@cache
def _template() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "slora.db"
        Database(path).close()
        return path.read_bytes()
