"""Conversion between a `NamedAdapter` and the layout in Redis that `redis_scripts.py` documents."""

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from slora_adapters.peft.adapter import AdapterExtras
from slora_adapters.registry.adapter_record import AdapterDetails, AdapterRecord, ExtrasSummary
from slora_adapters.registry.alias import AliasHistory, decode_states, encode_states
from slora_adapters.registry.named_adapter import Alias, NamedAdapter
from slora_adapters.registry.registry_storage import KEPT_CHANGES, NameKey
from slora_adapters.version import AdapterVersion

__all__ = ["parse_extras", "parse_name", "plan_change"]


def plan_change(before: NamedAdapter, after: NamedAdapter, revision: str) -> dict[str, Any]:
    """Returns the changes that turn `before` into `after`, as input of `redis_scripts.SAVE`.

    Numbers are passed as strings, because Lua converts numbers to text with only 14 significant digits.
    """
    pinned, unpinned = after.pins().keys(), before.pins().keys()
    return {
        "tenant": after.tenant,
        "name": after.name,
        "revision": revision,
        "nonce": uuid.uuid4().hex,
        "has_changed": after != before,
        "is_gone": not after.records,
        "named_at": repr(after.named_at),
        "last_number": str(after.last_number),
        "removed": [
            [str(number), record.version.digest, str(record.extras.num_bytes)]
            for number, record in before.records.items()
            if number not in after.records
        ],
        "added": [
            [
                *(
                    str(number),
                    record.version.digest,
                    str(record.details.stored_bytes),
                    _encode_record(record),
                ),
                *(str(record.extras.num_bytes), _encode_extras(record, after.new_extras[number])),
            ]
            for number, record in after.records.items()
            if number not in before.records
        ],
        "updated": [
            [str(number), _encode_record(record)]
            for number, record in after.records.items()
            if number in before.records and record != before.records[number]
        ],
        "aliases": [
            [alias, _encode_alias(one)]
            for alias, one in after.aliases.items()
            if one != before.aliases.get(alias)
        ],
        "dropped": sorted(before.aliases.keys() - after.aliases.keys()),
        "pinned": sorted(pinned - unpinned),
        "unpinned": sorted(unpinned - pinned),
        "moved_pin": before.pins() != after.pins(),
        "kept_changes": str(KEPT_CHANGES),
    }


def _encode_record(record: AdapterRecord) -> str:
    details, extras = record.details, record.extras
    return json.dumps(
        {
            "digest": record.version.digest,
            "created_at": record.created_at,
            "rank": details.rank,
            "target_modules": details.target_modules,
            "num_bytes": details.num_bytes,
            "packed_bytes": details.packed_bytes,
            "blob_bytes": details.blob_bytes,
            "template_bytes": extras.template_bytes,
            "defaults_bytes": extras.defaults_bytes,
            "extras_digest": extras.digest,
        }
    )


def _encode_extras(record: AdapterRecord, extras: AdapterExtras) -> str:
    """Returns the empty string if the version has no extras."""
    if not record.extras.digest:
        return ""
    return json.dumps([record.extras.digest, extras.chat_template, extras.generation_config])


def parse_extras(
    record: AdapterRecord, raw_extras: bytes | None, raw_record: bytes | None
) -> AdapterExtras | None:
    """Returns the extras of a version; None if the version was deleted, even if its name has been pushed again."""
    if raw_extras is not None:
        digest, chat_template, generation_config = json.loads(raw_extras)
        return AdapterExtras(chat_template, generation_config) if digest == record.extras.digest else None
    inline = None if raw_record is None else _inline_extras(json.loads(raw_record))
    return inline if inline is not None and ExtrasSummary.of(inline) == record.extras else None


def _inline_extras(fields: Mapping[str, Any]) -> AdapterExtras | None:
    """Returns the texts inside a record, where schema 1 stored them; None for a record of schema 2."""
    if "chat_template" not in fields:
        return None
    return AdapterExtras(fields["chat_template"], fields["generation_config"])


def _parse_record(key: NameKey, number: int, named_at: float, raw: bytes) -> AdapterRecord:
    tenant, name = key
    fields = json.loads(raw)
    details = AdapterDetails(
        fields["rank"],
        tuple(fields["target_modules"]),
        fields["num_bytes"],
        fields["packed_bytes"],
        fields.get("blob_bytes"),
    )
    if (inline := _inline_extras(fields)) is not None:
        extras = ExtrasSummary.of(inline)
    else:
        extras = ExtrasSummary(fields["template_bytes"], fields["defaults_bytes"], fields["extras_digest"])
    version = AdapterVersion(tenant, fields["digest"])
    return AdapterRecord(name, number, version, details, extras, fields["created_at"], named_at)


def _encode_alias(one: Alias) -> str:
    """Encodes an alias. The last element of `states` is the current state."""
    states = encode_states([*one.history.before, one.history.state])
    return json.dumps(
        {"states": states, "salt": one.salt, "pinned": one.pinned, "updated_at": one.updated_at}
    )


def _parse_alias(raw: bytes) -> Alias:
    fields = json.loads(raw)
    *before, state = decode_states(fields["states"])
    return Alias(AliasHistory(state, tuple(before)), fields["salt"], fields["pinned"], fields["updated_at"])


def parse_name(text: str, answer: Sequence[Any]) -> tuple[NamedAdapter, str]:
    tenant, _, name = text.partition("/")
    if not answer:
        return NamedAdapter(tenant, name), ""
    named_at, last_number, revision, aliases, records = answer
    return NamedAdapter(
        tenant,
        name,
        float(named_at),
        int(last_number),
        {
            int(number): _parse_record((tenant, name), int(number), float(named_at), raw)
            for number, raw in zip(records[::2], records[1::2], strict=True)
        },
        {alias.decode(): _parse_alias(raw) for alias, raw in zip(aliases[::2], aliases[1::2], strict=True)},
    ), revision.decode()
