"""Adds files and batches, and counts the usage of batches separately.

Revision ID: 0009
"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"

_KEY = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "files",
        sa.Column("file_id", _KEY, primary_key=True),
        sa.Column("tenant", _KEY, nullable=False),
        sa.Column("purpose", sa.Text, nullable=False),
        sa.Column("filename", sa.Text, nullable=False),
        sa.Column("num_bytes", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double),
        sa.Column("is_complete", sa.Boolean, nullable=False),
    )
    op.create_index("files_of_tenant", "files", ["tenant", "file_id"])
    op.create_index("files_expiring", "files", ["expires_at"])
    op.create_table(
        "file_parts",
        sa.Column("file_id", _KEY),
        sa.Column("number", sa.BigInteger),
        sa.Column("tenant", _KEY, nullable=False),
        sa.Column("content", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("file_id", "number"),
    )
    op.create_index("file_parts_of_tenant", "file_parts", ["tenant"])
    op.create_table(
        "batches",
        sa.Column("batch_id", _KEY, primary_key=True),
        *(sa.Column(name, _KEY, nullable=False) for name in ("tenant", "key_id")),
        sa.Column("endpoint", sa.Text, nullable=False),
        *(
            sa.Column(name, _KEY, nullable=False)
            for name in ("input_file_id", "output_file_id", "error_file_id")
        ),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("status", "metadata", "errors", "times")),
        *(sa.Column(name, sa.Double, nullable=False) for name in ("created_at", "expires_at")),
        *(
            sa.Column(name, sa.BigInteger, nullable=False)
            for name in ("num_lines", "num_completed", "num_failed")
        ),
        sa.Column("lease_owner", sa.Text, nullable=False),
        sa.Column("lease_until", sa.Double, nullable=False),
    )
    op.create_index("batches_of_tenant", "batches", ["tenant", "batch_id"])
    op.create_index("batches_by_status", "batches", ["status", "lease_until"])
    op.add_column(
        "usage_records", sa.Column("is_batch", sa.Boolean, nullable=False, server_default=sa.false())
    )
    for name in ("batch_requests", "batch_prompt_tokens", "batch_generated_tokens"):
        op.add_column(
            "usage_buckets",
            sa.Column(name, sa.BigInteger, nullable=False, server_default=sa.text("0")),
        )
