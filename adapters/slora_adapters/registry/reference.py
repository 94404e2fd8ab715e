"""Parses references to adapters in requests, paths and commands: `name`, `name@3` or `name@alias`.

`name` alone means `name@latest`. Names and aliases contain no `@`, and an alias is never a number, so every reference
is unambiguous. This module does not check whether the adapter exists.
"""

import re
import unicodedata
from dataclasses import dataclass

from slora_adapters.errors import BadAdapterName, BadAlias

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
