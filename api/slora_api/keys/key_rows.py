"""The rows of API keys: queries, and the conversion between rows and records."""

import json
from collections.abc import Sequence
from typing import Any

from sqlalchemy import bindparam, insert, literal, select
from sqlalchemy.engine import Connection

from slora.core.request import TenantShare
from slora_adapters.database import schema
from slora_api.keys.allow_list import AllowList
from slora_api.keys.key_record import Caller, KeyRecord, OperatorKey
from slora_api.keys.scopes import join_scopes, split_scopes
from slora_api.keys.tenant_status import TenantStatus

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
