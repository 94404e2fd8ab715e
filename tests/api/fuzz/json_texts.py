"""Strategies for hostile JSON. They generate text, because some of it is nested deeper than Python can serialize."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

__all__ = ["ODD_TEXTS", "json_object", "mutated_object", "odd_json", "odd_numbers"]

ODD_TEXTS: Sequence[str] = (
    "", " ", "default", "small", "small@latest", "small@1", "small@99999999999999999999", "../../etc/passwd", "a\x00b",
    "\ud800", "\udfff\ud800", "\u202e\u2028\u0085", "👩‍👩‍👧", "e\u0301" * 50, "x" * 20_000, "{{ 7 * 7 }}", "%00%ff",
)  # fmt: skip
odd_numbers = st.sampled_from(
    [
        *(
            sign * value + offset
            for sign in (1, -1)
            for value in (0, 1, 2**31, 2**63, 2**64)
            for offset in (-1, 0)
        ),
        10**400,
        0.5,
        1.5,
        -0.0,
        5e-324,
        1e308,
        float("nan"),
        float("inf"),
        True,
    ]
)
_texts = st.one_of(st.sampled_from(ODD_TEXTS), st.text(max_size=30))
_small = st.recursive(
    st.one_of(st.none(), odd_numbers, _texts),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(_texts, inner, max_size=3)),
    max_leaves=8,
).map(json.dumps)
_DEPTHS = (50, 500, 5_000, 200_000)
_COUNTS = (20, 300, 5_000, 50_000)
_ITEMS = ("0", '"a"', "[]", "[1]", "{}", "null", '{"role": "user", "content": ""}', "1e400")
_deep = st.builds(
    lambda depth, pair: pair[0] * depth + pair[1] * depth,
    st.sampled_from(_DEPTHS),
    st.sampled_from([("[", "]"), ('{"a":', "}"), ("[", "")]),
)
_huge = st.builds(
    lambda count, item: "[" + ", ".join([item] * count) + "]",
    st.sampled_from(_COUNTS),
    st.sampled_from(_ITEMS),
)
# One value of a field. Large values are rare, because each costs as much as a hundred small ones.
odd_json = st.integers(0, 19).flatmap(lambda at: _deep if at == 0 else _huge if at == 1 else _small)


def json_object(fields: dict[str, str]) -> str:
    """A JSON object. Each value of `fields` is already JSON text."""
    return "{" + ", ".join(f"{json.dumps(name)}: {value}" for name, value in fields.items()) + "}"


def mutated_object(
    proper: dict[str, Any], known: Sequence[str], plausible: Mapping[str, Sequence[Any]]
) -> st.SearchStrategy[str]:
    """The valid object with other values in some of the known fields, and sometimes with an unknown field.

    plausible: valid values for each field. Half of the objects have no odd value, because one odd value is enough for a
    refusal.
    """
    mild = st.fixed_dictionaries(
        {},
        optional={
            name: st.sampled_from(plausible[name]).map(json.dumps) for name in known if name in plausible
        },
    )
    names = st.one_of(st.sampled_from(list(known)), st.just("unknown"))
    odd = st.dictionaries(names, odd_json, min_size=1, max_size=2)
    written = {name: json.dumps(value) for name, value in proper.items()}
    return st.one_of(mild, st.builds(lambda a, b: {**a, **b}, mild, odd), odd).map(
        lambda changed: json_object({**written, **changed})
    )
