"""Small runs of what the offline bench measures with."""

import json
import re
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

import bench.peer_environments as peer_environments
from bench.bars import verdict_rows
from bench.contender import ROOT, ContenderProcess, Launch, slora_launch
from bench.contenders.answering import Run, Setup
from bench.floor import adapter_numbers, adapters_s
from bench.machine_rates import MachineRates, RateMeter
from bench.prompt_lookup import compare_answers
from bench.step_clock import StepClock
from bench.step_profile import EXPAND, PARTS, SHRINK, Scene, profile_rows, timed_functions
from bench.stepped_engine import SteppedEngine
from bench.throughput import BASE, Fleet, Plan, Shape, throughput_rows
from bench.workload import write_adapter
from tests.support.model_kit import ModelKit, make_kit

_RATES = MachineRates(read_bytes_per_s=1e9, flops=1e12)
_SETTINGS = {"dtype": "float32", "device": "cpu"}


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> ModelKit:
    lora = {"r": 8, "target_modules": ["q_proj", "down_proj"]}
    return make_kit(tmp_path_factory.mktemp("kit"), "llama", {"one": lora})


def make_engine(kit: ModelKit, kernels: str, copies: int) -> SteppedEngine:
    settings = {**_SETTINGS, "kernels": kernels, "pool_bytes": kit.pool_bytes(64)}
    return SteppedEngine(kit.directory, [kit.adapters["one"]] * copies, settings)


def test_the_floor_counts_the_weights_that_are_on_disk(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", 2, torch.bfloat16)
    header = (tmp_path / "a" / "adapter_model.safetensors").read_bytes()
    size = int.from_bytes(header[:8], "little")
    tensors = json.loads(header[8 : 8 + size])
    ends = [tensor["data_offsets"][1] for name, tensor in tensors.items() if name != "__metadata__"]
    assert adapter_numbers(2) * 2 == max(ends)


def test_an_adapter_that_several_use_is_read_once_a_token_and_multiplied_for_each() -> None:
    numbers = adapter_numbers(0)
    one = adapters_s([0, None], 3, 2, 2, _RATES)
    two = adapters_s([0, 0], 3, 2, 2, _RATES)
    assert one == pytest.approx(2 * numbers * 2 / 1e9 + 2 * numbers * 4 / 1e12)
    assert two - one == pytest.approx(2 * numbers * 4 / 1e12)
    assert adapters_s([None], 3, 2, 2, _RATES) == 0


def test_the_read_and_compute_rates_of_the_machine_are_measured() -> None:
    rates = RateMeter(torch.float32, read_bytes=1 << 20).measure(1)
    assert rates.read_bytes_per_s > 0 and rates.flops > rates.read_bytes_per_s


@pytest.mark.parametrize("kernels", ["cpu", "torch"])
def test_the_parts_of_a_step_are_the_engines_own(kit: ModelKit, kernels: str) -> None:
    if kernels == "cpu":
        pytest.importorskip("numba")
    stepped = make_engine(kit, kernels, 2)
    bare, adapted = profile_rows(stepped, [Scene(0, 3, 5), Scene(2, 3, 5)], 3, 1)
    assert [part for part in PARTS if adapted[part] == 0] == []
    assert [part for part in PARTS if bare[part] == 0] == [SHRINK, EXPAND]
    assert 0 < adapted["overhead %"] < 100
    stepped.engine.check_invariants()
    assert not stepped.engine.num_unfinished


def test_everything_that_is_timed_exists_in_both_kernels_for_a_cpu() -> None:
    pytest.importorskip("numba")
    for name in ("cpu", "torch"):
        with StepClock().timing(timed_functions(name)):
            pass


def make_setup(kit: ModelKit) -> Setup:
    adapters = [str(kit.adapters["one"])]
    return Setup(str(kit.directory), adapters, "float32", 1, 64, 4, kit.pool_bytes(64))


@pytest.mark.soak
@pytest.mark.parametrize("name", ["slora", "peft"])
def test_contenders_generate_the_requested_number_of_tokens(kit: ModelKit, name: str, tmp_path: Path) -> None:
    launch = slora_launch(1) if name == "slora" else peer_environments.launch_peer(name, 1, 1 << 30)
    assert isinstance(launch, Launch)
    contender = ContenderProcess(launch, make_setup(kit), tmp_path / "log")
    measured = contender.run(Run([[1, 2, 3]] * 3, [0, 0, 0], 5))
    assert measured.tokens == 15 and measured.tokens_per_s > 0 and measured.peak_rss_mib > 50
    assert contender.ready_s > 0 and ("torch" if name == "slora" else "peft") in contender.version
    assert contender.stop() == 0


def test_a_contender_is_stopped_between_its_runs(kit: ModelKit, tmp_path: Path) -> None:
    launch = Launch("mute", "tests.bench.mute_contender", Path(sys.executable), {"PYTHONPATH": str(ROOT)})
    contender = ContenderProcess(launch, make_setup(kit), tmp_path / "log")
    state, deadline = Path(f"/proc/{contender.version}/stat"), time.monotonic() + 300
    while " T " not in state.read_text(encoding="utf-8"):
        assert time.monotonic() < deadline, "it goes on"
        time.sleep(0.01)
    assert contender.stop() == 0


@pytest.mark.soak
def test_a_row_reports_the_cost_of_adapters_and_the_missing_contenders(
    kit: ModelKit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Launch("broken", "bench.contenders.not_there", Path(sys.executable), {"PYTHONPATH": str(ROOT)})
    mute = Launch("mute", "tests.bench.mute_contender", Path(sys.executable), {"PYTHONPATH": str(ROOT)})
    launches: dict[str, Launch | str] = {
        "slora": slora_launch(1),
        "broken": broken,
        "mute": mute,
        "no": "why",
    }
    shapes = [Shape("small", 4, 4)]
    plan = Plan(2, shapes, (1, 3), 2, 1, kit.pool_bytes(64), launches)
    fleet = Fleet(kit.directory, [kit.adapters["one"]], "float32", vocab_size=100)
    monkeypatch.setattr("bench.throughput.RateMeter", partial(RateMeter, read_bytes=1 << 20))
    monkeypatch.setattr("bench.machine_rates._MATMUL", 64)
    rows = throughput_rows(fleet, plan, tmp_path)
    seen = [(row.get("batch"), row["contender"]) for row in rows]
    assert seen == [(1, BASE), (1, "slora"), (3, BASE), (3, "slora")] + [
        (None, name) for name in ("broken", "no", "mute")
    ]
    for row in rows[:4]:
        assert row["min"] <= row["tokens/s"] <= row["max"]
        assert (row["of floor"] is not None) == (row["contender"] == "slora")
        assert (row["of read"] is not None) == (row["contender"] == BASE and row["batch"] == 1)
    reasons = [row["version"] for row in rows[4:]]
    assert "not_there" in reasons[0] and reasons[1] == "not measured: why" and "mute ended" in reasons[2]


def test_a_missing_peer_is_reported_with_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_environments, "HOME", tmp_path)
    assert peer_environments.launch_peer("vllm", 1, 1 << 30) == "not installed; `make bench-peers` does it"
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "failed.txt").write_text("no such package\n", encoding="utf-8")
    assert peer_environments.launch_peer("vllm", 1, 1 << 30) == "no such package"
    (tmp_path / "vllm" / "failed.txt").unlink()
    (tmp_path / "vllm" / "installed.txt").touch()
    launch = peer_environments.launch_peer("vllm", 2, 3 << 30)
    assert isinstance(launch, Launch) and launch.environment["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    # Nothing of this project but the bench may be found on a peer's path.
    assert [path.name for path in Path(launch.environment["PYTHONPATH"]).iterdir()] == ["bench"]


def test_bars_apply_to_their_own_rows() -> None:
    key = {"dtype": "bfloat16", "shape": "decode", "batch": 64}
    rows = [
        {**key, "adapters": 0, "contender": "vllm", "ours over it": 0.95},
        {**key, "adapters": 0, "contender": "vllm", "ours over it": 0.95, "batch": 1},
        {**key, "adapters": 8, "contender": "vllm", "ours over it": 10.0},
        {**key, "adapters": 8, "contender": "peft", "ours over it": 5.1},
        {**key, "adapters": 32, "contender": "peft", "ours over it": 5.1},
        {**key, "adapters": 1, "contender": "peft", "ours over it": 0.1},
        {**key, "adapters": 8, "contender": "slora", "of floor": 0.89},
        {**key, "adapters": 0, "contender": BASE, "of read": 0.5, "batch": 1},
        {"dtype": "bfloat16", "batch": 64, "adapters": 8, "overhead %": 5.5},
        {"dtype": "bfloat16", "batch": 1, "adapters": 8, "overhead %": 50.0},
        {"dtype": "bfloat16", "beside MiB": 399.0, "ready s": 5.1},
        {"dtype": "bfloat16", "adapters": 8, "contender": "llama.cpp", "version": "not measured: no wheel"},
    ]
    seen = [(row["bar"], row["wanted"], row["verdict"]) for row in verdict_rows(rows)]
    assert seen == [
        ("base over vLLM's", ">= 1", "MISSED"),
        ("base over vLLM's", ">= 0.9", "met"),
        ("adapters over the floor", ">= 0.9", "MISSED"),
        ("adapters over vLLM's", ">= 10", "met"),
        ("adapters over peft's", ">= 5", "met"),
        ("adapters over peft's", ">= 10", "MISSED"),
        ("one request over its reads", ">= 0.4", "met"),
        ("overhead %", "<= 5", "MISSED"),
        ("PSS beside weights and pool", "<= 400", "met"),
        ("ready", "<= 5", "MISSED"),
    ]
    assert re.fullmatch(r"bfloat16, decode, batch 64, 0 adapters", verdict_rows(rows)[0]["where"])


def test_adapters_that_do_not_fit_in_memory_are_left_out_and_reported(tmp_path: Path) -> None:
    plan = Plan(2 * 10**5, [Shape("small", 4, 4)], (1,), 1, 1, 1 << 30, {"slora": slora_launch(1)})
    (row,) = throughput_rows(Fleet(tmp_path, [tmp_path], "float32"), plan, tmp_path)
    assert re.match(
        r"not measured: weights, pool and 200000 adapters take \d+\.\d GB of memory, and ",
        str(row["version"]),
    )


@pytest.mark.soak
def test_prompt_lookup_is_compared_on_the_same_answers(kit: ModelKit) -> None:
    settings = {**_SETTINGS, "pool_bytes": kit.pool_bytes(64)}
    plain = SteppedEngine(kit.directory, [], settings)
    drafting = SteppedEngine(kit.directory, [], {**settings, "prompt_lookup_tokens": 8})
    row = compare_answers(plain, drafting, [[1, 2, 3] * 4, [5, 6]], 0.0, 1)
    assert row["wrong tokens"] == 0 and row["ratio"] == row["drafting tokens/s"] / row["plain tokens/s"]
