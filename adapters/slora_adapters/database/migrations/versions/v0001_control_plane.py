"""Creates the first schema of the control plane, and copies the data that release 0.1 kept in the same SQLite file.

Revision ID: 0001
"""

import json
import uuid

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_KEY = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
_OLD_TABLES = (
    *("api_keys", "tenants", "adapter_names", "adapter_versions", "adapter_extras", "adapter_aliases"),
    *("adapter_reservations", "adapter_changes", "adapter_registry"),
)
# Columns that are copied without changes, by table.
_COPIED = {
    "tenants": "name, created_at, weight, min_pool_share, max_pool_share, priority",
    "api_keys": "key_id, tenant, digest, adapter, created_at, revoked_at",
    "adapter_names": "tenant, name, last_number, created_at",
    "adapter_versions": "tenant, name, number, digest, rank, target_modules, num_bytes, packed_bytes, blob_bytes, "
    "template_bytes, defaults_bytes, extras_digest, created_at",
    "adapter_extras": "tenant, name, number, digest, chat_template, generation_config",
    "adapter_aliases": "tenant, name, alias, follows_pushes, history, salt, pinned, updated_at",
    "adapter_reservations": "reservation, digest, expires_at",
}


def upgrade() -> None:
    connection = op.get_bind()
    old = _set_aside(connection)
    _create_tables()
    registry = uuid.uuid4().hex
    if "adapter_registry" in old:
        (registry,) = connection.execute(sa.text("SELECT registry FROM old_adapter_registry")).one()
    connection.execute(sa.text("INSERT INTO platform (id) VALUES (:id)"), {"id": registry})
    # The change feed must never be empty, so it gets a first row. Cursors that release 0.1 issued are not valid in this
    # feed.
    connection.execute(
        sa.text(
            "INSERT INTO changes (nonce, tenant, name, key_id, orphaned, moved_pin) "
            "VALUES (:nonce, '', '', '', '[]', :moved_pin)"
        ),
        {"nonce": uuid.uuid4().hex, "moved_pin": False},
    )
    for table, columns in _COPIED.items():
        if table in old:
            op.execute(f"INSERT INTO {table} ({columns}) SELECT {columns} FROM old_{table}")
    if "adapter_aliases" in old:
        _split_targets(connection)
    for table in old:
        op.drop_table(f"old_{table}")
    if old:
        op.drop_table("schema_versions")


def _set_aside(connection: sa.Connection) -> list[str]:
    """Renames the tables of release 0.1 and returns their earlier names."""
    if connection.dialect.name != "sqlite":
        return []
    tables = sa.inspect(connection).get_table_names()
    old = [table for table in _OLD_TABLES if table in tables]
    indexes = sa.text(
        "SELECT name FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL"
    )  # indexes of primary and unique keys are dropped with their table
    for (index,) in connection.execute(indexes).fetchall():
        op.execute(f"DROP INDEX {index}")
    for table in old:
        op.rename_table(table, f"old_{table}")
    # Release 0.1 refuses a file with another layout version, and tells the operator to run the newer release.
    op.execute("PRAGMA user_version = 2")
    return old


def _split_targets(connection: sa.Connection) -> None:
    """Fills the table of targets. Release 0.1 kept the targets of an alias as JSON, such as {"1": 90, "2": 10}."""
    aliases = connection.execute(sa.text("SELECT tenant, name, alias, targets FROM old_adapter_aliases"))
    rows = [
        {"tenant": tenant, "name": name, "alias": alias, "number": int(number), "percent": percent}
        for tenant, name, alias, targets in aliases
        for number, percent in json.loads(targets).items()
    ]
    if rows:
        connection.execute(
            sa.text(
                "INSERT INTO adapter_alias_targets (tenant, name, alias, number, percent) "
                "VALUES (:tenant, :name, :alias, :number, :percent)"
            ),
            rows,
        )


def _create_tables() -> None:
    op.create_table(
        "platform", sa.Column("id", sa.Text, primary_key=True), sa.Column("pepper_check", sa.LargeBinary)
    )
    op.create_table(
        "tenants",
        sa.Column("name", _KEY, primary_key=True),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("weight", sa.Double, nullable=False),
        sa.Column("min_pool_share", sa.Double, nullable=False),
        sa.Column("max_pool_share", sa.Double, nullable=False),
        sa.Column("priority", sa.Integer, nullable=False),
    )
    op.create_table(
        "api_keys",
        sa.Column("key_id", _KEY, primary_key=True),
        sa.Column("tenant", _KEY, sa.ForeignKey("tenants.name"), nullable=False),
        sa.Column("digest", sa.LargeBinary, nullable=False),
        sa.Column("adapter", sa.Text),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("revoked_at", sa.BigInteger),
    )
    op.create_index("api_keys_of_tenant", "api_keys", ["tenant", "created_at"])
    _create_adapter_tables()
    op.create_table(
        "changes",
        sa.Column(
            "change_id",
            sa.BigInteger().with_variant(sa.Integer, "sqlite"),
            primary_key=True,
            autoincrement=True,
        ),
        sa.Column("nonce", sa.Text, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("key_id", sa.Text, nullable=False),
        sa.Column("orphaned", sa.Text, nullable=False),
        sa.Column("moved_pin", sa.Boolean, nullable=False),
        sqlite_autoincrement=True,
    )


def _create_adapter_tables() -> None:
    op.create_table(
        "adapter_names",
        *_keys("tenant", "name"),
        sa.Column("last_number", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("tenant", "name"),
    )
    op.create_table(
        "adapter_versions",
        *_keys("tenant", "name"),
        sa.Column("number", sa.BigInteger),
        sa.Column("digest", _KEY, nullable=False),
        sa.Column("rank", sa.Integer, nullable=False),
        sa.Column("target_modules", sa.Text, nullable=False),
        sa.Column("num_bytes", sa.BigInteger, nullable=False),
        sa.Column("packed_bytes", sa.BigInteger),
        sa.Column("blob_bytes", sa.BigInteger),
        sa.Column("template_bytes", sa.BigInteger),
        sa.Column("defaults_bytes", sa.BigInteger),
        sa.Column("extras_digest", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("tenant", "name", "number"),
    )
    op.create_index("adapter_versions_of_digest", "adapter_versions", ["digest", "tenant"])
    op.create_index(
        "adapter_versions_stored",
        "adapter_versions",
        ["tenant", "digest", "blob_bytes", "num_bytes", "template_bytes", "defaults_bytes"],
    )
    op.create_table(
        "adapter_extras",
        *_keys("tenant", "name"),
        sa.Column("number", sa.BigInteger),
        sa.Column("digest", sa.Text, nullable=False),
        sa.Column("chat_template", sa.Text),
        sa.Column("generation_config", sa.Text),
        sa.PrimaryKeyConstraint("tenant", "name", "number"),
    )
    op.create_table(
        "adapter_aliases",
        *_keys("tenant", "name", "alias"),
        sa.Column("follows_pushes", sa.Boolean, nullable=False),
        sa.Column("history", sa.Text, nullable=False),
        sa.Column("salt", sa.Text, nullable=False),
        sa.Column("pinned", sa.Boolean, nullable=False),
        sa.Column("updated_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("tenant", "name", "alias"),
    )
    op.create_index(
        "adapter_aliases_pinned",
        "adapter_aliases",
        ["tenant", "name", "alias"],
        sqlite_where=sa.text("pinned = 1"),
        postgresql_where=sa.text("pinned"),
    )
    op.create_table(
        "adapter_alias_targets",
        *_keys("tenant", "name", "alias"),
        sa.Column("number", sa.BigInteger),
        sa.Column("percent", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("tenant", "name", "alias", "number"),
    )
    op.create_table(
        "adapter_reservations",
        sa.Column("reservation", sa.Text, primary_key=True),
        sa.Column("digest", _KEY, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=False),
    )
    op.create_index("adapter_reservations_of_digest", "adapter_reservations", ["digest"])


def _keys(*names: str) -> list[sa.Column[str]]:
    return [sa.Column(name, _KEY) for name in names]
