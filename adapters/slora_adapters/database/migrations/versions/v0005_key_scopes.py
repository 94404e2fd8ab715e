"""Adds scopes, allow-lists, expiry and rotation of API keys, and adds operators' keys, which have no tenant.

The server defaults apply to keys of the previous release, including keys that it creates during a rolling upgrade.

Revision ID: 0005
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    # On SQLite this copies the table, because SQLite cannot make a column nullable.
    with op.batch_alter_table("api_keys") as table:
        table.alter_column("tenant", existing_type=sa.Text(), nullable=True)
        table.add_column(sa.Column("name", sa.Text, nullable=False, server_default=""))
        table.add_column(
            sa.Column(
                "scopes",
                sa.Text,
                nullable=False,
                server_default="adapters:read adapters:write inference usage:read",
            )
        )
        table.add_column(sa.Column("models", sa.Text))
        table.add_column(sa.Column("expires_at", sa.BigInteger))
        table.add_column(sa.Column("last_used_at", sa.BigInteger))
        table.add_column(sa.Column("replaced_by", sa.Text))
