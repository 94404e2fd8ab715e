"""Adds a table of erased keys, so that the usage of a purged tenant stays erased.

Revision ID: 0008
"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"

_KEY = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table("erased_keys", sa.Column("key_id", _KEY, primary_key=True))
