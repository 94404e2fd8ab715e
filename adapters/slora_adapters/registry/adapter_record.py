"""Plain values of the registry: adapter versions, and aliases with the versions that the aliases point at.

A record does not contain the texts of its extras. A text may take half a megabyte, and some operations, such as lists,
load many records at once. Only requests read texts, and each request reads only the texts of its own version
(`Registry.serve`).
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from slora_adapters.peft.adapter import AdapterExtras
from slora_adapters.registry.alias import Targets, choose_target
from slora_adapters.registry.reference import LATEST
from slora_adapters.version import AdapterVersion


@dataclass(frozen=True, slots=True)
class AdapterDetails:
    """Facts about the weights of a version.

    num_bytes: size of the tensors.
    packed_bytes: size in the page pool of an engine without tensor parallelism; None if the release that published the
        version did not store it.
    blob_bytes: size of the files in the store; if None, num_bytes is used instead.
    """

    rank: int
    target_modules: tuple[str, ...]
    num_bytes: int
    packed_bytes: int | None = None
    blob_bytes: int | None = None

    @property
    def stored_bytes(self) -> int:
        """The bytes that the weights use in a store."""
        return self.num_bytes if self.blob_bytes is None else self.blob_bytes

    @property
    def pool_bytes(self) -> int:
        """The bytes that the weights use in the page pool of an engine without tensor parallelism.

        This is num_bytes if the packed size is unknown. `EngineInfo.count_rank_bytes` computes the bytes of each rank.
        """
        return self.num_bytes if self.packed_bytes is None else self.packed_bytes


@dataclass(frozen=True, slots=True)
class ExtrasSummary:
    """Sizes and digest of a version's extras, for lists and comparisons.

    Sizes are bytes of UTF-8; None if the text does not exist. digest: see `digest_extras`.
    """

    template_bytes: int | None
    defaults_bytes: int | None
    digest: str

    @staticmethod
    def of(extras: AdapterExtras) -> "ExtrasSummary":
        template, defaults = extras.chat_template, extras.generation_config
        return ExtrasSummary(_size(template), _size(defaults), digest_extras(template, defaults))

    @property
    def num_bytes(self) -> int:
        return (self.template_bytes or 0) + (self.defaults_bytes or 0)


def digest_extras(chat_template: str | None, generation_config: str | None) -> str:
    """Returns the SHA-256 over presence, size and bytes of both texts; the empty string if neither text exists."""
    if chat_template is None and generation_config is None:
        return ""
    hashed = hashlib.sha256()
    for text in (chat_template, generation_config):
        raw = b"" if text is None else text.encode()
        hashed.update(b"%d:%d:%b" % (text is not None, len(raw), raw))
    return hashed.hexdigest()


NO_EXTRAS = AdapterExtras()


@dataclass(frozen=True, slots=True)
class AdapterRecord:
    """The record of one push under a tenant's adapter name. A record never changes, and its number is not reused while
    the name exists.

    version: identifies the weights. The same weights may have several numbers and names.
    created_at: Unix time of the push.
    named_at: Unix time of the first push of the name.
    """

    name: str
    number: int
    version: AdapterVersion
    details: AdapterDetails
    extras: ExtrasSummary
    created_at: float
    named_at: float

    @property
    def label(self) -> str:
        return f"{self.name}@{self.number}"

    def holds(self, version: AdapterVersion, extras: AdapterExtras) -> bool:
        """Returns whether the record has these weights and these extras."""
        return (self.version, self.extras) == (version, ExtrasSummary.of(extras))


@dataclass(frozen=True, slots=True)
class Rollout:
    """An alias and the versions that it points at (`records`).

    targets: the percentage of the requests for each version number.
    follows_pushes: whether each push moves all requests to the new version.
    salt: see `choose_target`.
    pinned: whether all versions in `targets` are kept in the page pool, even before a request needs them.
    updated_at: Unix time of the last move.
    """

    alias: str
    records: Mapping[int, AdapterRecord]
    targets: Targets
    follows_pushes: bool
    salt: str
    pinned: bool
    updated_at: float

    @property
    def main(self) -> AdapterRecord:
        """The version with the largest percentage of the requests; among equal percentages, the oldest version."""
        return self.records[max(self.targets, key=lambda number: (self.targets[number], -number))]

    @property
    def label(self) -> str:
        """The reference to the alias that requests use."""
        return self.main.name if self.alias == LATEST else f"{self.main.name}@{self.alias}"

    @property
    def tenant(self) -> str:
        return self.main.version.tenant

    def choose(self, user: str) -> AdapterRecord:
        """Returns the version for `user`. The same user gets the same version until `targets` changes."""
        return self.records[choose_target(self.targets, self.salt, user)]


@dataclass(frozen=True, slots=True)
class StorageUsage:
    """Totals over all versions of a tenant.

    num_bytes: bytes stored for all versions. Weights that several versions share count once; extras count for each
      version.
    weights_bytes: the part of num_bytes for the weights with the requested digest; None if the tenant has no version
      with that digest.
    """

    num_versions: int
    num_bytes: int
    weights_bytes: int | None


@dataclass(frozen=True, slots=True)
class Publication:
    """The result of an upload. is_new: False if the newest version already had these weights and extras.

    moved_pin: whether the targets of a pinned alias changed.
    """

    record: AdapterRecord
    is_new: bool
    moved_pin: bool = False


@dataclass(frozen=True, slots=True)
class Removal:
    """The result of a deletion.

    orphaned: deleted weights that no remaining version of the tenant uses.
    unreferenced: digests in `orphaned` whose blobs no tenant and no upload needs. `collect` would drop these blobs.
    moved_pin: see Publication.
    """

    records: tuple[AdapterRecord, ...]
    orphaned: tuple[AdapterVersion, ...]
    unreferenced: tuple[str, ...]
    moved_pin: bool


def _size(text: str | None) -> int | None:
    return None if text is None else len(text.encode())
