"""Adds the prices of tokens.

Revision ID: 3
"""

import sqlalchemy as sa
from alembic import op

revision = "3"
down_revision = "2"


def upgrade() -> None:
    op.add_column("platform", sa.Column("prices", sa.Text))
