"""Adds a column to the change feed, which reports that a tenant was purged.

Revision ID: 0006
"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.add_column("changes", sa.Column("purged", sa.Boolean(), nullable=False, server_default=sa.false()))
