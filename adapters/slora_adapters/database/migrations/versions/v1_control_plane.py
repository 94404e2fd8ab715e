"""Creates the tables of the control plane. `schema.py` explains them.

Revision ID: 2
"""

import uuid
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "2"
down_revision = None

_KEY = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
_NUMBER = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    _create_platform()
    _create_tenants()
    _create_adapters()
    _create_usage()
    _create_batches()
    _create_logs()


def _create_platform() -> None:
    op.create_table(
        "platform", sa.Column("id", sa.Text, primary_key=True), *_optional(sa.LargeBinary, "pepper_check")
    )
    op.get_bind().execute(sa.text("INSERT INTO platform (id) VALUES (:id)"), {"id": uuid.uuid4().hex})


def _create_tenants() -> None:
    op.create_table(
        "tenants",
        sa.Column("tenant_id", _KEY, primary_key=True),
        sa.Column("name", _KEY, nullable=False),
        *_required(sa.BigInteger, "created_at"),
        *_required(sa.Double, "weight", "min_pool_share", "max_pool_share"),
        *_required(sa.Integer, "priority"),
        *_required(sa.Text, "status", server_default="active"),
        sa.Index("tenants_by_name", "name", unique=True),
    )
    op.create_table(
        "former_tenants",
        sa.Column("tenant_id", _KEY, primary_key=True),
        sa.Column("name", _KEY, nullable=False),
        *_required(sa.BigInteger, "purged_at"),
    )
    op.create_table(
        "api_keys",
        sa.Column("key_id", _KEY, primary_key=True),
        sa.Column("tenant", _KEY, sa.ForeignKey("tenants.tenant_id")),
        *_required(sa.LargeBinary, "digest"),
        *_optional(sa.Text, "adapter"),
        *_required(sa.BigInteger, "created_at"),
        *_optional(sa.BigInteger, "revoked_at"),
        *_required(sa.Text, "name", server_default=""),
        *_required(sa.Text, "scopes", server_default="adapters:read adapters:write inference usage:read"),
        *_optional(sa.Text, "models"),
        *_optional(sa.BigInteger, "expires_at"),
        *_optional(sa.BigInteger, "last_used_at"),
        *_optional(sa.Text, "replaced_by"),
        sa.Index("api_keys_of_tenant", "tenant", "created_at"),
    )
    op.create_table("erased_keys", sa.Column("key_id", _KEY, primary_key=True))
    op.create_table(
        "quotas",
        sa.Column("tenant", _KEY, sa.ForeignKey("tenants.tenant_id")),
        sa.Column("key_id", _KEY),
        *_optional(
            sa.BigInteger,
            *("requests_per_minute", "tokens_per_minute", "tokens_per_day", "tokens_per_month"),
            *("concurrent_answers", "adapter_versions", "stored_bytes", "composed_adapters"),
        ),
        sa.PrimaryKeyConstraint("tenant", "key_id"),
    )


def _create_adapters() -> None:
    op.create_table(
        "adapter_names",
        *_key("tenant", "name"),
        *_required(sa.BigInteger, "last_number"),
        *_required(sa.Double, "created_at"),
    )
    op.create_table(
        "adapter_versions",
        *_key("tenant", "name", "number"),
        *_required(_KEY, "digest"),
        *_required(sa.Integer, "rank"),
        *_required(sa.Text, "target_modules"),
        *_required(sa.BigInteger, "num_bytes"),
        *_optional(sa.BigInteger, "packed_bytes", "blob_bytes", "template_bytes", "defaults_bytes"),
        *_required(sa.Text, "extras_digest"),
        *_required(sa.Double, "created_at"),
        sa.Index("adapter_versions_of_digest", "digest", "tenant"),
        sa.Index(
            "adapter_versions_stored",
            *("tenant", "digest", "blob_bytes", "num_bytes", "template_bytes", "defaults_bytes"),
        ),
    )
    op.create_table(
        "adapter_extras",
        *_key("tenant", "name", "number"),
        *_required(sa.Text, "digest"),
        *_optional(sa.Text, "chat_template", "generation_config"),
    )
    op.create_table(
        "adapter_aliases",
        *_key("tenant", "name", "alias"),
        *_required(sa.Boolean, "follows_pushes"),
        *_required(sa.Text, "history", "salt"),
        *_required(sa.Boolean, "pinned"),
        *_required(sa.Double, "updated_at"),
        sa.Index(
            "adapter_aliases_pinned",
            *("tenant", "name", "alias"),
            sqlite_where=sa.text("pinned = 1"),
            postgresql_where=sa.text("pinned"),
        ),
    )
    op.create_table(
        "adapter_alias_targets",
        *_key("tenant", "name", "alias", "number"),
        *_required(sa.Integer, "percent"),
    )
    op.create_table(
        "adapter_reservations",
        sa.Column("reservation", sa.Text, primary_key=True),
        *_required(_KEY, "digest"),
        *_required(sa.Double, "expires_at"),
        sa.Index("adapter_reservations_of_digest", "digest"),
    )


def _create_usage() -> None:
    op.create_table(
        "usage_records",
        sa.Column("request_id", _KEY, primary_key=True),
        *_required(_KEY, "tenant", "key_id", "adapter"),
        *_required(sa.Double, "ended_at"),
        *_required(sa.Boolean, "is_complete"),
        *_used(),
        *_required(sa.Boolean, "is_batch", server_default=sa.false()),
        sa.Index("usage_records_ended", "ended_at"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "usage_buckets",
        sa.Column("width", sa.Integer),
        sa.Column("tenant", _KEY),
        sa.Column("start", sa.BigInteger),
        sa.Column("key_id", _KEY),
        sa.Column("adapter", _KEY),
        *_required(sa.BigInteger, "num_requests"),
        *_used(),
        *_required(
            sa.BigInteger,
            *("batch_requests", "batch_prompt_tokens", "batch_generated_tokens"),
            server_default=sa.text("0"),
        ),
        sa.PrimaryKeyConstraint("width", "tenant", "start", "key_id", "adapter"),
        sa.Index("usage_buckets_of_all", "width", "start"),
        sqlite_with_rowid=False,
    )


def _create_batches() -> None:
    op.create_table(
        "files",
        sa.Column("file_id", _KEY, primary_key=True),
        *_required(_KEY, "tenant"),
        *_required(sa.Text, "purpose", "filename"),
        *_required(sa.BigInteger, "num_bytes"),
        *_required(sa.Double, "created_at"),
        *_optional(sa.Double, "expires_at"),
        *_required(sa.Boolean, "is_complete"),
        sa.Index("files_of_tenant", "tenant", "file_id"),
        sa.Index("files_expiring", "expires_at"),
    )
    op.create_table(
        "file_pieces",
        *_key("file_id", "number"),
        *_required(_KEY, "tenant", "blob"),
        *_required(sa.BigInteger, "start", "num_bytes"),
        sa.Index("file_pieces_of_tenant", "tenant"),
        sa.Index("file_pieces_of_blob", "blob"),
    )
    op.create_table(
        "batches",
        sa.Column("batch_id", _KEY, primary_key=True),
        *_required(_KEY, "tenant", "key_id"),
        *_required(sa.Text, "endpoint"),
        *_required(_KEY, "input_file_id", "output_file_id", "error_file_id"),
        *_required(sa.Text, "status", "metadata", "errors", "times"),
        *_required(sa.Double, "created_at", "expires_at"),
        *_required(sa.BigInteger, "num_lines", "num_completed", "num_failed"),
        *_required(sa.Text, "lease_owner"),
        *_required(sa.Double, "lease_until"),
        sa.Index("batches_of_tenant", "tenant", "batch_id"),
        sa.Index("batches_by_status", "status", "lease_until"),
    )


def _create_logs() -> None:
    op.create_table(
        "changes",
        sa.Column("change_id", _NUMBER, primary_key=True, autoincrement=True),
        *_required(sa.Text, "nonce", "tenant", "name", "key_id", "orphaned"),
        *_required(sa.Boolean, "moved_pin"),
        *_required(sa.Boolean, "purged", server_default=sa.false()),
        sqlite_autoincrement=True,
    )
    # The change feed must never be empty, so it gets a first row.
    op.get_bind().execute(
        sa.text(
            "INSERT INTO changes (nonce, tenant, name, key_id, orphaned, moved_pin) "
            "VALUES (:nonce, '', '', '', '[]', :moved_pin)"
        ),
        {"nonce": uuid.uuid4().hex, "moved_pin": False},
    )
    op.create_table(
        "audit_log",
        sa.Column("entry_id", _NUMBER, primary_key=True, autoincrement=True),
        *_required(sa.Double, "created_at"),
        *_required(sa.Text, "actor_kind", "actor", "address", "request_id", "action"),
        *_required(_KEY, "tenant"),
        *_required(sa.Text, "target", "details"),
        sa.Index("audit_log_of_tenant", "tenant", "entry_id"),
        sqlite_autoincrement=True,
    )


def _used() -> list[sa.Column[Any]]:
    counts = ("prompt_tokens", "cached_tokens", "generated_tokens", "adapter_bytes")
    return [*_required(sa.BigInteger, *counts), *_required(sa.Double, "page_seconds")]


def _key(*names: str) -> list[sa.schema.SchemaItem]:
    """Returns the columns of a primary key. All are text except `number`."""
    columns = [sa.Column(name, sa.BigInteger if name == "number" else _KEY) for name in names]
    return [*columns, sa.PrimaryKeyConstraint(*names)]


def _required(kind: Any, *names: str, server_default: Any = None) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, nullable=False, server_default=server_default) for name in names]


def _optional(kind: Any, *names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind) for name in names]
