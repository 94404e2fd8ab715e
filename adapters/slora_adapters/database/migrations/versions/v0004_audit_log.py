"""Adds the audit log.

Revision ID: 0004
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

_KEY = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
_TEXTS = ("actor_kind", "actor", "address", "request_id", "action")


def upgrade() -> None:
    number = sa.BigInteger().with_variant(sa.Integer, "sqlite")
    op.create_table(
        "audit_log",
        sa.Column("entry_id", number, primary_key=True, autoincrement=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        *(sa.Column(name, sa.Text(), nullable=False) for name in _TEXTS),
        sa.Column("tenant", _KEY, nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("details", sa.Text(), nullable=False),
        sa.Index("audit_log_of_tenant", "tenant", "entry_id"),
        sqlite_autoincrement=True,
    )
