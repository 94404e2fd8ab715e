"""Tenants and their API keys.

A tenant is a name; a key belongs to one tenant and may carry the name of its default adapter. Keys are kept as
hashes and read from the database at each request (some ten microseconds), so a revocation holds for the very next
one, in every process that shares the database.

Methods block on the disk: those that write are called off the event loop. Knows no HTTP.
"""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from sqlite3 import IntegrityError

from slora_adapters.database import Database
from slora_api.api_key import NewKey, Pepper, make_key, read_key_id
from slora_api.errors import BadRequest, Conflict, NotFound

__all__ = ["KeyRecord", "Tenancy", "Tenant", "check_name"]

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}", re.ASCII)

_MIGRATIONS = (
    """
    CREATE TABLE tenants (
        name TEXT PRIMARY KEY,
        created_at INTEGER NOT NULL
    ) STRICT;
    CREATE TABLE api_keys (
        key_id TEXT PRIMARY KEY,
        tenant TEXT NOT NULL REFERENCES tenants (name),
        digest BLOB NOT NULL,
        adapter TEXT,
        created_at INTEGER NOT NULL,
        revoked_at INTEGER
    ) STRICT;
    CREATE INDEX api_keys_by_tenant ON api_keys (tenant, created_at);
    """,
)


def check_name(name: str, param: str) -> str:
    """The name, if it can be one of a tenant or an adapter. Raises BadRequest naming `param`."""
    if not _NAME.fullmatch(name):
        raise BadRequest(
            f"`{param}` is {name[:140]!r}; a name has 1 to 128 of a-z, 0-9, '.', '_', '-' and starts with a letter "
            "or digit.",
            param,
        )
    return name


@dataclass(frozen=True, slots=True)
class Tenant:
    """created_at: seconds since 1970."""

    name: str
    created_at: int


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """A key without its secret. adapter: what `model="default"` means for it; None is the base model."""

    key_id: str
    tenant: str
    adapter: str | None
    created_at: int
    revoked_at: int | None


_KEY_COLUMNS = "key_id, tenant, adapter, created_at, revoked_at"


class Tenancy:
    """Tenants and keys in the shared database."""

    def __init__(self, database: Database, pepper: Pepper) -> None:
        self._database = database
        self._pepper = pepper
        # Compared with when there is no such key, so that a wrong id takes as long as a wrong secret.
        self._no_digest = pepper.digest("")
        database.migrate("tenancy", _MIGRATIONS)

    def create_tenant(self, name: str) -> Tenant:
        """Raises BadRequest for a name that cannot be one, Conflict for one that is taken."""
        tenant = Tenant(check_name(name, "name"), int(time.time()))
        try:
            with self._database.transaction() as connection:
                connection.execute("INSERT INTO tenants VALUES (?, ?)", (tenant.name, tenant.created_at))
        except IntegrityError:
            raise Conflict(f"The tenant `{name}` exists already.") from None
        return tenant

    def list_tenants(self) -> Sequence[Tenant]:
        rows = self._database.read("SELECT name, created_at FROM tenants ORDER BY name")
        return [Tenant(*row) for row in rows]

    def create_key(self, tenant: str, adapter: str | None = None) -> tuple[KeyRecord, NewKey]:
        """Makes a key; its secret is in the second value and nowhere else. Raises NotFound or BadRequest."""
        if adapter is not None:
            check_name(adapter, "adapter")
        self._check_tenant(tenant)
        key = make_key()
        record = KeyRecord(key.key_id, tenant, adapter, int(time.time()), None)
        self._insert(record, key.secret)
        return record, key

    def adopt_key(self, tenant: str, adapter: str | None, secret: str) -> KeyRecord:
        """Makes a key that was drawn earlier valid; one that is known stays what it is, revoked ones too."""
        key_id = read_key_id(secret)
        if key_id is None:
            raise BadRequest("The text is not one of our keys.")
        record = KeyRecord(key_id, tenant, adapter, int(time.time()), None)
        self._insert(record, secret)
        return record

    def list_keys(self, tenant: str) -> Sequence[KeyRecord]:
        """Raises NotFound for an unknown tenant."""
        self._check_tenant(tenant)
        rows = self._database.read(
            f"SELECT {_KEY_COLUMNS} FROM api_keys WHERE tenant = ? ORDER BY created_at, key_id", (tenant,)
        )
        return [KeyRecord(*row) for row in rows]

    def revoke_key(self, key_id: str) -> None:
        """From now on the key opens nothing; revoking it again changes nothing. Raises NotFound."""
        with self._database.transaction() as connection:
            changed = connection.execute(
                "UPDATE api_keys SET revoked_at = coalesce(revoked_at, ?) WHERE key_id = ?",
                (int(time.time()), key_id),
            ).rowcount
        if not changed:
            raise NotFound(f"There is no key `{key_id[:64]}`.")

    def authenticate(self, secret: str) -> KeyRecord | None:
        """The key that `secret` is, if it is one, is known and is not revoked."""
        key_id = read_key_id(secret)
        rows = self._database.read(
            f"SELECT digest, {_KEY_COLUMNS} FROM api_keys WHERE key_id = ? AND revoked_at IS NULL", (key_id,)
        )
        stored, record = (rows[0][0], KeyRecord(*rows[0][1:])) if rows else (self._no_digest, None)
        return record if self._pepper.matches(secret, stored) else None

    def _insert(self, record: KeyRecord, secret: str) -> None:
        with self._database.transaction() as connection:
            connection.execute(
                "INSERT INTO api_keys (key_id, tenant, digest, adapter, created_at) VALUES (?, ?, ?, ?, ?) "
                "ON CONFLICT DO NOTHING",
                (
                    record.key_id,
                    record.tenant,
                    self._pepper.digest(secret),
                    record.adapter,
                    record.created_at,
                ),
            )

    def _check_tenant(self, name: str) -> None:
        if not self._database.read("SELECT 1 FROM tenants WHERE name = ?", (name,)):
            raise NotFound(f"There is no tenant `{name[:128]}`.")
