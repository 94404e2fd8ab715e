"""Adds the status of tenants, so that a tenant can be suspended.

Revision ID: 0002
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("tenants", sa.Column("status", sa.Text(), nullable=False, server_default="active"))
