"""What the registry knows: versions of names, and aliases with the versions that they point at. Plain values.

A record holds no text of its adapter's extras, which may be half a megabyte each: lists, changes and comparisons take
many records at once. Only a request reads the texts, and only those of its own version (`Registry.serve`).
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
    """What is known of the weights of a version.

    num_bytes: size of the tensors. packed_bytes: size as they are served; None if a release published them that did not
    store it. blob_bytes: size of the files in the store; None counts as num_bytes.
    """

    rank: int
    target_modules: tuple[str, ...]
    num_bytes: int
    packed_bytes: int | None = None
    blob_bytes: int | None = None

    @property
    def stored_bytes(self) -> int:
        """What they take in a store."""
        return self.num_bytes if self.blob_bytes is None else self.blob_bytes

    @property
    def pool_bytes(self) -> int:
        """What they take in a pool, as far as that is known."""
        return self.num_bytes if self.packed_bytes is None else self.packed_bytes


@dataclass(frozen=True, slots=True)
class ExtrasSummary:
    """What lists and comparisons need of a version's extras. Sizes are bytes of UTF-8; None if there is no such text.

    digest: see `digest_extras`.
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
    """SHA-256 over presence, size and bytes of each text; the empty text if there is neither."""
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
    """Version `number` of a tenant's name: it never changes, and no other one gets its number while the name lives.

    version: the identity of its weights, which several numbers and names may have. created_at: when it was pushed;
    named_at: when the name was first pushed (Unix time).
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
        """Whether this is what a push of these would make."""
        return (self.version, self.extras) == (version, ExtrasSummary.of(extras))


@dataclass(frozen=True, slots=True)
class Rollout:
    """An alias and the versions that it points at, by number. targets: percent of the requests of each.

    follows_pushes: each new version takes all. salt: see `choose_target`. pinned: all that it points at is to be in
    the pool before anybody asks. updated_at: when it last moved (Unix time).
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
        """The version that most requests get; of equals the oldest."""
        return self.records[max(self.targets, key=lambda number: (self.targets[number], -number))]

    @property
    def label(self) -> str:
        """As requests call it."""
        return self.main.name if self.alias == LATEST else f"{self.main.name}@{self.alias}"

    @property
    def tenant(self) -> str:
        return self.main.version.tenant

    def choose(self, user: str) -> AdapterRecord:
        """The same for the same user, until weights change; see `choose_target`."""
        return self.records[choose_target(self.targets, self.salt, user)]


@dataclass(frozen=True, slots=True)
class Holdings:
    """What all versions of a tenant come to.

    num_bytes: everything that is stored for them. Weights that several versions have count once, and the extras of each
    version count. weights_bytes: the part of it that is the weights that were asked about; None if no version has them.
    """

    num_versions: int
    num_bytes: int
    weights_bytes: int | None


@dataclass(frozen=True, slots=True)
class Publication:
    """What an upload left behind. is_new: False if the newest version of the name was this one already.

    moved_pin: whether a pinned alias points somewhere else now.
    """

    record: AdapterRecord
    is_new: bool
    moved_pin: bool = False


@dataclass(frozen=True, slots=True)
class Removal:
    """What a deletion left behind.

    orphaned: versions that no name of the tenant has any more. unreferenced: digests of them that, besides, no tenant
    refers to now, so that `collect` would drop their blobs. moved_pin: as in Publication.
    """

    records: tuple[AdapterRecord, ...]
    orphaned: tuple[AdapterVersion, ...]
    unreferenced: tuple[str, ...]
    moved_pin: bool


def _size(text: str | None) -> int | None:
    return None if text is None else len(text.encode())
