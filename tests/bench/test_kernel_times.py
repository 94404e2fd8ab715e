"""The GPU's bench at a size that a CPU goes through, with kernels that a CPU has."""

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from bench.gpu import layer_times
from bench.gpu.kernel_times import Case, KernelTimes, Sizes, compare
from bench.gpu.layer_times import LayerTimes
from bench.gpu.layer_times import compare as compare_layers
from bench.gpu.resumed_table import ResumedTable
from bench.table import Row
from slora_kernels.kernel_selector import select_kernels
from slora_kernels.layout import llama_shape

CPU = torch.device("cpu")
SMALL = Sizes(
    llama_shape(2, 64, 4, 2, 16, 96, 100, 4),
    torch.float32,
    batches=(1, 3),
    adapters=(1, 2),
    contexts=(32,),
    chunks=(5,),
    copy_bytes=1 << 20,
)
KINDS = ["copy", "lora", "decode", "prefill", "sample"]


def times() -> KernelTimes:
    return KernelTimes(SMALL, select_kernels("torch", CPU), CPU)


def test_every_case_is_a_row_with_its_bytes(tmp_path: Path) -> None:
    table = ResumedTable(tmp_path / "rows.jsonl", CPU)
    assert table.fill(times().cases(KINDS), 60)
    rows = compare(table.rows())
    count = {kind: sum(row["kind"] == kind for row in rows) for kind in KINDS}
    # Four kinds of ranks and four sites; of two batches the smaller one holds no two adapters. KV in two formats, and
    # latents.
    assert count == {"copy": 1, "lora": 4 * 4 * 3, "decode": 3 * 2, "prefill": 3 * 2, "sample": 3 * 2}
    assert all(row["us"] > 0 and row["of copy"] > 0 for row in rows)
    qkv = {"kind": "lora", "site": "qkv", "rank": "mixed", "adapters": 2, "batch": 3}
    (row,) = [row for row in rows if qkv.items() <= row.items()]
    # Ranks 8 and 16 of q, k and v; three tokens in and out.
    assert row["MB"] * 1e6 == 24 * (3 * 64 + 128) * 4 + 3 * 64 * 4 + 2 * 3 * 128 * 4
    decode, fp8, latents = [row for row in rows if row["kind"] == "decode" and row["batch"] == 3]
    assert decode["MB"] * 1e6 == 3 * 32 * 2 * 2 * 16 * 4
    # A page's 1024 numbers and 64 scales of two bytes, in whole segments.
    assert fp8["MB"] * 1e6 == 3 * 2 * 1280
    assert latents["MB"] * 1e6 == 3 * 32 * 576 * 4


def test_an_interrupted_run_resumes_where_it_stopped(tmp_path: Path) -> None:
    path, measured = tmp_path / "rows.jsonl", list[int]()

    def cases(most: int) -> list[Case]:
        def measure(number: int) -> Row:
            if len(measured) == most:
                raise KeyboardInterrupt
            measured.append(number)
            return {"us": 1.0}

        return [({"case": number}, lambda n=number: measure(n)) for number in range(4)]

    with pytest.raises(KeyboardInterrupt):
        ResumedTable(path, CPU).fill(cases(2), 60)
    assert measured == [0, 1]
    assert not ResumedTable(path, CPU).fill(cases(9), 0)
    assert measured == [0, 1]
    assert ResumedTable(path, CPU).fill(cases(9), 60)
    assert measured == [0, 1, 2, 3] and len(ResumedTable(path, CPU).rows()) == 4
    # What another version measured does not count.
    path.write_text(
        path.read_text(encoding="utf-8").replace(f'"torch": "{torch.__version__}"', '"torch": "0.1"'),
        encoding="utf-8",
    )
    assert ResumedTable(path, CPU).rows() == []


LAYERS = Sizes(
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
    assert table.fill(LayerTimes(LAYERS, CPU, batch=5).cases(["layers", "mixed", "fp8"]), 600)
    rows = compare_layers(table.rows())
    assert len(rows) == 1 + 2 * (1 + len(layer_times.PLACES)) + 4
    errors = {(row["part"], row.get("place")): row["error"] for row in rows if "error" in row}
    assert all(error < 1e-5 for error in errors.values()), errors
    placed = [row for row in rows if row.get("place", "base") != "base"]
    assert all("over base us" in row and row["same bits"] for row in placed)
