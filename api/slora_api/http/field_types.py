"""Definitions that the schemas of JSON bodies share: their configuration, the types of text, and checks of values."""

import json
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError, to_json

from slora_adapters.errors import find_nearest
from slora_api.core.listing import MAX_LIMIT
from slora_api.http.request_bounds import MAX_NAME_CHARS
from slora_api.http.unsupported import EMPTY_VALUES, IGNORED_HINTS, is_empty

# No field is ignored silently, and no value is converted.
STRICT = ConfigDict(extra="forbid", strict=True, frozen=True)
# Maximum nesting of arrays and objects. It is deeper than any schema that OpenAI accepts.
MAX_DEPTH = 64
_SHOWN_CHARS = 64
# The names that the header `x-slora-ignored` lists.
_MAX_LISTED = 32
_HEADER_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def make_refusal(text: str, **values: object) -> PydanticCustomError:
    """Returns the error of an invalid value. values: the values of the placeholders in the text. If they include
    `param`, the error names that field instead of the invalid one.
    """
    return PydanticCustomError("invalid_value", text, values)


def refuse_surrogates(value: str) -> None:
    """Refuses lone surrogates. JSON can contain them, but they are not characters, and tokenizers and databases fail on
    them.
    """
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise make_refusal(
            "character {position} is {half}, a lone surrogate and not a character; remove it",
            position=error.start,
            half=f"U+{ord(value[error.start]):04X}",
        ) from None


def check_length(value: str, limit: int) -> None:
    if len(value) > limit:
        raise make_refusal(
            "it has {length} characters, and at most {limit} are accepted; shorten it",
            length=len(value),
            limit=limit,
        )


def check_depth(value: Any, limit: int = MAX_DEPTH) -> Any:
    """Returns the value. Refuses arrays and objects nested more than `limit` levels deep, because writing JSON of 1,000
    levels raises RecursionError.
    """
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(limit):
        if not level:
            return value
        # Comparing types takes half the time of isinstance. Parsed JSON has no subclasses of these types.
        level = [
            item
            for container in level
            for item in (container.values() if type(container) is dict else container)
            if type(item) is dict or type(item) is list
        ]
    if level:
        raise make_refusal("it is nested more than {limit} levels deep; flatten it", limit=limit)
    return value


def check_object(value: dict[str, Any]) -> dict[str, Any]:
    """Returns the JSON object. Refuses an object that contains a lone surrogate or has more than `MAX_DEPTH` levels."""
    try:
        text = to_json(value)
    except ValueError:  # The value has a surrogate, or more levels than `to_json` accepts.
        refuse_surrogates(json.dumps(check_depth(value), ensure_ascii=False))
        raise
    # An object with at most `MAX_DEPTH` brackets cannot be nested too deeply. Most objects are this small, and counting
    # is faster than `check_depth`.
    return value if text.count(b"{") + text.count(b"[") <= MAX_DEPTH else check_depth(value)


@dataclass(slots=True)
class IgnoredFields:
    """The fields of one request that have no effect, although they ask for one. The answer names them in a header.

    ignores_unknown: whether fields that the server does not know are ignored instead of refused (--unknown-fields).
    known: the fields of the object that had an unknown field.
    """

    ignores_unknown: bool = False
    names: dict[str, None] = field(default_factory=dict)
    known: Set[str] = frozenset()

    def add(self, name: str) -> None:
        self.names[name] = None

    def find_nearest(self, unknown: str) -> str | None:
        """Returns the known field that an unknown field was probably meant to be."""
        return find_nearest(unknown[:_SHOWN_CHARS], sorted(self.known))

    @property
    def listed(self) -> str:
        """The value of the header. A name that no header may contain is shown as `?`."""
        names = [name if _HEADER_NAME.fullmatch(name) else "?" for name in islice(self.names, _MAX_LISTED)]
        return ", ".join(dict.fromkeys(names)) + (", ..." if len(self.names) > _MAX_LISTED else "")


def note_ignored(info: ValidationInfo, name: str) -> None:
    """Notes an ignored field, if the validation has a request to note it for."""
    if isinstance(info.context, IgnoredFields):
        info.context.add(name)


def _describe_extra_fields(schema: dict[str, Any], model: type[Any]) -> None:
    schema["additionalProperties"] = {"enum": EMPTY_VALUES}
    if model.hint_path is not None:
        for path, reason in IGNORED_HINTS.items():
            head, dot, name = path.rpartition(".")
            if head + dot == model.hint_path and name not in schema["properties"]:
                schema["properties"][name] = {"description": f"Ignored: {reason}"}


# The class has no docstring, because the OpenAPI document shows the docstrings of all bases of a schema.
#
# A field that the schema lacks is accepted if its value asks for nothing (null, "", [], {}) or if the field is a hint
# (`IGNORED_HINTS`). Any other unknown field is refused, and the error names the known field with the nearest name.
class RequestModel(BaseModel):
    model_config = ConfigDict(**STRICT, json_schema_extra=_describe_extra_fields)
    # The names of the hints in this object begin with this path; None if it has no hints.
    hint_path: ClassVar[str | None] = None

    @classmethod
    def read_body(cls, body: dict[str, Any], ignored: IgnoredFields) -> Self:
        return cls.model_validate(body, context=ignored)

    @model_validator(mode="before")
    @classmethod
    def _drop_ignored(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, dict) or value.keys() <= (known := _find_field_names(cls)):
            return value
        kept, ignored = {}, info.context if isinstance(info.context, IgnoredFields) else IgnoredFields()
        for name, item in value.items():
            if name in known:
                kept[name] = item
            elif cls.hint_path is not None and cls.hint_path + name in IGNORED_HINTS and not is_empty(item):
                ignored.add(cls.hint_path + name)
            elif ignored.ignores_unknown and not is_empty(item):
                ignored.add(name)
            elif not is_empty(item):
                kept[name] = item  # pydantic refuses it.
                ignored.known = known
        return kept


@cache
def _find_field_names(model: type[RequestModel]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in model.model_fields.items())


# Fields of a text part that have no effect. `cache_control` marks a prefix to cache, and prefixes are always cached.
_PART_NOTES = frozenset({"annotations", "cache_control", "citations", "id", "logprobs", "parsed"})


def join_text_parts(value: Any, info: ValidationInfo, *, param: str, kinds: Mapping[str, str]) -> Any:
    """Joins a list of text parts into one text. Any other kind of part is refused by name.

    kinds: maps each accepted value of `type` to the field that holds the text.
    """
    if not isinstance(value, list):
        return value
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in kinds or not isinstance(part.get(kinds[kind]), str):
            shown = repr(kind[:_SHOWN_CHARS]) if isinstance(kind, str) else "it is not a valid name"
            raise make_refusal(
                "`{param}`: a content part of type {kind} is not supported; this model reads text only.",
                param=param,
                kind=shown,
            )
        texts.append(part[kinds[kind]])
        if len(part) > len(("type", "text")):
            _check_part_fields(part, info, param, kind, kinds[kind])
    return "".join(texts)


def _check_part_fields(part: dict[str, Any], info: ValidationInfo, param: str, kind: str, text: str) -> None:
    ignores_unknown = isinstance(info.context, IgnoredFields) and info.context.ignores_unknown
    for name, item in part.items():
        if name in ("type", text) or name in _PART_NOTES or is_empty(item):
            continue
        if not ignores_unknown:
            raise make_refusal(
                "`{param}`: a content part of type {kind} has the field {name}, which this server does not know; "
                "remove it.",
                param=param,
                kind=repr(kind),
                name=repr(name[:_SHOWN_CHARS]),
            )
        note_ignored(info, name)


def _check_text(value: str) -> str:
    refuse_surrogates(value)
    return value


def _check_name(value: str) -> str:
    refuse_surrogates(value)
    check_length(value, MAX_NAME_CHARS)
    return value


Text = Annotated[str, AfterValidator(_check_text)]
Name = Annotated[str, AfterValidator(_check_name)]

# A part of a name of a tenant or an adapter, in a query. Such names have at most 128 characters.
NamePart = Annotated[str, Field(max_length=128)]

# The number of items per page.
Limit = Annotated[int, Field(ge=1, le=MAX_LIMIT)]
