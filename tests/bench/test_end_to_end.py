"""The GPU's benches of the whole engine, at a size that a CPU goes through."""

from pathlib import Path

import pytest
import torch

from bench.gpu import end_to_end, overlap
from bench.gpu.end_to_end import EndToEnd
from bench.gpu.overlap import Overlap
from bench.gpu.random_engine import LLAMA_8B
from bench.gpu.resumed_table import ResumedTable

CPU = torch.device("cpu")


# Of peft, which asks transformers in a way of before.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_every_case_is_measured_and_compared(tmp_path: Path) -> None:
    table = ResumedTable(tmp_path / "rows.jsonl", CPU)
    bench = EndToEnd(end_to_end.SMALL, table.rows)
    assert table.fill(bench.cases(list(end_to_end.KINDS)), 600)
    rows = end_to_end.compare(table.rows())
    decodes = [row for row in rows if row["kind"] == "decode"]
    assert [(row["graphs"], row["adapters"]) for row in decodes] == [
        (g, n) for g in (True, False) for n in (0, 1, 2)
    ]
    assert [row["of base"] for row in decodes if row["adapters"] == 0] == [1.0, 1.0]
    assert all(0 < row["floor"] < 1 for row in decodes if row["adapters"])
    servings = [row for row in rows if row["kind"] == "serving"]
    assert len(servings) >= 5 and all(row["errors"] == 0 and row["p99 TTFT s"] > 0 for row in servings)
    for load in ("saturated", "calm"):
        (many,) = [row for row in servings if row["load"] == load and row["adapters"] == 6]
        assert many["of floor"] > 0 and many["p99 over few"] > 0
        # Each of them came to the pool in the first run that asked for it.
        assert bool(many["loads"]) == (load == "saturated")
    contest = {row["contender"]: row["requests/s"] for row in rows if row["kind"] == "contest"}
    assert len(contest) == 3 and all(contest.values())
    # Run again, it measures nothing more.
    before = table.rows()
    assert table.fill(EndToEnd(end_to_end.SMALL, table.rows).cases(list(end_to_end.KINDS)), 0)
    assert table.rows() == before


def test_the_floor_of_eight_adapters_is_that_of_their_bytes() -> None:
    adapter_bytes, weight_bytes = LLAMA_8B.layout(16).num_bytes, LLAMA_8B.weight_bytes()
    assert adapter_bytes == 80 << 20
    assert abs(weight_bytes / (weight_bytes + 8 * adapter_bytes) - 0.957) < 0.001


def test_gaps_are_measured_in_decoding_requests_while_cold_adapters_load(tmp_path: Path) -> None:
    table = ResumedTable(tmp_path / "rows.jsonl", CPU)
    assert table.fill(Overlap(overlap.SMALL).cases(), 600)
    rows = {row["case"]: row for row in overlap.compare(table.rows())}
    assert rows[overlap.ALONE]["over alone"] == 1.0 and rows[overlap.ALONE]["others"] == 0
    cold, base = rows[overlap.BESIDE_COLD], rows[overlap.BESIDE_BASE]
    # All but what came in the last moments was loaded; those for the base bring nothing.
    assert 0 < cold["loads"] <= cold["others"] and base["others"] > 0 and base["loads"] == 0
