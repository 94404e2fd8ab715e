"""Plain values of the registry: references, adapter versions, and aliases with the versions that they point at.

A reference in a request, path or command is `name`, `name@3` or `name@alias`. `name` alone means `name@latest`. Names
and aliases contain no `@`, and an alias is never a number, so every reference is unambiguous.

An alias points at one or more versions, each with a percentage of the users. `choose_target` chooses the version for a
user. A change of the percentages moves few users to another version. For example, an alias points at an old version
with 90 percent and at a new version with 10 percent. Raising the new version to 20 percent moves a tenth of all users
to it. All other users keep their version. This is weighted rendezvous hashing (Thaler and Ravishankar 1998; the
logarithm is from Schindelhauer and Schomaker 2005).
"""

import hashlib
import math
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass

from slora_adapters.errors import BadAdapterName, BadAlias
from slora_adapters.peft.adapter import AdapterExtras
from slora_adapters.version import AdapterVersion

# Version number -> percentage of the requests.
Targets = Mapping[int, int]
NO_EXTRAS = AdapterExtras()
# The alias that every name has. A bare name resolves to it.
LATEST = "latest"

_MAX_NAME_CHARS = 128
_NAME = re.compile(rf"[a-z0-9][a-z0-9._-]{{0,{_MAX_NAME_CHARS - 1}}}", re.ASCII)
# A version number has at most 18 digits, which fit SQLite's 64-bit integers. It has no leading zero, so that each
# version has only one spelling.
_NUMBER = re.compile(r"[1-9][0-9]{0,17}", re.ASCII)
_RULE = "1 to 128 characters of a-z, 0-9, '.', '_' and '-', and starts with a letter or digit"


@dataclass(frozen=True, slots=True)
class AdapterReference:
    """A reference to a version or an alias of a name: exactly one of `number` and `alias` is set."""

    name: str
    number: int | None
    alias: str | None

    @property
    def target(self) -> int | str:
        """The number or the alias, whichever is set."""
        if self.alias is None:
            assert self.number is not None
            return self.number
        return self.alias

    @property
    def text(self) -> str:
        """The shortest spelling of the reference."""
        return self.name if self.alias == LATEST else f"{self.name}@{self.target}"


def check_adapter_name(name: str) -> str:
    """Returns the name if it is valid. Raises BadAdapterName."""
    if not _NAME.fullmatch(name):
        near = suggest_adapter_name(name)
        hint = "" if near is None else f"; {near!r} would be valid"
        raise BadAdapterName(f"{name[:140]!r} is not a valid adapter name: a name has {_RULE}{hint}")
    return name


def suggest_adapter_name(text: str) -> str | None:
    """Returns a valid name that looks like the text; None if the text has no letter or digit of ASCII."""
    plain = unicodedata.normalize("NFKD", text[:512]).encode("ascii", "ignore").decode().lower()
    name = re.sub(r"[^a-z0-9._-]+", "-", plain).lstrip("._-")[:_MAX_NAME_CHARS].rstrip("-")
    return name or None


def check_alias_name(alias: str) -> str:
    """Returns the alias if it is valid. Raises BadAlias."""
    if not _NAME.fullmatch(alias) or alias.isdigit():
        raise BadAlias(
            f"{alias[:140]!r} is not a valid alias: an alias has {_RULE}, and is not a number, because "
            "numbers are versions"
        )
    return alias


def parse_reference(text: str) -> AdapterReference:
    """Parses a reference. Raises BadAdapterName if the text is not a valid reference."""
    name, at, target = text.partition("@")
    check_adapter_name(name)
    if not at:
        return AdapterReference(name, None, LATEST)
    if _NUMBER.fullmatch(target):
        return AdapterReference(name, int(target), None)
    try:
        return AdapterReference(name, None, check_alias_name(target))
    except BadAlias:
        raise BadAdapterName(
            f"{text[:270]!r} is not a reference to an adapter; write `name`, `name@3` for a version "
            "or `name@prod` for an alias"
        ) from None


def choose_target(targets: Targets, salt: str, user: str) -> int:
    """Returns the number of the version for `user`. Each version gets its percentage of all users.

    salt: unique to the alias. With equal salts, two aliases would choose versions for the same groups of users.
    """
    if len(targets) == 1:
        return next(iter(targets))
    return max(targets, key=lambda number: _draw(salt, user, number) * targets[number])


def _draw(salt: str, user: str, number: int) -> float:
    """Returns the pseudo-random score of a version for a user: 1 / x, where x is exponentially distributed.

    If the score of each version i is multiplied by its percentage p_i, version i has the largest product with
    probability p_i / 100.
    """
    drawn = hashlib.sha256(f"{salt}:{number}:{user}".encode()).digest()
    # 52 bits plus a half give a number strictly between 0 and 1, so the logarithm is finite and not zero.
    fraction = ((int.from_bytes(drawn[:8]) >> 12) + 0.5) / 2**52
    return -1 / math.log(fraction)


@dataclass(frozen=True, slots=True)
class AdapterDetails:
    """Facts about the weights of a version."""

    rank: int
    target_modules: tuple[str, ...]
    num_bytes: int  # size of the tensors
    # Size in the page pool of an engine without tensor parallelism, if it is known.
    packed_bytes: int | None = None
    # Size of the files in the store; None if it is num_bytes.
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
    """What a list or a comparison needs to know of a version's extras.

    A record does not contain the texts. A text may take half a megabyte, and a list loads many records at once.
    """

    template_bytes: int | None  # bytes of UTF-8; None if there is no text
    defaults_bytes: int | None
    digest: str  # see `digest_extras`

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


@dataclass(frozen=True, slots=True)
class AdapterRecord:
    """The record of one push under a tenant's adapter name. A record never changes, and its number is not reused while
    the name exists.
    """

    name: str
    number: int
    version: AdapterVersion  # the weights, which may have several numbers and names
    details: AdapterDetails
    extras: ExtrasSummary
    created_at: float  # Unix time of the push
    named_at: float  # Unix time of the first push of the name

    @property
    def label(self) -> str:
        return f"{self.name}@{self.number}"

    def holds(self, version: AdapterVersion, extras: AdapterExtras) -> bool:
        """Returns whether the record has these weights and these extras."""
        return (self.version, self.extras) == (version, ExtrasSummary.of(extras))


@dataclass(frozen=True, slots=True)
class Rollout:
    """An alias and the versions that it points at."""

    alias: str
    records: Mapping[int, AdapterRecord]
    targets: Targets
    follows_pushes: bool  # whether each push moves all requests to the new version
    salt: str  # see `choose_target`
    pinned: (
        bool  # whether all versions in `targets` are kept in the page pool, even before a request needs them
    )
    updated_at: float  # Unix time of the last move

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
    """Totals over all versions of a tenant."""

    num_versions: int
    num_bytes: int  # weights that several versions share count once; extras count for each version
    weights_bytes: (
        int | None
    )  # the part of the weights with the requested digest; None if no version has them


@dataclass(frozen=True, slots=True)
class Publication:
    """The result of a push."""

    record: AdapterRecord
    is_new: bool  # False if the newest version already had these weights and extras
    rollouts: tuple[Rollout, ...]  # all aliases of the name after the push, sorted
    moved_pin: bool  # whether the targets of a pinned alias changed


@dataclass(frozen=True, slots=True)
class Removal:
    """The result of a deletion."""

    records: tuple[AdapterRecord, ...]
    orphaned: tuple[AdapterVersion, ...]  # deleted weights that no remaining version of the tenant uses
    moved_pin: bool  # see Publication


def _size(text: str | None) -> int | None:
    return None if text is None else len(text.encode())
