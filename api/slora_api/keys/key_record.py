"""The record of an API key: everything that the server knows about the key, except the secret. Each request has the
record of its key.

Scopes limit the use of a key. Each route names the scope that it needs; see `authentication.py`.

The allow-list of a key names the models that it may use. There are three kinds of entries. The name of the base model
permits the base model. The name of an adapter permits all its versions and aliases. `name@alias` permits only this
alias.

If a request names the model `default`, the key's default adapter is checked. The error for a model that is not
permitted is the same as for an unknown model.

This module also has the queries of keys, and converts rows to records.
"""

import json
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import bindparam, insert, literal, select
from sqlalchemy.engine import Connection

from slora.core.request import TenantShare
from slora_adapters.database import schema
from slora_adapters.registry.record import LATEST
from slora_api.core.errors import BadRequest, ModelNotFound

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
    USAGE_READ = "usage:read"
    METRICS_READ = "metrics:read"
    ADMIN = "admin"


# The scopes that an operator's key may have. ADMIN includes METRICS_READ. A tenant's key can have neither, because the
# metrics show the traffic of all tenants.
OPERATOR_SCOPES = frozenset({Scope.ADMIN, Scope.METRICS_READ})

TENANT_SCOPES = frozenset(Scope) - OPERATOR_SCOPES


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
