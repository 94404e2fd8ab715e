"""What an API key is: its format, how it is checked against a stored hash, and its record, which is everything that the
server knows about the key except the secret. Each request has the record of its key.

A key is `slora_<8 character id>_<43 base62 characters>_<checksum>`. The prefix and the checksum let secret scanners
recognise a leaked key reliably. The id identifies the key's row in the database. 43 base62 characters hold 256 random
bits.

A secret of this length needs no slow hash; argon2 would take 254 ms per request. The database stores the key's
HMAC-SHA256 under a pepper. The pepper is a file outside the database, so a stolen database alone is not enough to
verify a guessed key.

Scopes limit the use of a key. Each route names the scope that it needs; see `authentication.py`.

The allow-list of a key names the models that it may use. There are three kinds of entries. The name of the base model
permits the base model. The name of an adapter permits all its versions and aliases. `name@alias` permits only this
alias.

If a request names the model `default`, the key's default adapter is checked. The error for a model that is not
permitted is the same as for an unknown model.

The bootstrap key is the operator's key that is not in the database. It is given in the environment, or generated at
the first start. With it, an operator can create further operators' keys, which are in the database. A given key takes
precedence and is never stored. Of a generated key, only the hash is stored, after a terminal has shown the key or the
operator has deleted its file. An operator who loses the generated key deletes the file `admin-key.hmac` and restarts
the server.

This module also has the queries of keys, and converts rows to records.
"""

import hmac
import json
import logging
import re
import secrets
import zlib
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from sqlalchemy import bindparam, insert, literal, select
from sqlalchemy.engine import Connection

from slora.core.request import TenantShare
from slora_adapters.database import schema
from slora_adapters.process.durable_file import create_durably
from slora_adapters.registry.record import LATEST
from slora_api.core.errors import BadRequest, ModelNotFound

logger = logging.getLogger(__name__)

_BASE62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_ID_CHARS, _SECRET_CHARS, _CHECKSUM_CHARS = 8, 43, 6
_KEY = re.compile(r"(slora_([0-9A-Za-z]{8})_[0-9A-Za-z]{43})_([0-9A-Za-z]{6})", re.ASCII)
PEPPER_BYTES = 32


def key_checksum(body: str) -> str:
    """Returns the CRC32 of `body` in base62. Six characters suffice, because 62**6 > 2**32."""
    value, digits = zlib.crc32(body.encode()), ""
    for _ in range(_CHECKSUM_CHARS):
        value, digit = divmod(value, len(_BASE62))
        digits = _BASE62[digit] + digits
    return digits


def _random_text(length: int) -> str:
    return "".join(secrets.choice(_BASE62) for _ in range(length))


@dataclass(frozen=True, slots=True)
class GeneratedKey:
    """A newly generated key. Its repr hides the secret, so that logs do not reveal it."""

    key_id: str
    secret: str

    def __repr__(self) -> str:
        return f"GeneratedKey({self.key_id!r}, '***')"


def make_key() -> GeneratedKey:
    """Generates a key from the operating system's random numbers."""
    key_id = _random_text(_ID_CHARS)
    body = f"slora_{key_id}_{_random_text(_SECRET_CHARS)}"
    return GeneratedKey(key_id, f"{body}_{key_checksum(body)}")


def read_key_id(text: str) -> str | None:
    """Returns the id of a well-formed key, or None for any other string. Does not check whether the key is valid."""
    match = _KEY.fullmatch(text)
    return match[2] if match and key_checksum(match[1]) == match[3] else None


class Pepper:
    """The server's secret for hashing keys."""

    __slots__ = ("_keyed",)

    def __init__(self, secret: bytes) -> None:
        self._keyed = hmac.new(secret, digestmod="sha256")

    @staticmethod
    def from_file(path: Path) -> "Pepper":
        """Reads the pepper, or creates it at the first start (mode 0600). Raises ValueError if the file is damaged."""
        if not path.exists():
            create_durably(path, secrets.token_bytes(PEPPER_BYTES))
        # Read the file even after creating it: if two processes start together, either may have created the file.
        secret = path.read_bytes()
        if len(secret) != PEPPER_BYTES:
            raise ValueError(
                f"{path} has {len(secret)} bytes instead of {PEPPER_BYTES}; restore the file from a "
                "backup, or delete it and create all keys again"
            )
        return Pepper(secret)

    def digest(self, key: str) -> bytes:
        """Returns the 32 bytes that are stored in place of `key`."""
        made = self._keyed.copy()  # In half of the time of `hmac.digest`, which looks the algorithm up.
        made.update(key.encode())
        return made.digest()

    def matches(self, key: str, stored: bytes) -> bool:
        """Returns whether `stored` is the digest of `key`. The comparison takes constant time."""
        return hmac.compare_digest(self.digest(key), stored)


# The key id of the bootstrap key; see `AdminKey`.
BOOTSTRAP_KEY_ID = "bootstrap"

# The maximum number of entries. The number is limited, because listing the models of a key reads each entry's model
# from the database.
MAX_MODELS = 100


@dataclass(frozen=True, slots=True)
class AllowList:
    """The entries of one list.

    entries: `name` permits an adapter with all its versions and aliases. `name@alias` permits that alias only; a bare
        name in a request counts as `name@latest`.
    """

    entries: frozenset[str]

    def permits(self, reference: str) -> bool:
        """Whether a model is permitted. reference: an adapter's `name`, `name@3` or `name@alias`, or the name of the
        base model.
        """
        name, _, target = reference.partition("@")
        return name in self.entries or f"{name}@{target or LATEST}" in self.entries

    def permits_whole(self, name: str) -> bool:
        """Whether all versions and aliases of an adapter are permitted."""
        return name in self.entries

    def names(self) -> list[str]:
        """Returns the names of adapters in the entries, sorted. The name of the base model may be among these names."""
        return sorted({entry.partition("@")[0] for entry in self.entries})


class TenantStatus(StrEnum):
    """ACTIVE: the tenant is served. SUSPENDED: its keys are refused until the operator resumes it. PURGING: its keys
    are refused, and a part of its data may already be deleted.
    """

    ACTIVE = "active"
    SUSPENDED = "suspended"
    PURGING = "purging"


class Scope(StrEnum):
    INFERENCE = "inference"
    ADAPTERS_READ = "adapters:read"
    ADAPTERS_WRITE = "adapters:write"
    ADAPTERS_HUB = "adapters:hub"
    USAGE_READ = "usage:read"
    METRICS_READ = "metrics:read"
    ADMIN = "admin"


# The scopes that an operator's key may have. ADMIN includes METRICS_READ. A tenant's key can have neither, because the
# metrics show the traffic of all tenants.
OPERATOR_SCOPES = frozenset({Scope.ADMIN, Scope.METRICS_READ})

TENANT_SCOPES = frozenset(Scope) - OPERATOR_SCOPES
# A key may let the server download adapters from the hub only if the operator says so.
DEFAULT_SCOPES = TENANT_SCOPES - {Scope.ADAPTERS_HUB}


def parse_scopes(
    names: Iterable[str], param: str, known_scopes: Set[Scope] = TENANT_SCOPES
) -> frozenset[Scope]:
    """Returns the scopes of a new key. known_scopes: TENANT_SCOPES or OPERATOR_SCOPES.

    Raises BadRequest naming `param` and the scope that is refused.
    """
    wanted = list(names)
    known = ", ".join(f"`{scope}`" for scope in Scope if scope in known_scopes)
    if not wanted:
        raise BadRequest(
            f"`{param}` is empty, so the key could do nothing; name at least one of {known}.", param
        )
    for name in wanted:
        if name in OPERATOR_SCOPES - known_scopes:
            raise BadRequest(
                f"`{param}` contains `{name}`, which a tenant's key cannot have; create an operator's key with POST "
                "/admin/keys.",
                param,
            )
        if name not in known_scopes:
            raise BadRequest(f"`{param}` contains {name[:64]!r}, which is not a scope; use {known}.", param)
    return frozenset(map(Scope, wanted))


def join_scopes(scopes: Iterable[Scope]) -> str:
    """Returns the scopes as the database stores them: sorted and separated by spaces."""
    return " ".join(sorted(scopes))


def split_scopes(text: str) -> frozenset[Scope]:
    """Returns the scopes that the database stores. Scopes that a newer release has added are left out."""
    return frozenset(scope for scope in Scope if scope in text.split())


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """A tenant's API key without its secret. Times are Unix times in seconds.

    tenant: the id of the tenant. tenant_name: its name when the key was read, for people.
    name: a label for people; may be empty.
    adapter: the default adapter, which `model="default"` selects; None selects the base model.
    models: None permits all models of the tenant.
    last_used_at: the last use, from the database, where it is updated at most once a minute.
    replaced_by: the id of the key that replaced this key in a rotation.
    share, status: the tenant's share and status when the key was read.
    """

    key_id: str
    tenant: str
    tenant_name: str
    name: str
    scopes: frozenset[Scope]
    adapter: str | None
    models: AllowList | None
    created_at: int
    expires_at: int | None
    last_used_at: int | None
    revoked_at: int | None
    replaced_by: str | None
    share: TenantShare
    status: TenantStatus = TenantStatus.ACTIVE

    def check_model(self, reference: str) -> None:
        """Raises ModelNotFound if the key may not use this adapter or the base model."""
        if self.models is not None and not self.models.permits(reference):
            raise ModelNotFound(reference)

    def check_adapter(self, name: str) -> None:
        """Raises ModelNotFound unless the key may use every version and alias of the adapter. Only such a key may
        change the adapter.
        """
        if self.models is not None and not self.models.permits_whole(name):
            raise ModelNotFound(name)


@dataclass(frozen=True, slots=True)
class OperatorKey:
    """An operator's key without its secret. The fields have the same meaning as in `KeyRecord`.

    scopes: a subset of OPERATOR_SCOPES.
    """

    key_id: str
    name: str
    created_at: int
    expires_at: int | None = None
    last_used_at: int | None = None
    revoked_at: int | None = None
    replaced_by: str | None = None
    scopes: frozenset[Scope] = frozenset({Scope.ADMIN})

    @property
    def tenant(self) -> None:
        return None

    @property
    def tenant_name(self) -> None:
        return None


Caller = KeyRecord | OperatorKey

_t, _k = schema.tenants.c, schema.api_keys.c

SHARE_COLUMNS = (_t.weight, _t.min_pool_share, _t.max_pool_share, _t.priority)

_TERM_COLUMNS = (_t.name, _t.status, *SHARE_COLUMNS)

TERMS = select(*_TERM_COLUMNS).where(_t.tenant_id == bindparam("tenant"))

_KEYS = (
    select(
        *(_k.key_id, _k.tenant, _k.name, _k.scopes, _k.adapter, _k.models, _k.created_at, _k.expires_at),
        *(_k.last_used_at, _k.revoked_at, _k.replaced_by, *_TERM_COLUMNS),
    )
    .join_from(schema.api_keys, schema.tenants, isouter=True)
    .order_by(_k.created_at, _k.key_id)
)

KEYS_OF_TENANT = _KEYS.where(_k.tenant == bindparam("tenant"))

OPERATOR_KEYS = _KEYS.where(_k.tenant.is_(None))

ONE_KEY = _KEYS.where(_k.key_id == bindparam("key_id"))

VALID_KEY = ONE_KEY.add_columns(_k.digest).where(_k.revoked_at.is_(None))

KEY_POSITION = select(_k.created_at, _k.key_id).where(_k.key_id == bindparam("key_id"))

KEY_EXISTS = select(_k.key_id).where(_k.key_id == bindparam("key_id"))


def make_record(row: Sequence[Any]) -> Caller:
    *columns, tenant_name, status, weight, floor, ceiling, priority = row
    key_id, tenant, name, scopes, adapter, models, *times, replaced_by = columns
    created_at, expires_at, last_used_at, revoked_at = times
    if tenant is None:
        return OperatorKey(
            key_id,
            name,
            created_at,
            expires_at,
            last_used_at,
            revoked_at,
            replaced_by,
            split_scopes(scopes),
        )
    return KeyRecord(
        key_id,
        tenant,
        tenant_name,
        name,
        split_scopes(scopes),
        adapter,
        None if models is None else AllowList(frozenset(json.loads(models))),
        created_at,
        expires_at,
        last_used_at,
        revoked_at,
        replaced_by,
        TenantShare(weight, floor, ceiling, priority),
        TenantStatus(status),
    )


def make_row(record: Caller, digest: bytes) -> dict[str, Any]:
    row: dict[str, Any] = {
        "key_id": record.key_id,
        "tenant": record.tenant,
        "digest": digest,
        "created_at": record.created_at,
        "name": record.name,
        "scopes": join_scopes(record.scopes),
        "expires_at": record.expires_at,
    }
    if isinstance(record, KeyRecord):
        row["adapter"] = record.adapter
        row["models"] = None if record.models is None else json.dumps(sorted(record.models.entries))
    return row


def describe_grant(record: Caller) -> dict[str, Any]:
    """Returns the details of a new key for the audit log."""
    found: dict[str, Any] = {"name": record.name, "scopes": sorted(record.scopes)}
    found["expires_at"] = record.expires_at
    if isinstance(record, KeyRecord):
        found |= {
            "adapter": record.adapter,
            "models": None if record.models is None else sorted(record.models.entries),
        }
    return found


def copy_quota(connection: Connection, key_id: str, new_key_id: str) -> None:
    quotas = schema.quotas.c
    columns = [literal(new_key_id) if column is quotas.key_id else column for column in quotas]
    of_key = select(*columns).where(quotas.key_id == key_id)
    connection.execute(insert(schema.quotas).from_select([column.name for column in quotas], of_key))


_FILE_NAME = "admin-key.hmac"

_WEAK_CHARS = 16

# The record of the bootstrap key, which identifies its requests.
BOOTSTRAP_KEY = OperatorKey(BOOTSTRAP_KEY_ID, BOOTSTRAP_KEY_ID, 0)


@dataclass(frozen=True, slots=True)
class AdminKey:
    """The bootstrap key that is valid in this run. shown_once: the text of the key if it was generated in this run;
    otherwise None.
    """

    pepper: Pepper
    digest: bytes
    shown_once: str | None = None

    def __repr__(self) -> str:
        return "AdminKey(***)"

    def matches(self, key: str) -> bool:
        return self.pepper.matches(key, self.digest)


def explain_weak_key(given: str) -> str:
    """Returns why a given key is weak, or an empty string if the key is strong."""
    if len(given) >= _WEAK_CHARS:
        return ""
    return f"the admin key has only {len(given)} characters; use at least {_WEAK_CHARS} random ones"


def open_admin_key(given: str, directory: Path, pepper: Pepper, *, is_needed: bool = True) -> AdminKey | None:
    """Returns the key that is valid for this run: `given` if it is not empty, else the key from the first start.

    is_needed: whether to generate a key if there is none. If False, returns None in that case.
    """
    if given:
        if weakness := explain_weak_key(given):
            logger.warning("%s", weakness)
        return AdminKey(pepper, pepper.digest(given))
    path = directory / _FILE_NAME
    try:
        return AdminKey(pepper, bytes.fromhex(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        if not is_needed:
            return None
        key = make_key().secret
    digest = pepper.digest(key)
    if create_durably(path, digest.hex().encode()):
        return AdminKey(pepper, digest, shown_once=key)
    # Another process has created the file in the meantime.
    return AdminKey(pepper, bytes.fromhex(path.read_text(encoding="utf-8")))
