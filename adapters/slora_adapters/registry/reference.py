"""How adapters are called: `name`, `name@3`, `name@alias`, the same in requests, paths and commands.

`name` alone means `name@latest`. Names and aliases have no `@`, and no alias is a number, so a reference reads one way
only. Whether there is such an adapter is not known here.
"""

import re
from dataclasses import dataclass

from slora_adapters.errors import BadAdapterName, BadAlias

# The alias that every name has: what the bare name serves.
LATEST = "latest"

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}", re.ASCII)
# As SQLite counts at most, and no leading zero: a version has one way to be written.
_NUMBER = re.compile(r"[1-9][0-9]{0,17}", re.ASCII)
_RULE = "1 to 128 of a-z, 0-9, '.', '_', '-', the first a letter or digit"


@dataclass(frozen=True, slots=True)
class AdapterReference:
    """One version of a name, or an alias of it: exactly one of `number` and `alias` is given."""

    name: str
    number: int | None
    alias: str | None

    @property
    def target(self) -> int | str:
        """The one that is given."""
        if self.alias is None:
            assert self.number is not None
            return self.number
        return self.alias

    @property
    def text(self) -> str:
        """As it is written, in short."""
        return self.name if self.alias == LATEST else f"{self.name}@{self.target}"


def check_adapter_name(name: str) -> str:
    """The name, if it can be one. Raises BadAdapterName."""
    if not _NAME.fullmatch(name):
        raise BadAdapterName(f"{name[:140]!r} cannot be the name of an adapter: {_RULE}")
    return name


def check_alias_name(alias: str) -> str:
    """The alias, if it can be one. Raises BadAlias."""
    if not _NAME.fullmatch(alias) or alias.isdigit():
        raise BadAlias(f"{alias[:140]!r} cannot be an alias: {_RULE}, and not a number, which is a version's")
    return alias


def parse_reference(text: str) -> AdapterReference:
    """What `text` refers to. Raises BadAdapterName if it can be no reference."""
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
            f"{text[:270]!r} refers to no adapter; write `name`, `name@3` for a version or `name@prod` for an alias"
        ) from None
