"""Creates, rotates, lists and revokes the API keys of tenants and operators.

A tenant's key may have a default adapter: a name, or `name@alias`, which is resolved at each request.

Methods block on the database. This module does not depend on HTTP.
"""

import logging
from collections.abc import Sequence, Set
from dataclasses import replace
from typing import Any

from sqlalchemy import Select, insert, tuple_, update

from slora.core.request import TenantShare
from slora_adapters.database import schema
from slora_adapters.database.audit_log import Actor, current_actor, record_change
from slora_adapters.database.change_feed import Change, publish
from slora_adapters.database.database import CHANGES
from slora_adapters.errors import BadAdapterName, StoreUnavailable, TryAgain
from slora_adapters.registry.record import parse_reference
from slora_api.core.errors import BadRequest, KeyConflict, NotFound
from slora_api.keys.key_record import (
    BOOTSTRAP_KEY_ID,
    DEFAULT_SCOPES,
    KEY_EXISTS,
    KEY_POSITION,
    KEYS_OF_TENANT,
    ONE_KEY,
    OPERATOR_KEYS,
    TERMS,
    AllowList,
    Caller,
    GeneratedKey,
    KeyRecord,
    OperatorKey,
    Scope,
    TenantStatus,
    copy_quota,
    describe_grant,
    make_key,
    make_record,
    make_row,
    read_key_id,
)
from slora_api.keys.key_store import KeyStore

logger = logging.getLogger(__name__)

_MAX_NAME_CHARS = 128
# 30 days. A rotated key that is forgotten should not stay valid for longer.
MAX_OVERLAP_S = 30 * 86_400
# Year 9999. A larger number is most likely a time in milliseconds.
_MAX_TIME = 253_402_300_799

_k = schema.api_keys.c


class KeyAdmin:
    """Changes the keys of `store`. A process has one, which knows who revoked the keys of the journal."""

    def __init__(self, store: KeyStore) -> None:
        self._store = store
        # Key id -> the actor of a revocation that is not in the database yet.
        self._revokers: dict[str, Actor] = {}

    def create_key(
        self,
        tenant: str,
        adapter: str | None = None,
        *,
        name: str = "",
        scopes: Set[Scope] = DEFAULT_SCOPES,
        models: AllowList | None = None,
        expires_at: int | None = None,
    ) -> tuple[KeyRecord, GeneratedKey]:
        """Creates a key of a tenant. Returns its record and its secret. Raises NotFound or BadRequest."""
        if adapter is not None:
            _check_reference(adapter)
        _check_name(name)
        self._check_expiry(expires_at)
        key = make_key()
        record = self._new_record(key.key_id, tenant, adapter)
        record = replace(
            record,
            name=name,
            scopes=frozenset(scopes),
            models=models,
            expires_at=expires_at,
        )
        self._insert("key.create", record, key.secret)
        return record, key

    def create_operator_key(
        self, name: str, expires_at: int | None = None, scopes: Set[Scope] = frozenset({Scope.ADMIN})
    ) -> tuple[OperatorKey, GeneratedKey]:
        """Creates a key of an operator. Returns its record and its secret. Raises BadRequest."""
        if not name:
            raise BadRequest("`name` is empty; name the person or program that gets the key.", "name")
        _check_name(name)
        self._check_expiry(expires_at)
        key = make_key()
        record = OperatorKey(key.key_id, name, self._now(), expires_at, scopes=frozenset(scopes))
        self._insert("key.create", record, key.secret)
        return record, key

    def has_operator_key(self) -> bool:
        """Whether there is a valid key with the scope `admin`, besides the bootstrap key."""
        return bool(self._valid_operator_keys())

    def import_key(self, tenant: str, adapter: str | None, secret: str) -> KeyRecord:
        """Adds a key that was generated earlier. If the database already has the key, it stays unchanged, even if it is
        revoked.

        Raises NotFound for an unknown tenant, and BadRequest for a string that is not a key.
        """
        key_id = read_key_id(secret)
        if key_id is None:
            raise BadRequest("The text is not an API key of slora.")
        record = self._new_record(key_id, tenant, adapter)
        self._insert("key.import", record, secret)
        return record

    def rotate_key(
        self, key_id: str, overlap_s: int, expires_at: int | None = None
    ) -> tuple[Caller, GeneratedKey]:
        """Creates a key with the same permissions and limits as `key_id`. The old key expires after `overlap_s`. Its
        use does not count towards the limits of the new key. Returns the record and the secret of the new key.

        expires_at: when the new key expires. None: the new key gets the same lifetime as the old key had when it was
        created.

        Raises NotFound, BadRequest, and KeyConflict for a key that is revoked, expired or rotated already.
        """
        if not 0 <= overlap_s <= MAX_OVERLAP_S:
            raise BadRequest(
                f"`overlap_seconds` is {overlap_s}; it must be from 0 to {MAX_OVERLAP_S}. To end a leaked key at once, "
                "revoke it.",
                "overlap_seconds",
            )
        self._check_expiry(expires_at)
        _check_in_database(key_id)
        key, now = make_key(), self._now()
        with self._store.database.transaction(CHANGES) as connection:
            rows = connection.execute(ONE_KEY, {"key_id": key_id}).fetchall()
            if not rows:
                raise NotFound.of_key(key_id)
            old = make_record(rows[0])
            self._check_rotatable(old)
            if expires_at is None and old.expires_at is not None:
                expires_at = now + old.expires_at - old.created_at
            new = replace(old, key_id=key.key_id, created_at=now, expires_at=expires_at, last_used_at=None)
            connection.execute(insert(schema.api_keys), make_row(new, self._store.pepper.digest(key.secret)))
            copy_quota(connection, key_id, new.key_id)
            end = now + overlap_s if old.expires_at is None else min(now + overlap_s, old.expires_at)
            connection.execute(
                update(schema.api_keys)
                .where(_k.key_id == key_id)
                .values(expires_at=end, replaced_by=new.key_id)
            )
            publish(connection, Change(old.tenant or "", key_id=key_id))
            details = {"replaced_by": new.key_id, "overlap_seconds": overlap_s, **describe_grant(new)}
            record_change(connection, "key.rotate", old.tenant or "", key_id, details)
        self._store.drop_key(key_id)
        return new, key

    def list_keys(
        self, tenant: str, *, limit: int | None = None, after: str | None = None
    ) -> Sequence[KeyRecord]:
        """Lists the keys of a tenant, oldest first.

        limit: None lists all. after: the id of the last key of the previous page. Raises BadRequest if no key has the
        id `after`.
        """
        records = self._read_records(self._page(KEYS_OF_TENANT, limit, after), {"tenant": tenant})
        return [record for record in records if isinstance(record, KeyRecord)]

    def list_operator_keys(
        self, *, limit: int | None = None, after: str | None = None
    ) -> Sequence[OperatorKey]:
        """Lists the operators' keys, oldest first, without the bootstrap key. See `list_keys`."""
        records = self._read_records(self._page(OPERATOR_KEYS, limit, after))
        return [record for record in records if isinstance(record, OperatorKey)]

    def revoke_key(self, key_id: str, *, keeps_operator: bool = False) -> None:
        """Revokes a key at once. Revoking a revoked key is a no-op.

        keeps_operator: refuse to revoke the last valid key with the scope `admin`.

        Raises NotFound and KeyConflict. Raises TryAgain if neither the database nor the journal could be written. The
        revocation then applies only in this process, which tries to write it again. If the process restarts before this
        write succeeds, the revocation is lost. Also raises TryAgain if a database that several hosts share could not be
        written. The revocation then applies on this host, and on the other hosts as soon as the database answers again.
        """
        _check_in_database(key_id)
        if not self._store.database.read(KEY_EXISTS, {"key_id": key_id}):
            raise NotFound.of_key(key_id)
        if keeps_operator and self._valid_operator_keys() == {key_id}:
            raise KeyConflict(
                f"Key `{key_id}` is the last valid key of an operator, and this server has no bootstrap key. Create "
                "another operator's key first."
            )
        self._revokers[key_id] = current_actor()
        is_kept = self._store.journal.add(key_id)
        self._store.drop_key(key_id)
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
            if self._store.database.path is None:
                raise TryAgain(
                    f"key {key_id} is revoked on this host, but other hosts accept it until the "
                    "database answers again"
                ) from error

    def write_pending_revocations(self) -> None:
        """Writes the journal's entries to the database. Raises StoreUnavailable."""
        if pending := self._store.journal.pending():
            self._write_revocations(sorted(pending))
            logger.info("%d pending revocations were written to the database", len(pending))

    def _write_revocations(self, key_ids: Sequence[str]) -> None:
        self._mark_revoked(key_ids)
        self._store.journal.remove(key_ids)
        for key_id in key_ids:
            self._revokers.pop(key_id, None)

    def _mark_revoked(self, key_ids: Sequence[str]) -> None:
        with self._store.database.transaction(CHANGES, even_if_full=True) as connection:
            for key_id in key_ids:
                revoked = (
                    update(schema.api_keys)
                    .where(_k.key_id == key_id, _k.revoked_at.is_(None))
                    .values(revoked_at=self._now())
                    .returning(_k.tenant)
                )
                for (tenant,) in connection.execute(revoked).fetchall():
                    publish(connection, Change(tenant or "", key_id=key_id))
                    actor = self._revokers.get(key_id)
                    record_change(connection, "key.revoke", tenant or "", key_id, actor=actor)
        for key_id in key_ids:
            self._store.drop_key(key_id)

    def _read_records(self, query: Select[Any], parameters: dict[str, Any] | None = None) -> list[Caller]:
        """Reads keys from the database. Marks each key that the journal revokes as revoked now, because the journal has
        no times.
        """
        records = [make_record(row) for row in self._store.database.read(query, parameters)]
        pending = self._store.journal.pending()
        return [
            replace(record, revoked_at=record.revoked_at or self._now())
            if record.key_id in pending
            else record
            for record in records
        ]

    def _page(self, query: Select[Any], limit: int | None, after: str | None) -> Select[Any]:
        """Returns the query for one page of a list of keys. Raises BadRequest."""
        if after is not None:
            rows = self._store.database.read(KEY_POSITION, {"key_id": after})
            if not rows:
                raise BadRequest(
                    f"`after` is {after[:140]!r}, which is not the id of a key; send the `last_id` of the previous "
                    "page.",
                    "after",
                )
            query = query.where(tuple_(_k.created_at, _k.key_id) > tuple_(*rows[0]))
        return query.limit(limit)

    def _new_record(self, key_id: str, tenant: str, adapter: str | None) -> KeyRecord:
        """Returns the record of a new key that may do everything a tenant may. Raises NotFound."""
        rows = self._store.database.read(TERMS, {"tenant": tenant})
        if not rows:
            raise NotFound.of_tenant(tenant)
        tenant_name, status, *share = rows[0]
        times = (self._now(), None, None, None)
        terms = (TenantShare(*share), TenantStatus(status))
        return KeyRecord(key_id, tenant, tenant_name, "", DEFAULT_SCOPES, adapter, None, *times, None, *terms)

    def _check_expiry(self, expires_at: int | None) -> None:
        if expires_at is None:
            return
        if expires_at <= (now := self._now()):
            raise BadRequest(
                f"`expires_at` is {expires_at}, which is in the past: the server's time is {now}. Send a later Unix "
                "time in seconds, or omit `expires_at`.",
                "expires_at",
            )
        if expires_at > _MAX_TIME:
            raise BadRequest(
                f"`expires_at` is {expires_at}; the limit is {_MAX_TIME} (the year 9999). Send a Unix time in "
                "seconds, not in milliseconds.",
                "expires_at",
            )

    def _now(self) -> int:
        return int(self._store.wall_clock())

    def _valid_operator_keys(self) -> set[str]:
        now = self._now()
        return {
            key.key_id
            for key in self.list_operator_keys()
            if Scope.ADMIN in key.scopes
            and key.revoked_at is None
            and (key.expires_at is None or now < key.expires_at)
        }

    def _check_rotatable(self, key: Caller) -> None:
        """Raises KeyConflict for a key that is revoked, expired or already rotated."""
        if key.revoked_at is not None or key.key_id in self._store.journal:
            raise KeyConflict(f"Key `{key.key_id}` is revoked, so it cannot be rotated; create a new key.")
        if key.replaced_by is not None:
            raise KeyConflict(
                f"Key `{key.key_id}` was rotated already: key `{key.replaced_by}` replaces it. Rotate that one, or "
                "revoke either."
            )
        if key.expires_at is not None and key.expires_at <= self._now():
            raise KeyConflict(f"Key `{key.key_id}` has expired, so it cannot be rotated; create a new key.")

    def _insert(self, action: str, record: Caller, secret: str) -> None:
        with self._store.database.transaction(CHANGES) as connection:
            if record.tenant is not None and not connection.execute(TERMS, {"tenant": record.tenant}).first():
                raise NotFound.of_tenant(record.tenant)  # The tenant was purged in the meantime.
            if connection.execute(KEY_EXISTS, {"key_id": record.key_id}).first() is None:
                connection.execute(
                    insert(schema.api_keys), make_row(record, self._store.pepper.digest(secret))
                )
                record_change(connection, action, record.tenant or "", record.key_id, describe_grant(record))
        self._store.drop_key(record.key_id)  # The key may be cached as unknown.


def _check_reference(adapter: str) -> None:
    """Raises BadRequest if `adapter` is not a reference to an adapter."""
    try:
        parse_reference(adapter)
    except BadAdapterName as error:
        raise BadRequest(f"`adapter`: {error}.", "adapter") from None


def _check_in_database(key_id: str) -> None:
    """Raises KeyConflict for the bootstrap key, which is not in the database."""
    if key_id == BOOTSTRAP_KEY_ID:
        raise KeyConflict(
            "The bootstrap key is not in the database. To end it, change or unset SLORA_ADMIN_KEY, delete the file "
            "`admin-key.hmac` from the data directory of each host, and restart the servers."
        )


def _check_name(name: str) -> None:
    if len(name) > _MAX_NAME_CHARS or not name.isprintable():
        raise BadRequest(
            f"`name` is {name[:140]!r}; the name of a key has at most {_MAX_NAME_CHARS} printable characters.",
            "name",
        )
