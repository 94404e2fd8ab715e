"""The JSON of adapters, versions and aliases in the API's answers.

This module does not depend on HTTP or the database.
"""

from collections.abc import Iterable
from typing import Literal

from typing_extensions import TypedDict

from slora_adapters.peft.adapter import ModuleSummary
from slora_adapters.registry.record import AdapterRecord, Rollout
from slora_api.adapters.base_model import BaseMatch


class AdapterObject(TypedDict):
    """A name or an alias, with the version that it serves.

    bytes: size of the weights. stored_bytes: size of the adapter's files, chat template and generation config. The
    tenant's quota counts the files of versions with the same weights once.
    created: when the name was made. updated: when the version was made. Both are Unix times in seconds.
    """

    object: Literal["adapter"]
    name: str
    version: int
    digest: str
    rank: int
    target_modules: list[str]
    bytes: int
    stored_bytes: int
    chat_template: bool
    generation_config: bool
    pinned: bool
    created: int
    updated: int


class VersionObject(AdapterObject):
    """A version. aliases: alias -> percentage of the alias's requests that this version gets."""

    aliases: dict[str, int]


class AliasObject(TypedDict):
    """An alias. versions: version number -> percentage of the requests."""

    object: Literal["adapter.alias"]
    name: str
    alias: str
    versions: dict[str, int]
    follows_pushes: bool
    pinned: bool
    updated: int


class CertificateObject(TypedDict):
    """The results of the checks of an upload.

    modules: the adapted modules, by module name.
    pool_bytes: size in the page pool; with tensor parallelism, in the pool of each rank.
    logprob_change: greatest change of a log-probability that the canary found; null if the version already existed,
    because the canary did not run again.
    uses: the files, special tokens, magnitudes and biases that are served beside A and B, and, after the word `not`,
    those that are not.
    predicted_load_ms: the predicted load time from each tier; null for a tier from which no adapter was loaded yet.
    """

    modules_adapted: int
    modules_total: int
    modules: dict[str, ModuleSummary]
    pool_bytes: int
    base: BaseMatch
    logprob_change: float | None
    uses: list[str]
    predicted_load_ms: dict[str, float | None] | None


class PublishedObject(VersionObject):
    """The version that an upload has made. new_version: false if the newest version of the name already was the
    uploaded adapter. source: the repository and commit, for an adapter that the server downloaded from the hub.
    """

    new_version: bool
    source: str | None
    certificate: CertificateObject


def digest_text(record: AdapterRecord) -> str:
    return f"sha256:{record.version.digest}"


def adapter_json(rollout: Rollout) -> AdapterObject:
    """Returns the JSON of a name or an alias. For an alias that splits requests, the JSON shows the version with the
    largest percentage.
    """
    return _fields(rollout.main, rollout.label, pinned=rollout.pinned)


def version_json(record: AdapterRecord, rollouts: Iterable[Rollout]) -> VersionObject:
    """Returns the JSON of a version, with the aliases that point at it. For each alias, the JSON has the percentage of
    the alias's requests that this version gets.
    """
    using = [one for one in rollouts if record.number in one.targets]
    fields = _fields(record, record.name, pinned=any(one.pinned for one in using))
    return {**fields, "aliases": {one.alias: one.targets[record.number] for one in using}}


def alias_json(rollout: Rollout) -> AliasObject:
    return {
        "object": "adapter.alias",
        "name": rollout.main.name,
        "alias": rollout.alias,
        "versions": {str(number): rollout.targets[number] for number in sorted(rollout.targets)},
        "follows_pushes": rollout.follows_pushes,
        "pinned": rollout.pinned,
        "updated": int(rollout.updated_at),
    }


def _fields(record: AdapterRecord, name: str, *, pinned: bool) -> AdapterObject:
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
