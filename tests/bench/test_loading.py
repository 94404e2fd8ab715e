"""Small runs of what tells how adapters load: real servers on a tiny model."""

import pytest

from bench.cold_start import DISK, FILE, HOST, REDIS, cold_start_tables
from bench.live_platform import Setup
from bench.load_storm import storm_tables
from bench.load_stream import stream_tables
from bench.many_adapters import many_tables
from bench.tier_rates import CHUNK_BYTES
from bench.workload import ModelSize

_TINY = ModelSize(hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=96)
_SETUP = Setup(_TINY, CHUNK_BYTES, ("--kernels", "torch"))
_ANSWERS = ("met", "MISSED")


@pytest.mark.soak
def test_the_first_token_is_measured_from_every_tier() -> None:
    """An adapter that is not where it should be, or comes from elsewhere, ends the run."""
    (by_tier,) = cold_start_tables(1, (16, 64), _SETUP).values()
    assert [(row["tier"], row["MB"] > 0.2) for row in by_tier] == [
        (tier, is_large) for tier in (HOST, FILE, DISK, REDIS) for is_large in (False, True)
    ]
    for row in by_tier:
        assert row["cold ms"] > 0 and row["warm ms"] > 0 and row["floor ms"] > 0
        assert (row["verdict"] is None) == (row["tier"] == DISK)
        assert (row["hash ms"] is None) == (row["tier"] == HOST)


@pytest.mark.soak
def test_a_storm_is_of_adapters_that_are_all_cold_and_then_all_warm() -> None:
    (rows,) = storm_tables(1, 9, 4, _SETUP, ("redis",)).values()
    assert [(row["tier"], row["tenants"]) for row in rows] == [("redis", 1), ("redis", 8)]
    assert all(row["last first token ms"] > row["floor ms"] > 0 for row in rows)


@pytest.mark.soak
def test_decoding_streams_are_measured_while_an_adapter_loads() -> None:
    (rows,) = stream_tables(1, 1, (4, 64), _SETUP, threads=(1,)).values()
    (row,) = rows
    assert row["gaps"] > 0 and row["gap p50 ms"] <= row["p99 ms"] and row["ping ms"] > 0
    assert row["<= 1.2"] in _ANSWERS and row["<= 5 ms"] in _ANSWERS


@pytest.mark.soak
def test_servers_with_few_and_with_many_adapters_are_compared() -> None:
    """Here one with itself: each takes seconds to start."""
    rows, verdicts = many_tables(1, (40,)).values()
    assert [(row["database"], row["adapters"]) for row in rows] == [("SQLite", 40), ("PostgreSQL", 40)]
    measured = [name for name in rows[0] if name not in ("database", "adapters")]
    assert all(row[name] > 0 for row in rows for name in measured)
    assert [row["of"] for row in verdicts] == 2 * measured
    assert all(row["times"] == 1.0 and row["verdict"] == "met" for row in verdicts)
