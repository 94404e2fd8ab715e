"""Adds the quotas of tenants and API keys.

Revision ID: 0007
"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"

_KEY = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "quotas",
        sa.Column("tenant", _KEY, sa.ForeignKey("tenants.name")),
        sa.Column("key_id", _KEY),
        sa.Column("requests_per_minute", sa.BigInteger),
        sa.Column("tokens_per_minute", sa.BigInteger),
        sa.Column("tokens_per_day", sa.BigInteger),
        sa.Column("tokens_per_month", sa.BigInteger),
        sa.Column("concurrent_answers", sa.BigInteger),
        sa.Column("adapter_versions", sa.BigInteger),
        sa.Column("stored_bytes", sa.BigInteger),
        sa.PrimaryKeyConstraint("tenant", "key_id"),
    )
