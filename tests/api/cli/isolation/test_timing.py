"""The Kolmogorov-Smirnov test, compared with published values."""

import random

import pytest

from slora_api.cli.isolation.timing import compare_samples


def test_equal_samples_do_not_differ() -> None:
    assert compare_samples([1.0, 2.0, 3.0] * 30, [1.0, 2.0, 3.0] * 30) == (0.0, 1.0)


def test_samples_without_overlap_differ_completely() -> None:
    d, p = compare_samples([float(at) for at in range(250)], [float(at) for at in range(1000, 1250)])
    assert d == 1.0 and p < 1e-100


@pytest.mark.parametrize(
    ("d", "p"),
    # Two samples of 250 values; critical values of D are c(alpha) * sqrt(2 / 250) with c = 1.3581 and 1.9495.
    [(0.1215, 0.05), (0.1744, 0.001)],
)
def test_the_p_value_agrees_with_the_tables_of_critical_values(d: float, p: float) -> None:
    num_values = 250
    shift = round(d * num_values)
    first = [float(at) for at in range(num_values)]
    found, chance = compare_samples(first, [value + shift for value in first])
    assert found == pytest.approx(d, abs=0.002)
    assert chance == pytest.approx(p, rel=0.2)


def test_a_small_difference_in_time_is_found_in_250_samples_and_noise_is_not() -> None:
    draw = random.Random(7)
    fresh, also_fresh = ([draw.gauss(10.0, 1.0) for _ in range(250)] for _ in range(2))
    faster = [draw.gauss(9.0, 1.0) for _ in range(250)]
    assert compare_samples(faster, fresh)[1] < 1e-6
    assert compare_samples(also_fresh, fresh)[1] > 0.001
