"""The GPU's bench of LoRA at its places, at a size that the interpreter goes through."""

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from bench.gpu import layer_times
from bench.gpu.kernel_times import Sizes
from bench.gpu.layer_times import LayerTimes, compare
from bench.gpu.resumed_table import ResumedTable
from slora_kernels.layout import llama_shape

CPU = torch.device("cpu")
SMALL = Sizes(
    llama_shape(2, 64, 4, 2, 16, 96, 100, 4),
    torch.float32,
    batches=(),
    adapters=(),
    contexts=(),
    chunks=(),
    copy_bytes=1 << 20,
)


@pytest.fixture
def small_cases() -> Iterator[None]:
    places = {name: getattr(layer_times, name)[:2] for name in ("PLACES", "MIXED_PLACES")}
    sizes = {"LOADS": ((2, 8),), "MIXED_LOADS": ((2, 8),), "CHUNK_TOKENS": 7, "ATTENTIONS": ((3, 40),)}
    with patch.multiple(layer_times, **places, **sizes):
        yield


@pytest.mark.soak
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here, which measures real sizes")
def test_every_place_and_every_attention_computes_what_torch_does(tmp_path: Path, small_cases: None) -> None:
    table = ResumedTable(tmp_path / "rows.jsonl", CPU)
    assert table.fill(LayerTimes(SMALL, CPU, batch=5).cases(["layers", "mixed", "fp8"]), 600)
    rows = compare(table.rows())
    assert len(rows) == 1 + 2 * (1 + len(layer_times.PLACES)) + 4
    errors = {(row["part"], row.get("place")): row["error"] for row in rows if "error" in row}
    assert all(error < 1e-5 for error in errors.values()), errors
    placed = [row for row in rows if row.get("place", "base") != "base"]
    assert all("over base us" in row and row["same bits"] for row in placed)
