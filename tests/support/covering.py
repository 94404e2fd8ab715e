"""A few cases of a parametrised test in which the values of any two parameters still meet."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest


def soaked(values: Iterable[Any], *quick: Any) -> list[Any]:
    """The values as parameters, or tuples of values. All but the quick ones are for soak only."""
    return [
        value
        if value in quick
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.soak)
        for value in values
    ]


# The values of the parameters by their names.
Case = Mapping[str, object]


def choose_covering(cases: Sequence[Case], strength: int) -> list[int]:
    """Returns the indices of a few cases. Values of `strength` parameters that meet in any case meet in one of these.

    With strength 1, each value of each parameter occurs. With 2, each pair of values of two parameters does.
    """
    # Values need no hash.
    texts = [[(name, repr(value)) for name, value in sorted(case.items())] for case in cases]
    occurring = [set(combinations(pairs, min(strength, len(pairs)))) for pairs in texts]
    missing = set().union(*occurring)
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda index: len(occurring[index] & missing))
        chosen.append(best)
        missing -= occurring[best]
    return sorted(chosen)
