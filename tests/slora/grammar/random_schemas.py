"""Random JSON schemas with the keywords that structured output enforces, and forms that cover them by hand."""

from typing import Any

from hypothesis import strategies as st

_NAMES = st.sampled_from(["a", "b", "name", "first name", 'quo"te', "é", "$ref"])
_TEXTS = st.sampled_from(["x", "yes", "no", "tab\t", 'quo"te', "日本"])
_PATTERNS = st.sampled_from(["^[A-Z]{2}-[0-9]{1,3}$", "^a*b$", "[0-9]", "^(x|yz){1,4}$", "^.{0,3}$"])
_FORMATS = st.sampled_from(["date", "time", "date-time", "uuid", "email", "ipv4"])
_BOUNDS = st.tuples(st.integers(-50, 50), st.integers(0, 60)).map(lambda pair: (pair[0], sum(pair)))

Schema = dict[str, Any]


def _bounded(kind: str, pair: tuple[int, int], strict: bool) -> Schema:
    least, most = pair
    if strict:
        return {"type": kind, "exclusiveMinimum": least - 1, "exclusiveMaximum": most + 1}
    return {"type": kind, "minimum": least, "maximum": most}


LEAVES: st.SearchStrategy[Schema] = st.one_of(
    st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"type": "integer"}, {"type": "number"}]),
    st.builds(_bounded, st.sampled_from(["integer", "number"]), _BOUNDS, st.booleans()),
    st.integers(1, 40).map(lambda factor: {"type": "integer", "multipleOf": factor}),
    st.lists(_TEXTS, min_size=1, unique=True).map(lambda texts: {"enum": [*texts, None, 3]}),
    _TEXTS.map(lambda text: {"const": text}),
    st.tuples(st.integers(0, 4), st.integers(0, 4)).map(
        lambda pair: {"type": "string", "minLength": pair[0], "maxLength": sum(pair)}
    ),
    _PATTERNS.map(lambda pattern: {"type": "string", "pattern": pattern}),
    _FORMATS.map(lambda name: {"type": "string", "format": name}),
    st.just({"type": ["string", "null"], "maxLength": 5}),
)


@st.composite
def _objects(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    properties = draw(st.dictionaries(_NAMES, inner, max_size=4))
    required = [name for name in properties if draw(st.booleans())]
    schema: Schema = {"type": "object", "properties": properties, "required": required}
    extra = draw(st.sampled_from([None, False, {"type": "integer"}]))
    return schema if extra is None else schema | {"additionalProperties": extra}


@st.composite
def _arrays(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    prefix = draw(st.lists(inner, max_size=2))
    least = draw(st.integers(0, 3))
    schema: Schema = {"type": "array", "minItems": least, "maxItems": least + draw(st.integers(0, 3))}
    if prefix:
        schema["prefixItems"] = prefix
    return schema | {"items": draw(inner)}


SCHEMAS: st.SearchStrategy[Schema] = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        _objects(inner),
        _arrays(inner),
        st.lists(inner, min_size=1, max_size=3).map(lambda some: {"anyOf": some}),
    ),
    max_leaves=8,
)

RECURSIVE: Schema = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer", "maximum": 9},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
