"""Tenants and their API keys.

A tenant is a name with a share of the engine. A key belongs to one tenant and may have a default adapter: a name, or
`name@alias`, which is resolved at each request. Keys are stored as hashes. A key and its tenant's share are read from
the database at each request, which takes some ten microseconds. A revocation or a new share therefore applies to the
next request, in every process that shares the database.

A revocation also takes effect when the database cannot be written, for example on a full disk. It is first written to a
journal that needs no free space and that every process of the host reads at each request. It stays there until the
database has it.

Methods block on the disk, so those that write must not be called on the event loop. This module does not depend on
HTTP.
"""

import logging
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from sqlite3 import Connection, IntegrityError
from typing import Any

from slora.request import MAX_PRIORITY
from slora.tenant_share import DEFAULT_SHARE, TenantShare
from slora_adapters.database.database import Database
from slora_adapters.errors import BadAdapterName, DiskFull, StoreUnavailable, TryAgain
from slora_adapters.registry.reference import parse_reference
from slora_api.errors import BadRequest, Conflict, NotFound
from slora_api.tenants.api_key import NewKey, Pepper, make_key, read_key_id
from slora_api.tenants.revocation_journal import RevocationJournal

__all__ = ["KeyRecord", "ShareChanges", "Tenant", "TenantStore", "check_name"]

logger = logging.getLogger(__name__)

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
    """
    ALTER TABLE tenants ADD COLUMN weight REAL NOT NULL DEFAULT 1;
    ALTER TABLE tenants ADD COLUMN min_pool_share REAL NOT NULL DEFAULT 0;
    ALTER TABLE tenants ADD COLUMN max_pool_share REAL NOT NULL DEFAULT 1;
    ALTER TABLE tenants ADD COLUMN priority INTEGER NOT NULL DEFAULT 0;
    """,
)


def check_name(name: str, param: str) -> str:
    """Returns the name if it is valid for a tenant. Raises BadRequest naming `param`."""
    if not _NAME.fullmatch(name):
        raise BadRequest(
            f"`{param}` is {name[:140]!r}; a name has 1 to 128 characters of a-z, 0-9, '.', '_' and "
            "'-', and starts with a letter or digit.",
            param,
        )
    return name


def _check_reference(adapter: str) -> None:
    """Raises BadRequest if the text is not a reference to an adapter."""
    try:
        parse_reference(adapter)
    except BadAdapterName as error:
        raise BadRequest(f"`adapter`: {error}.", "adapter") from None


# A tenant with a larger weight would in effect have the engine alone; one with a smaller weight would never be served.
_LEAST_WEIGHT, _MAX_WEIGHT = 0.001, 1000.0
# Tolerance for rounding errors in the sum of all tenants' `min_pool_share`, such as 0.7 + 0.2 + 0.1.
_SUM_SLACK = 1e-9


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant and its share. created_at: Unix time in seconds."""

    name: str
    created_at: int
    share: TenantShare


@dataclass(frozen=True, slots=True)
class ShareChanges:
    """Changes of a tenant's share. A field that is None keeps its value. The fields are named as in the operator's API.

    min_pool_share, max_pool_share: fractions of the pool's pages, `min_share` and `max_share` of a TenantShare.
    """

    weight: float | None = None
    min_pool_share: float | None = None
    max_pool_share: float | None = None
    priority: int | None = None

    def apply(self, share: TenantShare) -> TenantShare:
        """Returns the changed share. Raises BadRequest naming the field, its value and the limit."""
        self._check_range("weight", _LEAST_WEIGHT, _MAX_WEIGHT)
        self._check_range("min_pool_share", 0, 1)
        self._check_range("max_pool_share", 0, 1)
        self._check_range("priority", -MAX_PRIORITY, MAX_PRIORITY)
        floor = share.min_share if self.min_pool_share is None else self.min_pool_share
        ceiling = share.max_share if self.max_pool_share is None else self.max_pool_share
        if floor > ceiling:
            raise BadRequest(
                f"`min_pool_share` would be {floor:g}, which is more than `max_pool_share` "
                f"({ceiling:g}); lower `min_pool_share` or raise `max_pool_share`.",
                "min_pool_share" if self.max_pool_share is None else "max_pool_share",
            )
        weight = share.weight if self.weight is None else self.weight
        return TenantShare(weight, floor, ceiling, share.priority if self.priority is None else self.priority)

    def _check_range(self, name: str, least: float, most: float) -> None:
        value = getattr(self, name)
        if value is not None and not least <= value <= most:
            raise BadRequest(f"`{name}` is {value}; it must be from {least:g} to {most:g}.", name)


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """An API key without its secret.

    adapter: the default adapter, which `model="default"` selects; None selects the base model.
    share: the tenant's share when the key was read.
    """

    key_id: str
    tenant: str
    adapter: str | None
    created_at: int
    revoked_at: int | None
    share: TenantShare


_SHARE_COLUMNS = "weight, min_pool_share, max_pool_share, priority"
_KEY_COLUMNS = f"key_id, tenant, adapter, api_keys.created_at, revoked_at, {_SHARE_COLUMNS}"
_KEYS = "FROM api_keys JOIN tenants ON tenants.name = api_keys.tenant"


class TenantStore:
    """Tenants and keys in the shared database. journal: the revocation journal of this host."""

    def __init__(self, database: Database, pepper: Pepper, journal: RevocationJournal) -> None:
        self._database = database
        self._pepper = pepper
        self._journal = journal
        # An unknown key id is compared with this digest, so that it takes as long as a wrong secret.
        self._no_digest = pepper.digest("")
        database.migrate("tenancy", _MIGRATIONS)

    def create_tenant(self, name: str, changes: ShareChanges | None = None) -> Tenant:
        """Creates a tenant whose share is the default with `changes` applied.

        Raises BadRequest for an invalid name or share, and Conflict for a name that is taken.
        """
        share = DEFAULT_SHARE if changes is None else changes.apply(DEFAULT_SHARE)
        tenant = Tenant(check_name(name, "name"), int(time.time()), share)
        try:
            with self._database.transaction() as connection:
                connection.execute(
                    "INSERT INTO tenants (name, created_at) VALUES (?, ?)", (tenant.name, tenant.created_at)
                )
                _write_share(connection, tenant)
        except IntegrityError:
            raise Conflict(f"The tenant `{name}` already exists.") from None
        return tenant

    def change_share(
        self,
        name: str,
        changes: ShareChanges,
        check: Callable[[TenantShare, Tenant], None] = lambda before, tenant: None,
    ) -> Tenant:
        """Changes a tenant's share from its next request on.

        check: called with the old share and the changed tenant. If it raises, the share stays as it is.

        Raises NotFound, or BadRequest naming the field.
        """
        with self._database.transaction() as connection:
            before = _find_tenant(connection.execute(_ONE_TENANT, (name,)).fetchall(), name)
            tenant = replace(before, share=changes.apply(before.share))
            check(before.share, tenant)
            _write_share(connection, tenant)
        return tenant

    def find_tenant(self, name: str) -> Tenant:
        """Raises NotFound."""
        return _find_tenant(self._database.read(_ONE_TENANT, (name,)), name)

    def list_tenants(self) -> Sequence[Tenant]:
        return [_read_tenant(row) for row in self._database.read(f"{_TENANTS} ORDER BY name")]

    def create_key(self, tenant: str, adapter: str | None = None) -> tuple[KeyRecord, NewKey]:
        """Creates a key. Only the second value contains the secret. Raises NotFound or BadRequest."""
        if adapter is not None:
            _check_reference(adapter)
        share = self.find_tenant(tenant).share
        key = make_key()
        record = KeyRecord(key.key_id, tenant, adapter, int(time.time()), None, share)
        self._insert(record, key.secret)
        return record, key

    def import_key(self, tenant: str, adapter: str | None, secret: str) -> KeyRecord:
        """Makes a key valid that was generated earlier. A key that the database has already stays as it is, even if it
        is revoked.

        Raises NotFound for an unknown tenant, and BadRequest for a text that is not a key.
        """
        key_id = read_key_id(secret)
        if key_id is None:
            raise BadRequest("The text is not an API key of slora.")
        share = self.find_tenant(tenant).share
        record = KeyRecord(key_id, tenant, adapter, int(time.time()), None, share)
        self._insert(record, secret)
        return record

    def list_keys(self, tenant: str) -> Sequence[KeyRecord]:
        """Raises NotFound for an unknown tenant."""
        self.find_tenant(tenant)
        rows = self._database.read(
            f"SELECT {_KEY_COLUMNS} {_KEYS} WHERE tenant = ? ORDER BY api_keys.created_at, key_id", (tenant,)
        )
        return [self._with_pending(_read_key(row)) for row in rows]

    def revoke_key(self, key_id: str) -> None:
        """Revokes a key at once. Revoking it again is a no-op.

        Raises NotFound. Raises TryAgain if neither the database nor the journal could be written. The revocation then
        applies in this process only, which keeps trying to write it. A restart before that would lose it.
        """
        if not self._database.read("SELECT 1 FROM api_keys WHERE key_id = ?", (key_id,)):
            raise NotFound(f"There is no key `{key_id[:64]}`.")
        is_kept = self._journal.add(key_id)
        try:
            self._write_revocations((key_id,))
        except StoreUnavailable as error:
            logger.error(
                "key %s is revoked, but the revocation is not in the database yet: %s", key_id, error
            )
            if not is_kept:
                raise TryAgain(
                    f"key {key_id} is revoked in this process, but the revocation could not be "
                    f"written ({error}). A restart would make the key valid again, so revoke it again "
                    "later."
                ) from error

    def write_pending_revocations(self) -> None:
        """Writes the journal's entries to the database. Raises StoreUnavailable."""
        if pending := self._journal.pending():
            self._write_revocations(sorted(pending))
            logger.info("%d pending revocations were written to the database", len(pending))

    def _write_revocations(self, key_ids: Sequence[str]) -> None:
        try:
            self._mark_revoked(key_ids)
        except DiskFull:
            if not self._database.free_reserve():
                raise
            self._mark_revoked(key_ids)
        self._journal.remove(key_ids)

    def _mark_revoked(self, key_ids: Sequence[str]) -> None:
        with self._database.transaction(even_if_full=True) as connection:
            connection.executemany(
                "UPDATE api_keys SET revoked_at = coalesce(revoked_at, ?) WHERE key_id = ?",
                [(int(time.time()), key_id) for key_id in key_ids],
            )

    def authenticate(self, secret: str) -> KeyRecord | None:
        """Returns the record of the key `secret` if it is well-formed, known and not revoked, else None."""
        key_id = read_key_id(secret)
        rows = self._database.read(
            f"SELECT digest, {_KEY_COLUMNS} {_KEYS} WHERE key_id = ? AND revoked_at IS NULL", (key_id,)
        )
        if key_id is not None and key_id in self._journal:
            rows = []
        stored, record = (rows[0][0], _read_key(rows[0][1:])) if rows else (self._no_digest, None)
        return record if self._pepper.matches(secret, stored) else None

    def _with_pending(self, record: KeyRecord) -> KeyRecord:
        """Marks a key as revoked if only the journal has its revocation. The journal has no times, so the current time
        is used.
        """
        if record.revoked_at is None and record.key_id in self._journal:
            return replace(record, revoked_at=int(time.time()))
        return record

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


_TENANTS = f"SELECT name, created_at, {_SHARE_COLUMNS} FROM tenants"
_ONE_TENANT = f"{_TENANTS} WHERE name = ?"


def _read_tenant(row: tuple[Any, ...]) -> Tenant:
    name, created_at, *share = row
    return Tenant(name, created_at, TenantShare(*share))


def _find_tenant(rows: Sequence[tuple[Any, ...]], name: str) -> Tenant:
    if not rows:
        raise NotFound(f"There is no tenant `{name[:128]}`.")
    return _read_tenant(rows[0])


def _read_key(row: tuple[Any, ...]) -> KeyRecord:
    key_id, tenant, adapter, created_at, revoked_at, *share = row
    return KeyRecord(key_id, tenant, adapter, created_at, revoked_at, TenantShare(*share))


def _write_share(connection: Connection, tenant: Tenant) -> None:
    """Raises BadRequest if the floors of all tenants would exceed the whole pool."""
    share = tenant.share
    connection.execute(
        "UPDATE tenants SET weight = ?, min_pool_share = ?, max_pool_share = ?, priority = ? WHERE name = ?",
        (share.weight, share.min_share, share.max_share, share.priority, tenant.name),
    )
    floors = [floor for (floor,) in connection.execute("SELECT min_pool_share FROM tenants")]
    if (total := math.fsum(floors)) > 1 + _SUM_SLACK:
        left = max(0.0, 1 - (total - share.min_share))
        raise BadRequest(
            f"`min_pool_share` is {share.min_share:g}, but the shares of other tenants leave only "
            f"{left:g} of the pool; lower this share, or theirs.",
            "min_pool_share",
        )
