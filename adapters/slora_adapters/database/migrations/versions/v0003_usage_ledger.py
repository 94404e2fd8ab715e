"""Adds the usage ledger: one row for each request, and the sums of these rows by minute, hour and day.

Revision ID: 0003
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

_KEY = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "usage_records",
        sa.Column("request_id", _KEY, primary_key=True),
        sa.Column("tenant", _KEY, nullable=False),
        sa.Column("key_id", _KEY, nullable=False),
        sa.Column("adapter", _KEY, nullable=False),
        sa.Column("ended_at", sa.Double, nullable=False),
        sa.Column("is_complete", sa.Boolean, nullable=False),
        *_usage_columns(),
        sqlite_with_rowid=False,
    )
    op.create_index("usage_records_ended", "usage_records", ["ended_at"])
    op.create_table(
        "usage_buckets",
        sa.Column("width", sa.Integer),
        sa.Column("tenant", _KEY),
        sa.Column("start", sa.BigInteger),
        sa.Column("key_id", _KEY),
        sa.Column("adapter", _KEY),
        sa.Column("num_requests", sa.BigInteger, nullable=False),
        *_usage_columns(),
        sa.PrimaryKeyConstraint("width", "tenant", "start", "key_id", "adapter"),
        sqlite_with_rowid=False,
    )
    op.create_index("usage_buckets_of_all", "usage_buckets", ["width", "start"])


def _usage_columns() -> list[sa.Column[Any]]:
    return [
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("cached_tokens", sa.BigInteger, nullable=False),
        sa.Column("generated_tokens", sa.BigInteger, nullable=False),
        sa.Column("adapter_bytes", sa.BigInteger, nullable=False),
        sa.Column("page_seconds", sa.Double, nullable=False),
    ]
