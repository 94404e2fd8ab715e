"""How results of `vllm bench serve` become rows and bars, and what a server or client that fails looks like."""

from pathlib import Path

import pytest

import bench.peer_environments as peer_environments
from bench.live_platform import Setup
from bench.serving_peers import (
    Case,
    Load,
    Mix,
    MixRun,
    Popularity,
    bar_rows,
    peer_tables,
    popularity_rows,
    popularity_tables,
    result_row,
)
from bench.workload import ModelSize

_TINY = ModelSize(hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=300)
_SETUP = Setup(_TINY, flags=("--kernels", "torch"))
_CLOSED, _OPEN = Load("closed", 3, 8), Load("open", 3, 8, 2.0)
_CASE = Case(2, (_CLOSED, _OPEN), 10.0)


def result(tokens_per_s: float, ttft_ms: float, itl_ms: float, **other: object) -> dict[str, object]:
    """The fields of a result file of `vllm bench serve` that the bench reads, and two that it does not."""
    return {
        "backend": "openai",
        "duration": 1.5,
        "completed": 3,
        "failed": 0,
        "total_output_tokens": 24,
        "output_throughput": tokens_per_s,
        "median_ttft_ms": ttft_ms / 2,
        "p99_ttft_ms": ttft_ms,
        "median_itl_ms": itl_ms / 2,
        "p99_itl_ms": itl_ms,
        "p99_e2el_ms": 900.0,
        "errors": ["", "", ""],
    } | other


def test_a_result_file_becomes_a_row() -> None:
    row = result_row(_CASE, _OPEN, "vLLM", result(16.0, 100.0, 20.0))
    assert row == {
        "case": "2 adapters",
        "loop": "open",
        "server": "vLLM",
        "in/out": "8/8",
        "rate/s": 2.0,
        "requests": 3,
        "failed": 0,
        "tokens/s": 16.0,
        "TTFT p50 ms": 50.0,
        "TTFT p99 ms": 100.0,
        "ITL p50 ms": 10.0,
        "ITL p99 ms": 20.0,
        "E2E p99 ms": 900.0,
        "reason": "",
    }


def test_a_failed_request_and_missing_tokens_are_reasons() -> None:
    refused = result(
        9.0, 1.0, 1.0, completed=2, failed=1, total_output_tokens=16, errors=["", "Not\nFound\n", ""]
    )
    row = result_row(_CASE, _CLOSED, "slora", refused)
    assert (row["failed"], row["reason"]) == (1, "Found")
    short = result_row(_CASE, _CLOSED, "slora", result(9.0, 1.0, 1.0, total_output_tokens=23))
    assert short["reason"] == "23 tokens instead of 24"


def test_a_bar_counts_higher_throughput_and_lower_latency_as_better() -> None:
    rows = [
        result_row(_CASE, _CLOSED, "slora", result(90.0, 50.0, 30.0)),
        result_row(_CASE, _CLOSED, "vLLM", result(10.0, 100.0, 15.0)),
        result_row(_CASE, _OPEN, "slora", result(8.0, 50.0, 30.0)),
    ]
    bars = [
        (bar["loop"], bar["figure"], bar["times better"], bar["verdict"]) for bar in bar_rows(rows, [_CASE])
    ]
    assert bars == [
        ("closed", "tokens/s", 9.0, "MISSED"),
        ("closed", "TTFT p99 ms", 2.0, "met"),
        ("closed", "ITL p99 ms", 0.5, "MISSED"),
        # An open loop has the throughput of its arrivals, so it has no bar.
        ("open", "TTFT p99 ms", None, "not measured"),
        ("open", "ITL p99 ms", None, "not measured"),
    ]


def test_a_vllm_that_is_not_installed_is_a_reason_in_each_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_environments, "HOME", tmp_path)
    rows, bars = peer_tables(quick=True, setup=_SETUP).values()
    assert {row["reason"] for row in rows} == {"not installed; `make bench-peers` does it"}
    assert len(rows) == 4 and {bar["verdict"] for bar in bars} == {"not measured"}


def test_even_popularity_is_compared_with_zipfs_round_by_round() -> None:
    even, skewed = Mix(10, 4, None), Mix(10, 4, 1.5)
    assert even.draw(20, 0) == [*range(10)] * 2
    drawn = skewed.draw(2000, 0)
    # The weights 1, 2 ** -1.5, ... 10 ** -1.5 have the sum 1.995.
    assert drawn.count(0) / 2000 == pytest.approx(1 / 1.995, abs=0.05) and max(drawn) == 9
    runs = {
        even: [MixRun(70.0, 4), MixRun(90.0, 4), MixRun(80.0, 4)],
        skewed: [MixRun(100.0, 2), MixRun(100.0, 3), MixRun(160.0, 2)],
    }
    rows = popularity_rows(Popularity(1000, ((10, 4),), 20, 8, 3), runs)
    assert [(row["tokens/s"], row["adapters at once"]) for row in rows] == [(80.0, 4), (100.0, 3)]
    assert [(row["even over Zipf"], row[">= 0.8"]) for row in rows] == [(0.7, "MISSED"), (None, None)]


@pytest.mark.soak
def test_the_part_without_vllm_prints_its_table() -> None:
    (rows,) = popularity_tables(quick=True, setup=_SETUP).values()
    assert [row["streams"] for row in rows] == [4, 4, 8, 8] and all(row["tokens/s"] > 0 for row in rows)
