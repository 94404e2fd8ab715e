from itertools import combinations, product

import pytest

from tests.support.covering import choose_covering

CASES = [dict(zip("abc", values, strict=True)) for values in product(range(4), range(3), range(2))]


@pytest.mark.parametrize(("strength", "most"), [(1, 4), (2, 14), (3, 24)])
def test_every_value_or_pair_occurs_in_few_cases(strength: int, most: int) -> None:
    chosen = [CASES[index] for index in choose_covering(CASES, strength)]
    assert len(chosen) <= most
    for names in combinations("abc", strength):
        expected = {tuple(case[name] for name in names) for case in CASES}
        assert {tuple(case[name] for name in names) for case in chosen} == expected


def test_what_no_case_has_is_not_missed() -> None:
    cases = [{"a": 0, "b": 0}, {"a": 1, "b": 1}]
    assert choose_covering(cases, 2) == [0, 1]
    assert choose_covering([{}], 2) == [0]
    assert choose_covering([], 2) == []


@pytest.mark.covering(1)
@pytest.mark.parametrize("first", range(3))
@pytest.mark.parametrize("second", range(4))
def test_the_quick_run_has_few_cases(
    request: pytest.FixtureRequest, first: int, second: int, *, soak: bool
) -> None:
    name = request.function.__name__
    assert soak or sum(item.name.startswith(name) for item in request.session.items) <= 4
