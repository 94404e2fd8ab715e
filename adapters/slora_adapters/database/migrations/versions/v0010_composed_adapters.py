"""A quota limits the adapters that one request adds up.

Revision ID: 0010
"""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.add_column("quotas", sa.Column("composed_adapters", sa.BigInteger))
