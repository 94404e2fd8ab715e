"""The JSON of adapters, versions and aliases in the API's answers.

This module does not depend on HTTP or the database.
"""

from collections.abc import Iterable
from typing import Any

from slora_adapters.registry.registry import AdapterRecord, Rollout

__all__ = ["adapter_json", "alias_json", "digest_text", "version_json"]

Json = dict[str, Any]


def digest_text(record: AdapterRecord) -> str:
    return f"sha256:{record.version.digest}"


def adapter_json(rollout: Rollout) -> Json:
    """The JSON of a name or an alias. For an alias that splits requests, the version with the largest part is shown."""
    return _fields(rollout.main, rollout.label, pinned=rollout.pinned)


def version_json(record: AdapterRecord, rollouts: Iterable[Rollout]) -> Json:
    """The JSON of a version, with the aliases that point at it. Each alias is shown with the percentage of its requests
    that this version gets.
    """
    using = [one for one in rollouts if record.number in one.targets]
    fields = _fields(record, record.name, pinned=any(one.pinned for one in using))
    return fields | {"aliases": {one.alias: one.targets[record.number] for one in using}}


def alias_json(rollout: Rollout) -> Json:
    return {
        "object": "adapter.alias",
        "name": rollout.main.name,
        "alias": rollout.alias,
        "versions": {str(number): rollout.targets[number] for number in sorted(rollout.targets)},
        "follows_pushes": rollout.follows_pushes,
        "pinned": rollout.pinned,
        "updated": int(rollout.updated_at),
    }


def _fields(record: AdapterRecord, name: str, *, pinned: bool) -> Json:
    details = record.details
    return {
        "object": "adapter",
        "name": name,
        "version": record.number,
        "digest": digest_text(record),
        "rank": details.rank,
        "target_modules": list(details.target_modules),
        "bytes": details.num_bytes,
        "stored_bytes": details.stored_bytes + record.extras.num_bytes,
        "chat_template": record.extras.template_bytes is not None,
        "generation_config": record.extras.defaults_bytes is not None,
        "pinned": pinned,
        "created": int(record.named_at),
        "updated": int(record.created_at),
    }
