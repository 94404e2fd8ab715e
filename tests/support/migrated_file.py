"""SQLite databases with the tables of this release, and the revisions of a next release.

One database is migrated for all tests, and the others are copies of it: a migration takes ten times as long as a copy.
"""

import shutil
import sqlite3
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from unittest.mock import patch

from slora_adapters.database import migration
from slora_adapters.database.database import Database
from slora_adapters.database.migration import SCRIPTS

__all__ = ["NEXT", "running_release", "write_migrated_database", "write_next_release"]

NEXT = "next"
# It expands the schema: a server of this release goes on with the tables that it leaves.
_NEXT_REVISION = f"""
import sqlalchemy as sa
from alembic import op

revision, down_revision = "{NEXT}", "3"


def upgrade():
    op.add_column("tenants", sa.Column("region", sa.Text, nullable=False, server_default="everywhere"))
    # On SQLite this copies the table, because SQLite cannot make a column nullable.
    with op.batch_alter_table("adapter_names") as table:
        table.alter_column("created_at", existing_type=sa.Double(), nullable=True)
    op.create_table("regions", sa.Column("name", sa.Text, primary_key=True))
    op.execute("INSERT INTO regions SELECT DISTINCT region FROM tenants")
"""


def write_next_release(folder: Path) -> Path:
    """Writes the revisions of a release that follows this one. Returns their directory, as `migration.SCRIPTS`."""
    scripts = folder / "next-release"
    shutil.copytree(SCRIPTS, scripts, ignore=shutil.ignore_patterns("__pycache__"))
    (scripts / "versions" / "v2_next.py").write_text(_NEXT_REVISION, encoding="utf-8")
    return scripts


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


@contextmanager
def running_release(scripts: Path) -> Iterator[None]:
    """Lets this process be of the release whose migrations these are."""
    with patch.object(migration, "SCRIPTS", scripts):
        yield
