"""The registry's SQLite tables, as a list of migrations. A migration that has been released is never edited."""

from slora_adapters.registry.adapter_record import digest_extras

MIGRATIONS = (
    """
    CREATE TABLE adapters (
        tenant TEXT NOT NULL,
        name TEXT NOT NULL,
        digest TEXT NOT NULL,
        rank INTEGER NOT NULL,
        target_modules TEXT NOT NULL,
        num_bytes INTEGER NOT NULL,
        chat_template TEXT,
        generation_config TEXT,
        created_at REAL NOT NULL,
        updated_at REAL NOT NULL,
        PRIMARY KEY (tenant, name)
    ) STRICT;
    CREATE INDEX adapters_by_digest ON adapters (digest, tenant);
    CREATE TABLE adapter_reservations (
        reservation TEXT PRIMARY KEY,
        digest TEXT NOT NULL,
        expires_at REAL NOT NULL
    ) STRICT;
    CREATE INDEX adapter_reservations_by_digest ON adapter_reservations (digest);
    """,
    """
    ALTER TABLE adapters ADD COLUMN packed_bytes INTEGER;
    ALTER TABLE adapters ADD COLUMN pinned INTEGER NOT NULL DEFAULT 0;
    CREATE INDEX adapters_pinned ON adapters (tenant, name) WHERE pinned;
    """,
    # A name has numbered versions, and aliases that point at them. The existing adapter of a name becomes its version
    # 1.
    """
    CREATE TABLE adapter_names (
        tenant TEXT NOT NULL,
        name TEXT NOT NULL,
        last_number INTEGER NOT NULL,
        created_at REAL NOT NULL,
        PRIMARY KEY (tenant, name)
    ) STRICT;
    CREATE TABLE adapter_versions (
        tenant TEXT NOT NULL,
        name TEXT NOT NULL,
        number INTEGER NOT NULL,
        digest TEXT NOT NULL,
        rank INTEGER NOT NULL,
        target_modules TEXT NOT NULL,
        num_bytes INTEGER NOT NULL,
        packed_bytes INTEGER,
        chat_template TEXT,
        generation_config TEXT,
        created_at REAL NOT NULL,
        PRIMARY KEY (tenant, name, number)
    ) STRICT;
    CREATE INDEX adapter_versions_by_digest ON adapter_versions (digest, tenant);
    CREATE TABLE adapter_aliases (
        tenant TEXT NOT NULL,
        name TEXT NOT NULL,
        alias TEXT NOT NULL,
        targets TEXT NOT NULL,
        follows_pushes INTEGER NOT NULL,
        history TEXT NOT NULL,
        salt TEXT NOT NULL,
        pinned INTEGER NOT NULL,
        updated_at REAL NOT NULL,
        PRIMARY KEY (tenant, name, alias)
    ) STRICT;
    CREATE INDEX adapter_aliases_pinned ON adapter_aliases (tenant, name, alias) WHERE pinned;
    INSERT INTO adapter_names SELECT tenant, name, 1, created_at FROM adapters;
    INSERT INTO adapter_versions
        SELECT tenant, name, 1, digest, rank, target_modules, num_bytes, packed_bytes, chat_template,
            generation_config, updated_at
        FROM adapters;
    INSERT INTO adapter_aliases
        SELECT tenant, name, 'latest', '{"1": 100}', 1, '[]', lower(hex(randomblob(16))), pinned, updated_at
        FROM adapters;
    DROP TABLE adapters;
    """,
    # The feed: one row per change, for other processes. The nonce distinguishes this feed from the feed of another
    # database that has the same change ids. The table always has at least one row.
    """
    CREATE TABLE adapter_changes (
        change_id INTEGER PRIMARY KEY AUTOINCREMENT,
        nonce TEXT NOT NULL,
        tenant TEXT NOT NULL,
        name TEXT NOT NULL,
        orphaned TEXT NOT NULL,
        moved_pin INTEGER NOT NULL
    ) STRICT;
    INSERT INTO adapter_changes (nonce, tenant, name, orphaned, moved_pin)
        VALUES (lower(hex(randomblob(16))), '', '', '[]', 0);
    """,
    # The registry's id, under which it claims a store.
    """
    CREATE TABLE adapter_registry (registry TEXT NOT NULL) STRICT;
    INSERT INTO adapter_registry VALUES (lower(hex(randomblob(16))));
    """,
    # The texts of extras move to a table of their own, so that listing versions does not read them. Their sizes stay
    # with the version.
    """
    CREATE TABLE adapter_extras (
        tenant TEXT NOT NULL,
        name TEXT NOT NULL,
        number INTEGER NOT NULL,
        digest TEXT NOT NULL,
        chat_template TEXT,
        generation_config TEXT,
        PRIMARY KEY (tenant, name, number)
    ) STRICT;
    INSERT INTO adapter_extras
        SELECT tenant, name, number, digest_extras(chat_template, generation_config), chat_template, generation_config
        FROM adapter_versions WHERE chat_template IS NOT NULL OR generation_config IS NOT NULL;
    ALTER TABLE adapter_versions ADD COLUMN blob_bytes INTEGER;
    ALTER TABLE adapter_versions ADD COLUMN template_bytes INTEGER;
    ALTER TABLE adapter_versions ADD COLUMN defaults_bytes INTEGER;
    ALTER TABLE adapter_versions ADD COLUMN extras_digest TEXT NOT NULL DEFAULT '';
    UPDATE adapter_versions SET
        template_bytes = length(CAST(chat_template AS BLOB)),
        defaults_bytes = length(CAST(generation_config AS BLOB)),
        extras_digest = digest_extras(chat_template, generation_config);
    ALTER TABLE adapter_versions DROP COLUMN chat_template;
    ALTER TABLE adapter_versions DROP COLUMN generation_config;
    CREATE INDEX adapter_versions_held ON adapter_versions
        (tenant, digest, blob_bytes, num_bytes, template_bytes, defaults_bytes);
    """,
)
# SQL functions that the migrations call.
FUNCTIONS = {"digest_extras": digest_extras}
