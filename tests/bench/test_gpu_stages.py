"""The driver of the GPU's stages with workers that fail, and the stages themselves on a CPU with a tiny model."""

import json
import os
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import pytest
import torch

from bench.gpu import decode, load
from bench.gpu.all import LOG, ROWS, STAGES, Outcome, Stage, Worker, run_stages
from bench.gpu.decode import KINDS, decode_cases, profile_cases
from bench.gpu.load import cold_cases, serving_cases
from bench.gpu.random_engine import LLAMA_8B, TINY, AdapterKind, RandomEngine
from bench.gpu.resumed_table import ResumedTable
from bench.gpu.stages import TESTS
from bench.gpu.summary import MAX_CHARACTERS, summarize
from bench.table import Row

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
# Names its process in the outcome, so that a test sees which stages shared one.
FAKE_WORKER = """
import json, os, subprocess, sys, time
for line in sys.stdin:
    stage = json.loads(line)["stage"]
    if stage == "hangs":
        subprocess.Popen(["sleep", "600"])
        time.sleep(600)
    if stage == "dies":
        os.abort()
    error = "ValueError: no" if stage == "fails" else None
    print(json.dumps({"whole": error is None, "error": error, "compiled": os.getpid()}), flush=True)
"""


def run_fake(stages: list[Stage], seconds: float, log: Path) -> list[tuple[str, float, Outcome]]:
    noted = []
    with log.open("ab") as file:
        run_stages(
            stages,
            seconds,
            lambda stage: Worker([sys.executable, "-c", FAKE_WORKER], file),
            lambda stage, given_s, took_s, outcome: noted.append((stage.name, given_s, outcome)),
            grace_s=0.1,
        )
    return noted


def test_a_stage_that_fails_dies_or_hangs_never_stops_the_next(tmp_path: Path) -> None:
    stages = [
        Stage("first", "a", 1),
        Stage("fails", "a", 1),
        Stage("second", "a", 1),
        Stage("dies", "a", 1),
        Stage("third", "b", 1),
        Stage("hangs", "b", 0.001),
        Stage("fourth", "b", 1),
        Stage("fifth", "b", 1),
    ]
    outcomes = {name: outcome for name, _, outcome in run_fake(stages, 60, tmp_path / "log")}
    assert list(outcomes) == [stage.name for stage in stages]
    assert all(outcomes[name].whole for name in ("first", "second", "third", "fourth", "fifth"))
    assert outcomes["fails"].error == "ValueError: no"
    assert outcomes["dies"].error == "the process ended with code -6"
    assert outcomes["hangs"].error == "killed, because it did not end in its time"
    # Stages of one group share a process until one of them fails.
    processes = {name: outcome.compiled for name, outcome in outcomes.items()}
    assert processes["first"] == processes["fails"] != processes["second"]
    assert processes["third"] != processes["fourth"] == processes["fifth"]


def test_a_stage_gets_its_share_of_the_time_that_is_left(tmp_path: Path) -> None:
    stages = [Stage("short", "a", 1), Stage("long", "a", 3), Stage("last", "a", 2)]
    given = {name: seconds for name, seconds, _ in run_fake(stages, 600, tmp_path / "log")}
    assert given["short"] == pytest.approx(100, rel=0.01)
    # What the first stage did not use goes to the others.
    assert given["long"] > 300 and given["last"] > 2 * given["short"]


def test_a_case_that_raises_is_a_row_with_its_error_and_is_measured_again(tmp_path: Path) -> None:
    calls = []

    def measure(name: str, *, fails: bool) -> Row:
        calls.append(name)
        if fails:
            raise MemoryError("too large")
        return {"ms": 1.0}

    def fill(*, fails: bool) -> list[Row]:
        table = ResumedTable(tmp_path / ROWS, CPU, {"stage": "decode"})
        cases = [
            ({"case": name}, lambda n=name: measure(n, fails=fails and n == "b")) for name in ("a", "b", "c")
        ]
        assert table.fill(cases, 60, errors=True)
        return table.rows()

    assert [row.get("error") for row in fill(fails=True)] == [None, "MemoryError: too large", None]
    assert calls == ["a", "b", "c"]
    assert fill(fails=False)[-1] == {"stage": "decode", "case": "b", "ms": 1.0}
    assert calls == ["a", "b", "c", "b"]


def test_the_summary_joins_the_stages_and_fits_on_a_screen(tmp_path: Path) -> None:
    rows: list[Row] = [
        {"stage": "decode", "case": "step", "batch": 64, "adapters": 8, "ranks": "16", "step ms": 9.0, "floor ms": 4.5},
        {"stage": "profile", "case": "step", "batch": 64, "adapters": 8, "ranks": "16", "GPU busy ms": 6.0},
        {"stage": "lora", "kind": "copy", "GB/s": 3000.0},
        *({"stage": "lora", "kind": "lora", "site": at, "rank": "16", "adapters": 64, "batch": 64, "us": 20.0, "MB": 30}
          for at in ("qkv", "o", "gate_up", "down")),
        *({"stage": "peers", "case": "peft", "adapters": number, "error": "out of memory"} for number in range(500)),
    ]  # fmt: skip
    path = tmp_path / ROWS
    path.write_text("\n".join(map(json.dumps, rows)) + '\n{"stage": "dec', encoding="utf-8")
    text = summarize(path)
    assert len(text) <= MAX_CHARACTERS
    step = next(line for line in text.splitlines() if line.lstrip().startswith("64  "))
    assert step.split()[:6] == ["64", "8", "16", "9.000", "6.000", "1.500"]
    # 120 MB in 80 us are half the rate of the copy.
    assert " 0.500 " in next(line for line in text.splitlines() if line.startswith("16 "))
    assert text.count("out of memory") < 20


@pytest.mark.soak
def test_decode_steps_are_timed_and_profiled(tmp_path: Path) -> None:
    made: list[RandomEngine] = []

    def make() -> RandomEngine:
        if not made:
            made.append(RandomEngine(TINY, KINDS, kernels="torch"))
        made[0].drop_all()
        return made[0]

    table = ResumedTable(tmp_path / ROWS, CPU)
    assert table.fill(decode_cases(decode.SMALL, CPU, make), 600)
    rows = [row for row in table.rows() if row["case"] == "step"]
    assert (
        [row["adapters"] for row in rows] == [scene.adapters for scene in decode.SMALL.scenes] == [0, 2, 2, 3]
    )
    assert all(row["step ms"] > 0 and row["schedule ms"] > 0 for row in rows)
    assert rows[0]["adapters GB"] == 0 and rows[1]["floor ms"] > rows[0]["floor ms"]
    # Of three adapters, one has each rank.
    assert rows[3]["adapters GB"] * 1e9 == sum(made[0].adapter_bytes(kind) for kind in range(3))
    answers = [row for row in table.rows() if row["case"] == "answers"]
    assert len(answers) == 2 and all(row["tokens/s"] > 0 for row in answers)
    profiled = ResumedTable(tmp_path / "profile", CPU)
    assert profiled.fill(profile_cases(decode.SMALL, make, tmp_path / "kernels"), 600)
    assert {row["case"] for row in profiled.rows()} == {"step", "mixed"}
    assert all(0 < row["GPU busy ms"] <= row["kernels ms"] for row in profiled.rows())
    assert "aten::" in (tmp_path / "kernels").read_text(encoding="utf-8")
    # The cases of a load run on the same engine.
    loads = ResumedTable(tmp_path / "load", CPU)
    assert loads.fill(islice(serving_cases(load.SMALL, make, loads.rows, tmp_path / "kernels"), 2), 600)
    few, many = loads.rows()
    assert few["errors"] == many["errors"] == 0 and few["loads"] <= 2 < many["loads"]
    assert few["tokens/s"] > 0 and few["p99 TTFT s"] > 0 and few["p50 ITL ms"] > 0
    cold = ResumedTable(tmp_path / "cold", CPU)
    assert cold.fill(cold_cases(load.SMALL, make), 600)
    found = {row["case"]: row for row in cold.rows()}
    assert found[load.ALONE]["others"] == 0
    assert found[load.BESIDE_COLD]["loads"] > 0 == found[load.BESIDE_BASE]["loads"]
    made[0].engine.check_invariants()


def test_the_tests_for_a_gpu_exist() -> None:
    """Born from a fault: four of them had moved, and pytest runs no test at all if it does not find one."""
    for path, _, name in (test.partition("::") for test in TESTS):
        place = ROOT / path
        assert place.is_dir() or f"def {name}" in place.read_text(encoding="utf-8"), f"{path}::{name}"


def test_the_floor_of_eight_adapters_is_that_of_their_bytes() -> None:
    adapter_bytes, weight_bytes = LLAMA_8B.layout(AdapterKind(16)).num_bytes, LLAMA_8B.weight_bytes()
    assert adapter_bytes == 80 << 20
    assert abs(weight_bytes / (weight_bytes + 8 * adapter_bytes) - 0.957) < 0.001


@pytest.mark.soak
def test_all_stages_run_on_a_cpu_and_resume(tmp_path: Path) -> None:
    command = [ROOT / "bench/gpu/all.sh", "--out", tmp_path, "--device", "cpu", "--tiny"]
    environment = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "SLORA_COMMIT": "tested"}

    def run(seconds: float) -> str:
        done = subprocess.run(
            [*command, "--seconds", str(seconds)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=1800,
            encoding="utf-8",
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    printed = run(1200)
    log = (tmp_path / LOG).read_text(encoding="utf-8")
    rows = [json.loads(line) for line in (tmp_path / ROWS).read_text(encoding="utf-8").splitlines()]
    ended = {row["stage"]: row for row in rows if row.get("case") == "stage"}
    assert list(ended) == [stage.name for stage in STAGES]
    assert all(row["whole"] and row["error"] is None for row in ended.values()), log
    assert not [row for row in rows if row.get("error")], log
    assert "decode, ms a step" in printed and "over HTTP" in printed
    # Run again, it measures nothing more, but starts no engine, either.
    begun = time.monotonic()
    run(1200)
    again = [json.loads(line) for line in (tmp_path / ROWS).read_text(encoding="utf-8").splitlines()][
        len(rows) :
    ]
    assert {row["case"] for row in again} <= {"stage", "tests", "server"}, again
    assert time.monotonic() > begun
