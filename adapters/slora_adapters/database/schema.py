"""The tables of the control plane. All processes that share a database share these tables.

A column `tenant` holds the id of a tenant. The name of a tenant is in no other table.

The migrations in `migrations/versions` create the same tables; a test compares both. Times are Unix times.
"""

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    false,
    text,
)

metadata = MetaData()

# Text that PostgreSQL sorts in byte order, as SQLite does. By default, PostgreSQL sorts by its locale.
_KEY = Text().with_variant(Text(collation="C"), "postgresql")


def _usage_columns() -> list[Column[Any]]:
    return [
        Column("prompt_tokens", BigInteger, nullable=False),
        Column("cached_tokens", BigInteger, nullable=False),
        Column("generated_tokens", BigInteger, nullable=False),
        Column("adapter_bytes", BigInteger, nullable=False),
        Column("page_seconds", Double, nullable=False),
    ]


# This table has one row. id: identifies this control plane, which claims a store of adapters under this id.
# pepper_check: the hash of the empty string with the pepper of API keys; NULL until the first server has started.
# prices: those of tokens, as JSON; NULL if there are none.
platform = Table(
    "platform",
    metadata,
    Column("id", Text, primary_key=True),
    Column("pepper_check", LargeBinary),
    Column("prices", Text),
)

# tenant_id: never changes and is never given to another tenant. name: may change, and may be given to another tenant.
# status: see `TenantStatus`.
tenants = Table(
    "tenants",
    metadata,
    Column("tenant_id", _KEY, primary_key=True),
    Column("name", _KEY, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("weight", Double, nullable=False),
    Column("min_pool_share", Double, nullable=False),
    Column("max_pool_share", Double, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("status", Text, nullable=False, server_default="active"),
    Index("tenants_by_name", "name", unique=True),
)

# The last names of purged tenants, for reports of their usage and for the audit log.
former_tenants = Table(
    "former_tenants",
    metadata,
    Column("tenant_id", _KEY, primary_key=True),
    Column("name", _KEY, nullable=False),
    Column("purged_at", BigInteger, nullable=False),
)

# tenant: NULL for an operator's key. scopes: separated by spaces. models: the allow-list, as a JSON list; NULL permits
# all models. replaced_by: the id of the new key after a rotation.
api_keys = Table(
    "api_keys",
    metadata,
    Column("key_id", _KEY, primary_key=True),
    Column("tenant", _KEY, ForeignKey("tenants.tenant_id")),
    Column("digest", LargeBinary, nullable=False),
    Column("adapter", Text),
    Column("created_at", BigInteger, nullable=False),
    Column("revoked_at", BigInteger),
    Column("name", Text, nullable=False, server_default=""),
    Column(
        "scopes", Text, nullable=False, server_default="adapters:read adapters:write inference usage:read"
    ),
    Column("models", Text),
    Column("expires_at", BigInteger),
    Column("last_used_at", BigInteger),
    Column("replaced_by", Text),
    Index("api_keys_of_tenant", "tenant", "created_at"),
)

# key_id: empty for the quota of the tenant. NULL in a column means no limit; see `slora_api.quotas.quota`.
quotas = Table(
    "quotas",
    metadata,
    Column("tenant", _KEY, ForeignKey("tenants.tenant_id")),
    Column("key_id", _KEY),
    Column("requests_per_minute", BigInteger),
    Column("tokens_per_minute", BigInteger),
    Column("tokens_per_day", BigInteger),
    Column("tokens_per_month", BigInteger),
    Column("concurrent_answers", BigInteger),
    Column("adapter_versions", BigInteger),
    Column("stored_bytes", BigInteger),
    Column("composed_adapters", BigInteger),
    PrimaryKeyConstraint("tenant", "key_id"),
)

adapter_names = Table(
    "adapter_names",
    metadata,
    Column("tenant", _KEY),
    Column("name", _KEY),
    Column("last_number", BigInteger, nullable=False),
    Column("created_at", Double, nullable=False),
    PrimaryKeyConstraint("tenant", "name"),
)

# target_modules: a JSON list. The index `adapter_versions_stored` covers the query of a tenant's stored bytes.
adapter_versions = Table(
    "adapter_versions",
    metadata,
    Column("tenant", _KEY),
    Column("name", _KEY),
    Column("number", BigInteger),
    Column("digest", _KEY, nullable=False),
    Column("rank", Integer, nullable=False),
    Column("target_modules", Text, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    Column("packed_bytes", BigInteger),
    Column("blob_bytes", BigInteger),
    Column("template_bytes", BigInteger),
    Column("defaults_bytes", BigInteger),
    Column("extras_digest", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    PrimaryKeyConstraint("tenant", "name", "number"),
    Index("adapter_versions_of_digest", "digest", "tenant"),
    Index(
        "adapter_versions_stored",
        *("tenant", "digest", "blob_bytes", "num_bytes", "template_bytes", "defaults_bytes"),
    ),
)

# Chat templates and sampling defaults of the versions that have them. Queries that list versions do not read this
# table.
adapter_extras = Table(
    "adapter_extras",
    metadata,
    Column("tenant", _KEY),
    Column("name", _KEY),
    Column("number", BigInteger),
    Column("digest", Text, nullable=False),
    Column("chat_template", Text),
    Column("generation_config", Text),
    PrimaryKeyConstraint("tenant", "name", "number"),
)

# history: the earlier states as JSON; see `encode_states` in `registry/record.py`.
adapter_aliases = Table(
    "adapter_aliases",
    metadata,
    Column("tenant", _KEY),
    Column("name", _KEY),
    Column("alias", _KEY),
    Column("follows_pushes", Boolean, nullable=False),
    Column("history", Text, nullable=False),
    Column("salt", Text, nullable=False),
    Column("pinned", Boolean, nullable=False),
    Column("updated_at", Double, nullable=False),
    PrimaryKeyConstraint("tenant", "name", "alias"),
    Index(
        "adapter_aliases_pinned",
        *("tenant", "name", "alias"),
        sqlite_where=text("pinned = 1"),
        postgresql_where=text("pinned"),
    ),
)

# The versions that an alias points at, each with its percentage of the requests.
adapter_alias_targets = Table(
    "adapter_alias_targets",
    metadata,
    Column("tenant", _KEY),
    Column("name", _KEY),
    Column("alias", _KEY),
    Column("number", BigInteger),
    Column("percent", Integer, nullable=False),
    PrimaryKeyConstraint("tenant", "name", "alias", "number"),
)

adapter_reservations = Table(
    "adapter_reservations",
    metadata,
    Column("reservation", Text, primary_key=True),
    Column("digest", _KEY, nullable=False),
    Column("expires_at", Double, nullable=False),
    Index("adapter_reservations_of_digest", "digest"),
)

# The feed; see `change_feed.py`. It always has at least one row. orphaned: a JSON list of digests. nonce: distinguishes
# this feed from the feed of another database that has the same change ids.
changes = Table(
    "changes",
    metadata,
    Column(
        "change_id",
        BigInteger().with_variant(Integer, "sqlite"),
        primary_key=True,
        autoincrement=True,
    ),
    Column("nonce", Text, nullable=False),
    Column("tenant", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("key_id", Text, nullable=False),
    Column("orphaned", Text, nullable=False),
    Column("moved_pin", Boolean, nullable=False),
    Column("purged", Boolean, nullable=False, server_default=false()),
    sqlite_autoincrement=True,
)

# The usage ledger: one row for each request. It has no foreign keys, because the usage of a tenant outlives the tenant.
# adapter: the digest; empty for the base model. is_complete, is_batch: see `UsageRecord`.
usage_records = Table(
    "usage_records",
    metadata,
    Column("request_id", _KEY, primary_key=True),
    Column("tenant", _KEY, nullable=False),
    Column("key_id", _KEY, nullable=False),
    Column("adapter", _KEY, nullable=False),
    Column("ended_at", Double, nullable=False),
    Column("is_complete", Boolean, nullable=False),
    *_usage_columns(),
    Column("is_batch", Boolean, nullable=False, server_default=false()),
    Index("usage_records_ended", "ended_at"),
    sqlite_with_rowid=False,
)

# Sums over the rows of `usage_records`, written in the same transaction as the rows. width: the length of a bucket in
# seconds. The columns that begin with `batch_` contain the part of each sum that batches used.
usage_buckets = Table(
    "usage_buckets",
    metadata,
    Column("width", Integer),
    Column("tenant", _KEY),
    Column("start", BigInteger),
    Column("key_id", _KEY),
    Column("adapter", _KEY),
    Column("num_requests", BigInteger, nullable=False),
    *_usage_columns(),
    *(
        Column(name, BigInteger, nullable=False, server_default=text("0"))
        for name in ("batch_requests", "batch_prompt_tokens", "batch_generated_tokens")
    ),
    PrimaryKeyConstraint("width", "tenant", "start", "key_id", "adapter"),
    Index("usage_buckets_of_all", "width", "start"),
    sqlite_with_rowid=False,
)

# Files of tenants: the inputs and the answers of batches. purpose: as in OpenAI's API. is_complete: whether all parts
# are written; a file that is not complete is invisible. expires_at: NULL for never.
files = Table(
    "files",
    metadata,
    Column("file_id", _KEY, primary_key=True),
    Column("tenant", _KEY, nullable=False),
    Column("purpose", Text, nullable=False),
    Column("filename", Text, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double),
    Column("is_complete", Boolean, nullable=False),
    Index("files_of_tenant", "tenant", "file_id"),
    Index("files_expiring", "expires_at"),
)

# The content of files: in the order of `number`, `num_bytes` bytes from `start` of the blob's member `content`. The
# store of the adapters has the blobs. Piece n of an answer file is the answer to line n of the input.
file_pieces = Table(
    "file_pieces",
    metadata,
    Column("file_id", _KEY),
    Column("number", BigInteger),
    Column("tenant", _KEY, nullable=False),
    Column("blob", _KEY, nullable=False),
    Column("start", BigInteger, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    PrimaryKeyConstraint("file_id", "number"),
    Index("file_pieces_of_tenant", "tenant"),
    Index("file_pieces_of_blob", "blob"),
)

# status: as in OpenAI's API. metadata, errors, times: JSON; times maps the names of states to Unix times.
# lease_owner: the runner that works on the batch. lease_until: until this time, no other runner may take over the
# batch.
batches = Table(
    "batches",
    metadata,
    Column("batch_id", _KEY, primary_key=True),
    Column("tenant", _KEY, nullable=False),
    Column("key_id", _KEY, nullable=False),
    Column("endpoint", Text, nullable=False),
    Column("input_file_id", _KEY, nullable=False),
    Column("output_file_id", _KEY, nullable=False),
    Column("error_file_id", _KEY, nullable=False),
    Column("status", Text, nullable=False),
    Column("metadata", Text, nullable=False),
    Column("errors", Text, nullable=False),
    Column("times", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
    Column("num_lines", BigInteger, nullable=False),
    Column("num_completed", BigInteger, nullable=False),
    Column("num_failed", BigInteger, nullable=False),
    Column("lease_owner", Text, nullable=False),
    Column("lease_until", Double, nullable=False),
    Index("batches_of_tenant", "tenant", "batch_id"),
    Index("batches_by_status", "status", "lease_until"),
)

# See `audit_log.py`. details: a JSON object. Entries outlive the tenants that they name.
audit_log = Table(
    "audit_log",
    metadata,
    Column(
        "entry_id",
        BigInteger().with_variant(Integer, "sqlite"),
        primary_key=True,
        autoincrement=True,
    ),
    Column("created_at", Double, nullable=False),
    Column("actor_kind", Text, nullable=False),
    Column("actor", Text, nullable=False),
    Column("address", Text, nullable=False),
    Column("request_id", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("tenant", _KEY, nullable=False),
    Column("target", Text, nullable=False),
    Column("details", Text, nullable=False),
    Index("audit_log_of_tenant", "tenant", "entry_id"),
    sqlite_autoincrement=True,
)

# Keys of purged tenants whose usage was erased. The ledger drops usage records of these keys that arrive later.
erased_keys = Table("erased_keys", metadata, Column("key_id", _KEY, primary_key=True))
