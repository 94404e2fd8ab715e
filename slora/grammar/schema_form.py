"""Prepares JSON schemas for the grammar library.

- White space is bounded or not allowed. Otherwise a model may write blanks until `max_tokens` ends its answer.
- A negated class of a pattern, such as `[^"]`, also excludes NUL. The library would otherwise let a class that has all
  control characters match escaped quotation marks and backslashes, which the class excludes.
- A `oneOf` whose branches exclude one another becomes an `anyOf`, which the library compiles. Branches exclude one
  another if they have different types, or a property that has no value in common. That property becomes required,
  because only then do the branches exclude one another. So each answer is valid under the schema as it was sent.
"""

import json
import re
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

Schema = dict[str, Any]

# At most one line break with its indentation, or some blanks, between two tokens of JSON.
_WHITE_SPACE = r"(\r?\n)?[ \t]{0,32}"
_OPTIONS = {"x-guidance": {"whitespace_pattern": _WHITE_SPACE}}
_COMPACT = {"x-guidance": {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}}
# Keywords whose values are data, and keywords whose values are schemas by name.
_DATA = frozenset({"const", "enum", "default", "examples"})
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_TYPES = frozenset({"object", "array", "string", "number", "boolean", "null"})
_MAX_HOPS = 16
# An escape, or the beginning of a negated class. At its beginning, `-` and `]` stand for themselves.
_NEGATED = re.compile(r"\\.|\[\^(-+|\]?)", re.DOTALL)
# All pairs of this many branches are compared. Larger unions need one property that tells all branches apart.
_MAX_BRANCHES = 32


def prepare_schema(schema: Mapping[str, Any] | bool, *, is_compact: bool = False) -> str:
    """Returns the schema as JSON for the grammar library. is_compact: whether JSON has no white space."""
    if schema is False:
        return "false"
    root: Schema = {} if schema is True else json.loads(json.dumps(schema))
    union = _Unions(root)
    for _, node in _walk(root):
        if isinstance(node.get("oneOf"), list) and "anyOf" not in node:
            union.rewrite(node)
        if isinstance(pattern := node.get("pattern"), str):
            node["pattern"] = _exclude_nul(pattern)
        if isinstance(patterns := node.get("patternProperties"), dict):
            node["patternProperties"] = {_exclude_nul(pattern): value for pattern, value in patterns.items()}
    return json.dumps({**root, **(_COMPACT if is_compact else _OPTIONS)})


def _exclude_nul(pattern: str) -> str:
    return _NEGATED.sub(_add_nul, pattern)


def _add_nul(found: re.Match[str]) -> str:
    if found[1] is None:
        return found[0]
    return rf"[^\x00\{found[1][0]}" if found[1] else r"[^\x00"


def find_keyword(schema: Mapping[str, Any] | bool, keyword: str) -> str | None:
    """Returns the path of the first schema that has the keyword, such as `$.properties.pet`."""
    nodes = () if isinstance(schema, bool) else _walk(dict(schema))
    return next((path for path, node in nodes if keyword in node), None)


def _walk(root: Schema) -> Iterator[tuple[str, Schema]]:
    """Yields all schemas with their paths, outer ones first. A schema may be changed when it is yielded."""
    nodes: list[tuple[str, Any, bool]] = [("$", root, False)]
    while nodes:
        path, node, is_map = nodes.pop()
        if isinstance(node, list):
            nodes += [(f"{path}[{at}]", item, False) for at, item in reversed([*enumerate(node)])]
        elif isinstance(node, dict):
            if not is_map:
                yield path, node
            nodes += [
                (f"{path}.{key}", value, not is_map and key in _MAPS)
                for key, value in reversed([*node.items()])
                if is_map or key not in _DATA
            ]


class _Unions:
    """Rewrites the unions of one schema."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        # A definition and the properties that are required in addition -> the definition that requires them.
        self._names: dict[tuple[str, frozenset[str]], str] = {}

    def rewrite(self, node: Schema) -> None:
        """Replaces `oneOf` by `anyOf` if the branches exclude one another."""
        branches = [*self._flatten(node["oneOf"], 0)]
        resolved = [self._resolve(branch) for branch in branches]
        required = _find_required([form for form in resolved if form is not None])
        if None in resolved or required is None:
            return
        del node["oneOf"]
        node.pop("discriminator", None)
        node["anyOf"] = [
            self._require(branch, form or {}, names)
            for branch, form, names in zip(branches, resolved, required, strict=True)
        ]

    def _flatten(self, branches: list[Any], depth: int) -> Iterator[Any]:
        """Yields the branches. A branch that is only a union itself is replaced by its branches."""
        for branch in branches:
            union = self._resolve(branch)
            is_union = union is not None and union.keys() <= {
                "oneOf",
                "discriminator",
                "title",
                "description",
            }
            if union is not None and is_union and isinstance(union.get("oneOf"), list) and depth < _MAX_HOPS:
                yield from self._flatten(union["oneOf"], depth + 1)
            else:
                yield branch

    def _resolve(self, branch: Any) -> Schema | None:
        """Follows references within the schema. Returns None if the result is not known."""
        for _ in range(_MAX_HOPS):
            if not isinstance(branch, dict):
                return None
            reference = branch.get("$ref")
            if reference is None:
                return branch
            if not isinstance(reference, str) or branch.keys() - {"$ref", "title", "description"}:
                return None
            branch = self._find(reference)
        return None

    def _find(self, reference: str) -> Any:
        if not reference.startswith("#"):
            return None
        node: Any = self._root
        for part in reference[1:].split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            node = node.get(name) if isinstance(node, dict) else None
        return node

    def _require(self, branch: Schema, resolved: Schema, names: frozenset[str]) -> Schema:
        missing = names - set(resolved.get("required") or ())
        if not missing:
            return branch
        narrowed = {**resolved, "required": [*(resolved.get("required") or ()), *sorted(missing)]}
        if "$ref" not in branch:
            return narrowed
        # A definition is copied once, so that many references to it do not make the schema much longer.
        key = branch["$ref"], missing
        if key not in self._names:
            self._names[key] = f"slora-{len(self._names)}"
            self._root.setdefault("$defs", {})[self._names[key]] = narrowed
        return {"$ref": f"#/$defs/{self._names[key]}"}


def _find_required(branches: list[Schema]) -> list[frozenset[str]] | None:
    """Returns, for each branch, the properties that must be required so that no value has two branches. None if there
    are no such properties.
    """
    tags = [_list_tags(branch) for branch in branches]
    common = set(tags[0]).intersection(*tags[1:]) if tags else set()
    for name in sorted(common):
        values = [value for tag in tags for value in tag[name]]
        if len(set(values)) == len(values):
            return [frozenset({name})] * len(branches)
    if len(branches) > _MAX_BRANCHES:
        return None
    required: list[set[str]] = [set() for _ in branches]
    for left, right in combinations(range(len(branches)), 2):
        if not _types(branches[left]) & _types(branches[right]):
            continue
        names = [
            name
            for name in sorted(tags[left].keys() & tags[right].keys())
            if not tags[left][name] & tags[right][name]
        ]
        if not names:
            return None
        required[left].add(names[0])
        required[right].add(names[0])
    return [frozenset(names) for names in required]


def _list_tags(branch: Schema) -> dict[str, frozenset[str]]:
    """Returns the properties of an object that have a few constant values, which are compared as JSON."""
    properties = branch.get("properties")
    if branch.get("type") != "object" or not isinstance(properties, dict):
        return {}
    tags = {}
    for name, value in properties.items():
        listed = value if isinstance(value, dict) else {}
        values = [listed["const"]] if "const" in listed else listed.get("enum")
        if isinstance(values, list) and all(isinstance(value, str | int) for value in values):
            tags[name] = frozenset(map(json.dumps, values))
    return tags


def _types(branch: Schema) -> frozenset[str]:
    """Returns the types that a value of the branch may have."""
    if "const" in branch or "enum" in branch:
        values = [branch["const"]] if "const" in branch else branch["enum"]
        return frozenset(_type_of(value) for value in values) if isinstance(values, list) else _TYPES
    kinds = branch.get("type")
    listed = kinds if isinstance(kinds, list) else [kinds]
    found = frozenset("number" if kind == "integer" else kind for kind in listed if isinstance(kind, str))
    return (
        found if found and len(listed) == len([kind for kind in listed if isinstance(kind, str)]) else _TYPES
    )


def _type_of(value: object) -> str:
    if value is None:
        return "null"
    kinds = ((bool, "boolean"), (str, "string"), (list, "array"), (dict, "object"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "number")
