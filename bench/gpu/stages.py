"""What each stage of `bench/gpu/all.sh` runs. This module is imported by its worker processes only.

A stage fills the table with rows and begins no case after its time. Stages of one group run in the same process and
share what is expensive to make there: an engine takes about ten seconds.
"""

import argparse
import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import triton

from bench.gpu import decode, kernel_times, load
from bench.gpu.all import KERNELS, ROWS
from bench.gpu.decode import KINDS, Answers, DecodeScale, decode_cases, profile_cases
from bench.gpu.kernel_times import KernelTimes
from bench.gpu.load import LoadScale, cold_cases, serving_cases
from bench.gpu.over_http import Server, serving
from bench.gpu.random_engine import FOUR_LAYERS, LLAMA_8B, TINY, EngineSize, RandomEngine
from bench.gpu.resumed_table import Case, ResumedTable
from bench.table import Row
from slora_kernels.kernel_selector import select_kernels
from slora_kernels.layout import llama_shape

_NATIVE = "tests/slora/engine/test_gpu.py"
# Tests that compute on a GPU if there is one. Those of the kernels "cpu" would compile these for minutes.
TESTS = (
    "tests/slora/sampling/test_sampler.py::test_a_gpus_kernels_choose_the_same_tokens",
    "tests/slora/memory/test_host_memory.py",
    "tests/slora/models/weights/test_quantization.py::test_answers_are_those_of_the_rounded_weights_with_and_without_adapters",
    "tests/slora/engine/test_fp8_kv.py::test_log_probabilities_are_close_to_those_without_fp8",
    "tests/slora/engine/test_overlapped_steps.py",
    "tests/slora/engine/test_composition.py::test_triton_kernels_add_adapters_up_as_peft_does",
    "tests/slora/engine/test_activated_lora.py::test_triton_kernels_answer_as_peft_does",
    "tests/slora/models/test_transformers_models.py::test_triton_kernels_read_latents",
    "tests/slora/models/weights/test_stored_codes.py::test_triton_kernels_answer_as_the_dequantized_weights",
    f"{_NATIVE}::test_adapters_with_parts_of_their_own_answer_as_peft_does",
    f"{_NATIVE}::test_transformers_classes_answer_as_peft_does",
    "tests/kernels",
    # These record the graphs of a whole server's start, which takes up to a minute.
    f"{_NATIVE}::test_parity_holds_in_chunks_and_under_preemption",
    f"{_NATIVE}::test_sixteen_bit_answers_are_as_accurate_as_those_of_transformers",
    f"{_NATIVE}::test_adapters_loaded_and_evicted_between_steps_answer_as_peft_does",
    f"{_NATIVE}::test_a_model_divided_between_two_gpus_answers_as_peft_does",
)
TINY_TESTS = ("tests/kernels/test_layout.py",)
_DESELECTED = "not ahead_of_time and not cpu and not (torch and (test_quantization or test_fp8_kv))"
_OUTCOME = re.compile(
    r"^(?:\[gw\d+\] \[ *\d+%\] (\w+) (\S+::.*)|(\S+::.*\S) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b)"
)
_FAILURE = re.compile(r"^FAILED (\S+::.*?)(?: - (.*))?$")


@dataclass(frozen=True, slots=True)
class Scale:
    """peer_tokens: answers of the peers' shorter and longer run. contest: adapters and requests against peft."""

    size: EngineSize
    kernel_name: str
    decode: DecodeScale
    load: LoadScale
    kernels: kernel_times.Sizes
    prefill: kernel_times.Sizes
    tests: tuple[str, ...]
    served_adapters: int
    server_flags: tuple[str, ...]
    peer_batch: int
    peer_tokens: tuple[int, int]
    contest: tuple[int, int]


# As the engine alone is configured.
_SERVER_FLAGS = ("--prefix-cache", "off", "--swap-bytes", "0", "--max-lora-rank", "64")
_KERNELS = replace(kernel_times.LLAMA_8B, batches=(64,), adapters=(64, 8, 1))
_PREFILL = replace(kernel_times.LLAMA_8B, batches=(64, 1), contexts=(4096, 1024), chunks=(4096, 512))
WHOLE = Scale(
    LLAMA_8B,
    "triton",
    decode.WHOLE,
    load.WHOLE,
    _KERNELS,
    _PREFILL,
    TESTS,
    served_adapters=32,
    server_flags=(*_SERVER_FLAGS, "--api-workers", "4", "--host-cache-bytes", "4GiB"),
    peer_batch=64,
    peer_tokens=(16, 112),
    contest=(4, 16),
)
_ONE_LAYER = llama_shape(1, 4096, 32, 8, 128, 14336, 128256, 2)
# The same kernels as WHOLE, in a fraction of the time: it compiles them while the tests run.
WARM = replace(
    WHOLE,
    size=FOUR_LAYERS,
    decode=replace(decode.WHOLE, warm_steps=1, steps=2, host_steps=1, profiled=(), copy_bytes=1 << 20),
    load=replace(load.WHOLE, saturated_s=4.0, calm_s=1.0, cold_s=0.5, cold_rounds=1),
    kernels=replace(_KERNELS, shape=_ONE_LAYER, copy_bytes=1 << 20),
    prefill=replace(_PREFILL, shape=_ONE_LAYER, copy_bytes=1 << 20),
)
_TINY_SIZES = kernel_times.Sizes(
    llama_shape(2, 64, 4, 2, 16, 96, 100, 4),
    torch.float32,
    batches=(3,),
    adapters=(2,),
    contexts=(32,),
    chunks=(5,),
    copy_bytes=1 << 20,
    matmul_size=64,
)
SMALL = Scale(
    TINY,
    "torch",
    decode.SMALL,
    load.SMALL,
    _TINY_SIZES,
    _TINY_SIZES,
    TINY_TESTS,
    served_adapters=2,
    server_flags=(*_SERVER_FLAGS, "--kernels", "torch", "--host-cache-bytes", "16MiB"),
    peer_batch=2,
    peer_tokens=(2, 4),
    contest=(2, 2),
)
SCALES = {"whole": WHOLE, "warm": WARM, "tiny": SMALL}


class Bench:
    """The things that the stages of one process share."""

    def __init__(self, scale: str, device: str, out: Path, peers: Path | None) -> None:
        self.name = scale
        self.scale = SCALES[scale]
        self.device = torch.device(device)
        self.out = out
        self.peers = peers
        self._engine: RandomEngine | None = None
        self._settings: dict[str, int] = {}

    def make_engine(self, table: ResumedTable, **settings: int) -> RandomEngine:
        """Returns the engine of this process. The only place where the benches of the whole engine make one.

        settings: of `EngineConfig`. An engine with other settings is replaced.
        """
        if self._engine is not None and settings != self._settings:
            self._engine.drop_all()
            self._engine.engine.close()
            self._engine = None
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        if self._engine is None:
            start = time.perf_counter()
            self._settings = settings
            self._engine = RandomEngine(self.scale.size, KINDS, kernels=self.scale.kernel_name, **settings)
            table.add({"case": "start", **settings, "seconds": time.perf_counter() - start})
        self._engine.drop_all()
        return self._engine


Stage = Callable[[Bench, ResumedTable, float], bool]


def test_natively(bench: Bench, table: ResumedTable, seconds: float) -> bool:
    """Runs the tests, and reports those that fail and how many were run before the time was up."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "-vv",
        "-rN",
        "--tb=short",
        "-p",
        "bench.gpu.early_failures",
        "-k",
        _DESELECTED,
        *bench.scale.tests,
    ]
    if find_spec("xdist"):
        workers = max(1, min(12, (os.cpu_count() or 1) - 4))
        command += ["-p", "xdist.plugin", "-n", str(workers), "--maxschedchunk", "1"]
    # Plugins of other packages would be loaded by each worker, and their warnings would be errors.
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        encoding="utf-8",
    )
    # An interrupted pytest still ends its workers.
    timers = [
        threading.Timer(seconds, process.send_signal, [signal.SIGINT]),
        threading.Timer(seconds + 8.0, process.kill),
    ]
    start = time.perf_counter()
    for timer in timers:
        timer.daemon = True
        timer.start()
    counts: dict[str, int] = {}
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="")
        if found := _OUTCOME.match(line):
            outcome = (found[1] or found[4]).lower()
            counts[outcome] = counts.get(outcome, 0) + 1
        elif failed := _FAILURE.match(line):
            table.add({"case": "failed", "test": failed[1], "message": (failed[2] or "")[:200]})
    code = process.wait()
    for timer in timers:
        timer.cancel()
    took_s = time.perf_counter() - start
    table.add({"case": "tests", "seconds": took_s, "whole": took_s < seconds, "exit code": code, **counts})
    return took_s < seconds


def measure_decode(bench: Bench, table: ResumedTable, seconds: float) -> bool:
    cases = decode_cases(bench.scale.decode, bench.device, lambda: bench.make_engine(table))
    return table.fill(cases, seconds, errors=True)


def profile_decode(bench: Bench, table: ResumedTable, seconds: float) -> bool:
    cases = profile_cases(bench.scale.decode, lambda: bench.make_engine(table), bench.out / KERNELS)
    return table.fill(cases, seconds, errors=True)


def measure_serving(bench: Bench, table: ResumedTable, seconds: float) -> bool:
    make = partial(bench.make_engine, table)
    cases = serving_cases(bench.scale.load, make, table.rows, bench.out / KERNELS)
    return table.fill(cases, seconds, errors=True)


def measure_cold_loads(bench: Bench, table: ResumedTable, seconds: float) -> bool:
    cases = cold_cases(bench.scale.load, lambda: bench.make_engine(table))
    return table.fill(cases, seconds, errors=True)


def measure_lora(bench: Bench, table: ResumedTable, seconds: float) -> bool:
    times = KernelTimes(
        bench.scale.kernels, select_kernels(bench.scale.kernel_name, bench.device), bench.device
    )
    return table.fill(_ordered_lora(times.cases(["copy", "lora"])), seconds, errors=True)


def _ordered_lora(cases: Iterator[Case]) -> list[Case]:
    """Rank 16 first, then the others with 8 adapters."""
    found = list(cases)

    def order(case: Case) -> int:
        key = case[0]
        return 0 if key["kind"] == "copy" else 1 if key["rank"] == "16" else 2

    chosen = [case for case in found if case[0].get("rank", "16") == "16" or case[0]["adapters"] != 1]
    return sorted(chosen, key=order)


def measure_attention(bench: Bench, table: ResumedTable, seconds: float) -> bool:
    times = KernelTimes(
        bench.scale.prefill, select_kernels(bench.scale.kernel_name, bench.device), bench.device
    )
    return table.fill(times.cases(["copy", "matmul", "prefill", "decode"]), seconds, errors=True)


def measure_server(bench: Bench, table: ResumedTable, seconds: float) -> bool:
    with ExitStack() as stack:
        return table.fill(_served_cases(bench, stack), seconds, errors=True)


def _served_cases(bench: Bench, stack: ExitStack) -> Iterator[Case]:
    """The same requests as those of the case `answers` of the stage `decode`."""
    scale, servers = bench.scale, list[Server]()

    def start() -> Row:
        begun = time.perf_counter()
        servers.append(stack.enter_context(serving(bench.name, scale.served_adapters, scale.server_flags)))
        return {"seconds": time.perf_counter() - begun}

    def measure(answers: Answers) -> Row:
        if not servers:
            start()
        asked = answers.prompts(scale.size.fields["vocab_size"])
        # The first run loads adapters and records steps.
        for _ in range(2):
            row = servers[0].stream(asked, answers.adapters, answers.output_tokens)
        return row

    yield {"case": "server"}, start
    for answers in scale.decode.answers:
        yield {"case": "over HTTP", **answers.key}, partial(measure, answers)


STAGES: dict[str, Stage] = {
    "correct": test_natively,
    "decode": measure_decode,
    "profile": profile_decode,
    "s1": measure_serving,
    "cold": measure_cold_loads,
    "lora": measure_lora,
    "prefill": measure_attention,
    "http": measure_server,
}


@dataclass(slots=True)
class Compilations:
    """Triton's compilations in this process that its cache did not have."""

    count: int = 0
    seconds: float = 0.0

    def listen(self) -> None:
        triton.knobs.compilation.listener = self._note

    def _note(self, *, times: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            self.count += 1
            microseconds = times.ir_initialization + sum(duration for _, duration in times.lowering_stages)
            self.seconds += microseconds / 1e6


def run_stage(run: Stage, bench: Bench, stage: str, seconds: float, compilations: Compilations) -> Row:
    """Returns the fields of `bench.gpu.all.Outcome`."""
    count, compile_s = compilations.count, compilations.seconds
    error, is_whole = None, False
    print(f"\n===== {stage}: {seconds:.0f} s", flush=True)
    try:
        is_whole = run(bench, ResumedTable(bench.out / ROWS, bench.device, {"stage": stage}), seconds)
    except Exception as failure:
        traceback.print_exc()
        error = f"{type(failure).__name__}: {failure}"[:300]
    compiled = {"compiled": compilations.count - count, "compile_s": compilations.seconds - compile_s}
    return {"whole": is_whole, "error": error, **compiled}


def serve(stages: Mapping[str, Stage]) -> None:
    """The body of a worker of bench/gpu/all.sh: runs the stages that it reads, and answers with their outcomes."""
    parser = argparse.ArgumentParser(description=serve.__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--scale", choices=list(SCALES), required=True)
    parser.add_argument("--peers", type=Path)
    options = parser.parse_args()
    # What the stages print goes to the log, which is the standard error.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    bench = Bench(options.scale, options.device, options.out, options.peers)
    compilations = Compilations()
    compilations.listen()
    for line in sys.stdin:
        asked = json.loads(line)
        name, seconds = asked["stage"], asked["end_s"] - time.monotonic()
        print(
            json.dumps(run_stage(stages[name], bench, name, seconds, compilations)), file=answers, flush=True
        )


if __name__ == "__main__":
    serve(STAGES)
