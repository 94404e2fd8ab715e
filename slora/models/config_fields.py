"""Typed access to a config.json. Every error names the file, the field and the value.

This module knows no model. A field that is null counts as absent wherever there is a default.
"""

import json
import math
from pathlib import Path
from typing import Any

from slora.core.errors import ConfigError


class ConfigFields:
    """The fields of one JSON object. within: the object's path inside its file, for error messages."""

    def __init__(self, fields: dict[str, Any], path: Path, within: str = "") -> None:
        self._fields = fields
        self._path = path
        self._within = within

    def __contains__(self, name: str) -> bool:
        return self._fields.get(name) is not None

    def names(self) -> set[str]:
        """The fields that are not null."""
        return {name for name, value in self._fields.items() if value is not None}

    def equals(self, name: str, value: object) -> bool:
        """Whether the field has exactly this value, including its JSON type: 1 differs from true and from 1.0."""
        given = self._fields.get(name)
        return type(given) is type(value) and given == value

    def is_text(self, name: str, *, or_number: bool = False) -> bool:
        """Whether the field is a text or a list of texts. or_number: whether numbers count as texts."""
        value = self._fields.get(name)
        kinds = (str, int, float) if or_number else (str,)
        return all(type(text) in kinds for text in (value if isinstance(value, list) else [value]))

    def refusal(self, name: str, complaint: str) -> ConfigError:
        """Returns an error. `complaint` continues the message after the field and its value: "; it must be ..."."""
        return self._refuse(name, self._fields.get(name), complaint)

    def whole(self, name: str, default: int | None = None, *, least: int = 1, most: int | None = None) -> int:
        value = self._value(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            kind = "a positive whole number" if least == 1 else f"a whole number from {least}"
            raise self._refuse(name, value, f"; it must be {kind}")
        if most is not None and value > most:
            raise self._refuse(name, value, f"; it must be at most {most}")
        return value

    def optional_whole(self, name: str) -> int | None:
        return self.whole(name) if name in self else None

    def number(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default)
        if not _is_positive(value):
            raise self._refuse(name, value, "; it must be a positive number")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        return self.number(name) if name in self else None

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        values = self._fields.get(name)
        if not isinstance(values, list) or len(values) != count or not all(map(_is_positive, values)):
            raise self.refusal(name, f"; it must be a list of {count} positive numbers")
        return tuple(map(float, values))

    def flag(self, name: str, *, default: bool = False) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.refusal(name, "; it must be true or false")
        return value

    def text(self, name: str, default: str) -> str:
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.refusal(name, "; it must be a string")
        return value

    def texts(self, name: str) -> tuple[str, ...] | None:
        """Returns a list of strings, or None if the field is absent."""
        values = self._fields.get(name)
        if values is None:
            return None
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise self.refusal(name, "; it must be a list of strings")
        return tuple(values)

    def wholes(self, name: str) -> tuple[int, ...]:
        """Returns a list of whole numbers from 0. An absent list is empty."""
        values = self._value(name, [])
        if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
            raise self.refusal(name, "; it must be a list of whole numbers from 0")
        return tuple(values)

    def table(self, name: str) -> dict[str, Any]:
        value = self._fields.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.refusal(name, "; it must be an object")
        return value or {}

    def within(self, name: str, fields: dict[str, Any]) -> "ConfigFields":
        """Wraps `fields`, the content of the field `name`. Errors name its fields `name.field`."""
        return ConfigFields(fields, self._path, f"{self._within}{name}.")

    def _refuse(self, name: str, value: Any, complaint: str) -> ConfigError:
        return ConfigError(f"{self._path}: {self._within}{name} is {value!r:.100}{complaint}")

    def _value(self, name: str, default: Any) -> Any:
        value = self._fields.get(name)
        return default if value is None else value


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def read_json_object(path: Path) -> dict[str, Any]:
    """Reads a JSON file. Raises OSError, or ConfigError if the file does not hold a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}; it must be a JSON object")
    return value
