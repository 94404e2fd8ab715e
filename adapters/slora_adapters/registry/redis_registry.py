"""Reads a registry that release 0.1 kept in Redis, and copies it into the database. Redis is not changed.

All keys begin with `slora:registry:`. The module reads these keys:

    schema, id               schema version of the layout (1 or 2); the registry's id
    name:<tenant>/<name>     hash: named_at, last_number, and alias:<alias> (JSON) for each alias
    versions:<tenant>/<name> hash: number -> version (JSON; in schema 1 it includes the texts of its extras)
    extras:<tenant>/<name>   hash: number -> digest and texts of its extras (JSON), if it has extras
    changes                  stream of all changes

The module needs the package redis, so it is loaded only when it is used.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from slora_adapters.database.audit_log import record_change
from slora_adapters.database.database import CHANGES, Database
from slora_adapters.database.database_copy import take_over_registry
from slora_adapters.errors import StoreUnavailable, StoreUnfit
from slora_adapters.peft.adapter import AdapterExtras
from slora_adapters.registry.adapter_record import NO_EXTRAS, AdapterDetails, AdapterRecord, ExtrasSummary
from slora_adapters.registry.alias import AliasHistory, decode_states
from slora_adapters.registry.named_adapter import Alias, NamedAdapter
from slora_adapters.registry.registry_rows import save_name
from slora_adapters.store.durable_redis import DURABLE_TIMEOUT_S, as_unavailable, connect
from slora_adapters.version import AdapterVersion

__all__ = ["copy_registry"]

_PREFIX = "slora:registry:"
_LAST_SCHEMA = 2
_Fields = Mapping[bytes, bytes]


def copy_registry(url: str, database: Database) -> int | None:
    """Copies all names of the registry into a database that has no names, in one transaction. Returns the number of
    names; None if the database has this registry already.

    The database takes over the registry's id, under which it claims the store of adapters.

    Raises StoreUnfit if there is no registry, if it changes in the meantime, or if the database has other names. Raises
    StoreUnavailable if Redis or the database does not answer.
    """
    client = connect(url, DURABLE_TIMEOUT_S, num_retries=0)
    try:
        with as_unavailable(), database.transaction(CHANGES) as connection:
            if not take_over_registry(connection, _read_id(client)):
                return None
            num_names = 0
            last = client.xrevrange(f"{_PREFIX}changes", count=1)
            for named in _read_names(client):
                save_name(connection, NamedAdapter(named.tenant, named.name), named)
                num_names += 1
            if client.xrevrange(f"{_PREFIX}changes", count=1) != last:
                raise StoreUnfit("a server still changes this registry: stop all servers, and copy it again")
            record_change(connection, "registry.copy", "", details={"num_names": num_names})
            return num_names
    finally:
        client.close()


def _read_id(client: Any) -> str:
    found, registry = client.get(f"{_PREFIX}schema"), client.get(f"{_PREFIX}id")
    if found is None or registry is None:
        raise StoreUnfit("this Redis has no registry of slora: check the URL and the number of its database")
    if int(found) > _LAST_SCHEMA:
        raise StoreUnavailable(
            f"this Redis has version {int(found)} of the registry schema, but the last one is {_LAST_SCHEMA}"
        )
    return bytes(registry).decode()


def _read_names(client: Any) -> Iterator[NamedAdapter]:
    prefix = f"{_PREFIX}name:"
    for key in sorted(set(client.scan_iter(match=f"{prefix}*", count=1000))):
        place = bytes(key).decode().removeprefix(prefix)
        fields, versions, extras = (
            client.hgetall(f"{_PREFIX}{kind}:{place}") for kind in ("name", "versions", "extras")
        )
        yield _parse_name(place, fields, versions, extras)


def _parse_name(place: str, fields: _Fields, versions: _Fields, extras: _Fields) -> NamedAdapter:
    tenant, _, name = place.partition("/")
    named = NamedAdapter(tenant, name, float(fields[b"named_at"]), int(fields[b"last_number"]))
    for raw_number, raw in versions.items():
        number, parsed = int(raw_number), json.loads(raw)
        texts = _parse_extras(parsed, extras.get(raw_number))
        named.records[number] = _parse_record(named, number, parsed, texts)
        if texts != NO_EXTRAS:
            named.new_extras[number] = texts
    for field, raw in fields.items():
        if field.startswith(b"alias:"):
            named.aliases[field.removeprefix(b"alias:").decode()] = _parse_alias(raw)
    return named


def _parse_extras(version: Mapping[str, Any], raw: bytes | None) -> AdapterExtras:
    if "chat_template" in version:
        return AdapterExtras(version["chat_template"], version["generation_config"])
    if raw is None:
        return NO_EXTRAS
    _, chat_template, generation_config = json.loads(raw)
    return AdapterExtras(chat_template, generation_config)


def _parse_record(
    named: NamedAdapter, number: int, fields: Mapping[str, Any], extras: AdapterExtras
) -> AdapterRecord:
    details = AdapterDetails(
        fields["rank"],
        tuple(fields["target_modules"]),
        fields["num_bytes"],
        fields["packed_bytes"],
        fields.get("blob_bytes"),
    )
    version = AdapterVersion(named.tenant, fields["digest"])
    summary = ExtrasSummary.of(extras)
    return AdapterRecord(named.name, number, version, details, summary, fields["created_at"], named.named_at)


def _parse_alias(raw: bytes) -> Alias:
    fields = json.loads(raw)
    *before, state = decode_states(fields["states"])
    return Alias(AliasHistory(state, tuple(before)), fields["salt"], fields["pinned"], fields["updated_at"])
