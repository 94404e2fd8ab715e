"""Adds a quota on the number of adapters that one request may combine.

Revision ID: 0010
"""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.add_column("quotas", sa.Column("composed_adapters", sa.BigInteger))
