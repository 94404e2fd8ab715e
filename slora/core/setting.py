"""Declarations of settings: one field of a dataclass gives a setting's name, type, default, bounds and help text.

The command line, the environment variables, the child processes and the configuration checks are derived from it.
`EngineConfig` declares the settings of the engine, `slora_api.core.settings.Settings` those of the server.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

from slora.core.errors import ConfigError

_PREFIX = "SLORA_"
# Decimal and binary multiples, as docker and vLLM read them.
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
# Databases and devices count bytes in 64 bits.
_MAX_BYTES = 2**63 - 1
_BYTE_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", re.IGNORECASE)


class SettingRefused(ValueError):
    """A flag or environment variable has an unusable value. The message says which values are accepted."""


class Kind(Protocol):
    """The values that a setting accepts. accepted: completes the sentence "it must be ..."."""

    @property
    def accepted(self) -> str: ...

    def read(self, text: str) -> Any:
        """Parses the text of a flag or variable. The caller checks the value with `admits`. Raises ValueError."""

    def admits(self, value: Any) -> bool:
        """Whether a value that was passed from Python is accepted."""


@dataclass(frozen=True, slots=True)
class Text:
    """Any text."""

    accepted = "a text"

    def read(self, text: str) -> str:
        return text

    def admits(self, value: Any) -> bool:
        return isinstance(value, str)


@dataclass(frozen=True, slots=True)
class Directory:
    """A path. The module that uses it checks whether it exists."""

    accepted = "the path of a directory"

    def read(self, text: str) -> Path:
        return Path(text)

    def admits(self, value: Any) -> bool:
        return isinstance(value, Path)


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number with bounds, both inclusive."""

    lowest: int
    highest: int | None = None

    @property
    def accepted(self) -> str:
        if self.highest is None:
            return f"a whole number of at least {self.lowest}"
        return f"a whole number from {self.lowest} to {self.highest}"

    def read(self, text: str) -> int:
        return int(text)

    def admits(self, value: Any) -> bool:
        if not isinstance(value, int) or isinstance(value, bool):
            return False
        return value >= self.lowest and (self.highest is None or value <= self.highest)


@dataclass(frozen=True, slots=True)
class ByteSize:
    """A number of bytes, spelled for example `512MiB`, `1.5GiB` or `2GB` (2 * 10**9 bytes)."""

    lowest: int = 0

    @property
    def accepted(self) -> str:
        at_least = f" of at least {self.lowest}" if self.lowest else ""
        return f"a size in bytes{at_least}, such as 512MiB, 2GB or 1048576"

    def read(self, text: str) -> int:
        match = _BYTE_SIZE.fullmatch(text.strip())
        unit = _UNITS.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise ValueError(self.accepted)
        size = math.floor(Fraction(match[1]) * unit)
        if size > _MAX_BYTES:
            raise ValueError(self.accepted)
        return size

    def admits(self, value: Any) -> bool:
        return Whole(self.lowest).admits(value)


@dataclass(frozen=True, slots=True)
class Seconds:
    """A finite number of seconds."""

    lowest: float = 0.0

    @property
    def accepted(self) -> str:
        return f"a number of seconds, {self.lowest:g} or more"

    def read(self, text: str) -> float:
        return float(text)

    def admits(self, value: Any) -> bool:
        return isinstance(value, int | float) and self.lowest <= value < math.inf


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of the given names."""

    names: Sequence[str]

    @property
    def accepted(self) -> str:
        return f"{', '.join(self.names[:-1])} or {self.names[-1]}"

    def read(self, text: str) -> str:
        return text

    def admits(self, value: Any) -> bool:
        return value in self.names


@dataclass(frozen=True, slots=True)
class OnOff:
    """A boolean, spelled `on` or `off`."""

    accepted = "on or off"

    def read(self, text: str) -> bool:
        if text not in ("on", "off"):
            raise ValueError(self.accepted)
        return text == "on"

    def admits(self, value: Any) -> bool:
        return isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Auto:
    """A value of another kind, or None, spelled `auto`: then the machine or the model determines the value at start."""

    kind: Kind

    @property
    def accepted(self) -> str:
        return f"auto, or {self.kind.accepted}"

    def read(self, text: str) -> Any:
        return None if text == "auto" else self.kind.read(text)

    def admits(self, value: Any) -> bool:
        return value is None or self.kind.admits(value)


@dataclass(frozen=True, slots=True)
class _Declaration:
    help_text: str
    kind: Kind
    metavar: str


def setting(default: Any, help_text: str, kind: Kind | None = None, *, metavar: str = "VALUE") -> Any:
    """Declares a setting as a field of a configuration dataclass.

    default: MISSING for a field that must be given. kind: any text by default. metavar: the value's name in `--help`.
    """
    return field(default=default, metadata={"setting": _Declaration(help_text, kind or Text(), metavar)})


def parameter(default: Any, kind: Kind) -> Any:
    """Declares a field of a configuration that has no flag and no variable, because its default suits every server.
    Python callers, tests and benchmarks may choose another value, which is checked as that of a setting.
    """
    return field(default=default, metadata={"parameter": kind})


@dataclass(frozen=True, slots=True)
class SettingSpec:
    """A declared setting, for the command line and the environment."""

    name: str
    default: Any
    help_text: str
    kind: Kind
    metavar: str

    @property
    def default_text(self) -> str:
        """The default as a user would type it; empty if there is none."""
        if self.default is None or self.default is MISSING:
            return "auto" if isinstance(self.kind, Auto) else ""
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        units = {"GiB": 2**30, "MiB": 2**20} if isinstance(self.kind, ByteSize) else {}
        unit = next((unit for unit, size in units.items() if self.default % size == 0), "")
        return f"{self.default // units[unit]}{unit}" if unit else str(self.default)

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return _PREFIX + self.name.upper()

    def parse(self, text: str, source: str) -> Any:
        """Reads `text`, which came from `source` (a flag or a variable). Raises SettingRefused."""
        refusal = SettingRefused(f"{source} is {text!r}; it must be {self.kind.accepted}")
        try:
            value = self.kind.read(text)
        except ValueError:
            raise refusal from None
        if not self.kind.admits(value):
            raise refusal
        return value


def setting_specs(owner: type) -> tuple[SettingSpec, ...]:
    """The settings that a dataclass declares, in its order."""
    declared = ((field, field.metadata["setting"]) for field in fields(owner) if "setting" in field.metadata)
    return tuple(
        SettingSpec(field.name, field.default, made.help_text, made.kind, made.metavar)
        for field, made in declared
    )


def check_settings(config: Any) -> None:
    """Raises ConfigError for the first setting or parameter of a configuration whose value is not accepted."""
    kinds = {declared.name: declared.metadata.get("parameter") for declared in fields(config)}
    kinds |= {spec.name: spec.kind for spec in setting_specs(type(config))}
    for name, kind in kinds.items():
        value = getattr(config, name)
        if kind is not None and not kind.admits(value):
            raise ConfigError(f"{name} is {value!r}; it must be {kind.accepted}")
