"""The baselines beside our pool keep their own books, and the loop around them does what production does."""

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.buddy import Buddy
from bench.machines import A10G_7B
from bench.memory_layouts import reserve_max, reserve_oracle, reserve_pow2
from bench.pool_division import compare, s2_division, shifting_trace
from bench.simulation.traces import TraceRequest


@given(st.integers(1, 3000), st.lists(st.integers(1, 400), max_size=40), st.randoms(use_true_random=False))
def test_buddy_blocks_never_overlap_and_join_again(places: int, wanted: list[int], random: object) -> None:
    buddy = Buddy(places)
    taken: dict[int, int] = {}
    for index, count in enumerate(wanted):
        start = buddy.allocate(count)
        if start is not None:
            taken[start] = buddy.size(start)
            assert buddy.size(start) >= count
        if index % 3 == 2 and taken:
            first = min(taken)
            buddy.release(first)
            del taken[first]
        spans = sorted((start, start + size) for start, size in taken.items())
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        assert all(end <= places for _, end in spans)
        assert buddy.num_taken == sum(taken.values())
    for start in taken:
        buddy.release(start)
    whole = 1 << (places.bit_length() - 1)
    assert buddy.allocate(whole) is not None, "free halves were not joined"


def test_orca_reserves_as_in_the_paper() -> None:
    request = TraceRequest(0.0, 0, 0, 100, 25, 0)
    assert (reserve_max(request), reserve_pow2(request), reserve_oracle(request)) == (2048, 132, 125)


@pytest.fixture(scope="module")
def rows() -> Iterator[dict[str, dict[str, float]]]:
    table = compare(s2_division(A10G_7B, 200, 4, 20.0), 2048)
    yield {row["memory"]: row for row in table}


@pytest.mark.soak
def test_the_simple_loop_with_one_pool_agrees_with_production(rows: dict[str, dict[str, float]]) -> None:
    production, plain = rows["one pool, fcfs, loads at once"], rows["one pool, plain loop"]
    assert plain["running at once"] == pytest.approx(production["running at once"], rel=0.03)
    assert plain["requests/s"] == pytest.approx(production["requests/s"], rel=0.03)


@pytest.mark.soak
def test_no_other_division_runs_more_at_once(rows: dict[str, dict[str, float]]) -> None:
    ours = rows["one pool, fcfs, loads at once"]["running at once"]
    others = [row["running at once"] for name, row in rows.items() if not name.startswith("one pool")]
    assert len(others) == 6
    assert all(other < ours for other in others)


@pytest.mark.soak
def test_contiguous_reservation_wastes_as_in_the_paper(rows: dict[str, dict[str, float]]) -> None:
    shares = [rows[f"contiguous, Orca ({name})"]["useful of taken %"] for name in ("Max", "Pow2", "Oracle")]
    assert shares == sorted(shares) and shares[0] < 30 and shares[2] < 75
    assert rows["one pool (production)"]["useful of taken %"] > 97


def test_a_shifting_trace_has_narrow_and_wide_quarters() -> None:
    trace = shifting_trace(200, 2, 200)
    quarters = [{r.adapter for r in trace if r.arrival_s // 50 == q} for q in range(4)]
    assert len(quarters[0]) > 60 and len(quarters[2]) > 60
    assert len(quarters[1]) < 45 and len(quarters[3]) < 45
