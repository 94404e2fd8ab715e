"""Tuning at a size that Triton's interpreter goes through, and what is chosen of rows that were made up."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu.resumed_table import ResumedTable
from bench.gpu.tune import (
    Scope,
    TunedStep,
    Tuning,
    choose,
    expand_candidates,
    shrink_candidates,
    write_choice,
)
from bench.table import Row
from slora_kernels.gpu.lora_sizes import SIZES_FILE, read_sizes
from slora_kernels.gpu.triton_kernels import TritonKernels
from slora_kernels.layout import llama_shape

CPU = torch.device("cpu")
SMALL = Scope(
    shapes=(llama_shape(1, 64, 4, 2, 16, 96, 100, 4),),
    dtype=torch.float32,
    ranks=(5,),
    steps=(TunedStep(2, 2), TunedStep(1, 1, 3)),
    shrinks=shrink_candidates((1, 2), (16,), (1,), (4,), (2,)),
    expands=expand_candidates(((2, 4),), ((4, 1, 1),)),
)
SHARED_LIMIT = 227 * 1024


def test_each_candidate_is_measured_and_the_choice_is_a_table(tmp_path: Path) -> None:
    rows = ResumedTable(tmp_path / "rows.jsonl", CPU)
    assert rows.fill(Tuning(SMALL, CPU).cases(), 600)
    measured = rows.rows()
    # Two inputs' widths, two steps, two candidates; three outputs' widths, one candidate for each of the two steps.
    assert [sum(row["kernel"] == kernel for row in measured) for kernel in ("shrink", "expand")] == [8, 6]
    assert all(row["us"] > 0 for row in measured)
    path = tmp_path / "table.json"
    path.write_text(SIZES_FILE.read_text(encoding="utf-8"), encoding="utf-8")
    write_choice(path, "sm_90", choose(measured))
    before, tables = json.loads(SIZES_FILE.read_text(encoding="utf-8")), read_sizes(path)
    assert [sizes.max_width for sizes in tables["sm_90"].shrink] == [64, None]
    assert [sizes.max_width for sizes in tables["sm_90"].expand] == [64, 128, None]
    assert json.loads(path.read_text(encoding="utf-8"))["default"] == before["default"]


def test_a_candidate_that_computes_something_else_is_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = TritonKernels.expand

    def expand(self: TritonKernels, out: torch.Tensor, *arguments: Any) -> None:
        plain(self, out, *arguments)
        out[-1, -1] += 0.01

    monkeypatch.setattr(TritonKernels, "expand", expand)
    rows = ResumedTable(tmp_path / "rows.jsonl", CPU)
    with pytest.raises(AssertionError, match="not close"):
        rows.fill(Tuning(SMALL, CPU).cases(), 600)
    assert rows.rows() == []


def make_up(us: Callable[[dict[str, Any]], float]) -> list[Row]:
    scope = replace(
        SMALL,
        ranks=(8, 64),
        shrinks=shrink_candidates((4, 8), (16, 64), (1,), (4,), (2,)),
        expands=expand_candidates(((2, 4), (2, 8)), ((4, 1, 1), (16, 1, 1))),
    )
    keys = [key for key, _ in Tuning(scope, CPU).cases()]
    return [key | {"us": us(key | json.loads(key["candidate"]))} for key in keys]


def test_splits_go_by_width_and_tiles_by_rank() -> None:
    def us(row: dict[str, Any]) -> float:
        if row["kernel"] == "expand":
            return 1.0
        best_splits = 4 if row["width"] == 64 else 8
        best_rank = 16 if row["rank"] == 8 else 64
        # At rank 8 alone the other splits would be a little better: no reason to take them there.
        other = 1.5 if row["rank"] == 64 else 0.9
        return (1.0 if row["splits"] == best_splits else other) * (
            1.0 if row["tiles"][0]["block_rank"] == best_rank else 2.0
        )

    narrow, wide = choose(make_up(us))["shrink"]
    assert (narrow["max_width"], narrow["splits"], wide["max_width"], wide["splits"]) == (64, 4, None, 8)
    for entry in (narrow, wide):
        assert [(tile["max_rank"], tile["block_rank"]) for tile in entry["tiles"]] == [(24, 16), (None, 64)]


def test_decode_steps_choose_the_sizes_of_rows_and_chunks_those_of_tiles() -> None:
    def us(row: dict[str, Any]) -> float:
        if row["kernel"] == "shrink":
            return 1.0
        if row["tokens"] == 1:
            return 1.0 if row["rows"]["block_rank"] == 16 else 2.0
        return 4.0 if row["tiles"][0]["num_warps"] == 8 else 4.5

    for entry in choose(make_up(us))["expand"]:
        assert entry["rows"]["block_rank"] == 16
        assert [tile["num_warps"] for tile in entry["tiles"]] == [8, 8]


@pytest.mark.soak
def test_candidates_compile_without_spills_for_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-P", "-m", "bench.gpu.tune", "--compile", "sm_90", "--every", "1"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=1800, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert {kernel["kernel"] for kernel in compiled} == {
        "_lora_shrink_kernel",
        "_lora_expand_kernel",
        "_lora_expand_rows_kernel",
    }
    for kernel in compiled:
        assert kernel["spills"] == 0 and kernel["shared_bytes"] <= SHARED_LIMIT, kernel
