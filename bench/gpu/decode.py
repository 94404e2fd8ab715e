"""Decode steps of the whole engine: how long a step takes, how long the GPU computes in it, and where the rest goes.

`decode_cases` time steps by the clock. `profile_cases` run the same steps under the profiler, which slows the host
down, so they come later. Both write rows with the same keys: batch, adapters, ranks.

Columns of `decode`: step ms is the time of a step, floor ms the time that its bytes need at the rate of a copy
(weights, KV and distinct adapters, each read once). The columns with the names of the host's parts come from further
steps that are timed from within.
Columns of `profile`: GPU busy ms is the time in which at least one kernel runs, kernels ms the sum of all kernels.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

import slora.runner.runner
from bench.gpu.random_engine import AdapterKind, RandomAdapter, RandomEngine
from bench.gpu.resumed_table import Case
from bench.machines import ATTENTION
from bench.step_clock import REST, StepClock, Timed
from bench.table import Row
from bench.workload import prompts
from slora.core.request import StepOutput
from slora.engine.engine import Engine
from slora.models.step_batch import StepArrays
from slora.runner.runner import Runner, RunningStep
from slora.scheduler.scheduler import Scheduler

# Rank 8 on the linears of attention is S-LoRA's setting S1.
KINDS = (AdapterKind(16), AdapterKind(64), AdapterKind(8), AdapterKind(8, ATTENTION))
R16, R64, R8, S1_KIND = range(len(KINDS))
RANKS = {"16": (R16,), "64": (R64,), "8/16/64": (R8, R16, R64)}
TOP_KERNELS = 40

MakeEngine = Callable[..., RandomEngine]


class Scene(NamedTuple):
    """`batch` requests that decode, with `adapters` distinct adapters in turn; 0 is the base model.

    overlap: whether the host plans a step while the GPU computes the one before.
    """

    batch: int
    adapters: int
    ranks: str = "16"
    overlap: bool = True

    def adapter(self, number: int) -> RandomAdapter | None:
        kinds = RANKS[self.ranks]
        chosen = number % self.adapters if self.adapters else None
        return None if chosen is None else RandomAdapter(chosen, kinds[chosen % len(kinds)])

    def adapter_bytes(self, made: RandomEngine) -> int:
        chosen = {self.adapter(number) for number in range(min(self.batch, self.adapters))}
        return sum(made.adapter_bytes(adapter.kind) for adapter in chosen if adapter is not None)

    @property
    def key(self) -> Row:
        ranks = (self.ranks if self.adapters else "-") + ("" if self.overlap else " (no overlap)")
        return {"batch": self.batch, "adapters": self.adapters, "ranks": ranks}


class Answers(NamedTuple):
    """`streams` requests that start at once: what the server is compared with."""

    streams: int
    adapters: int
    prompt_tokens: int
    output_tokens: int

    def prompts(self, vocab_size: int) -> list[list[int]]:
        return prompts(self.streams, self.prompt_tokens, vocab_size)

    @property
    def key(self) -> Row:
        return self._asdict()


@dataclass(frozen=True, slots=True)
class DecodeScale:
    """warm_steps: before the clock starts. mixed_tokens: of a step with a prompt beside the decoding requests."""

    scenes: tuple[Scene, ...]
    profiled: tuple[Scene, ...]
    answers: tuple[Answers, ...]
    prompt_tokens: int = 128
    warm_steps: int = 12
    steps: int = 100
    host_steps: int = 32
    profiled_steps: int = 8
    mixed_tokens: int = 450
    copy_bytes: int = 4 << 30


_NUM_FIRST = 5
_FIRST = tuple(Scene(64, count) for count in (0, 8, 32, 1, 64))
WHOLE = DecodeScale(
    scenes=(
        *_FIRST,
        *(Scene(64, count, overlap=False) for count in (0, 8)),
        *(Scene(1, count) for count in (0, 1)),
        *(Scene(256, count) for count in (0, 8, 64)),
        *(Scene(16, count) for count in (0, 1, 8)),
        Scene(64, 8, "64"),
        Scene(64, 32, "8/16/64"),
    ),
    profiled=(
        *_FIRST,
        Scene(1, 0),
        Scene(256, 0),
        Scene(256, 64),
        Scene(64, 8, "64"),
        Scene(64, 32, "8/16/64"),
    ),
    answers=tuple(Answers(streams, count, 128, 128) for streams in (64, 256) for count in (0, 32)),
)
SMALL = DecodeScale(
    scenes=(Scene(4, 0), Scene(4, 2), Scene(4, 2, overlap=False), Scene(4, 3, "8/16/64")),
    profiled=(Scene(4, 0), Scene(4, 2)),
    answers=(Answers(2, 0, 8, 4), Answers(2, 2, 8, 4)),
    prompt_tokens=8,
    warm_steps=1,
    steps=3,
    host_steps=2,
    profiled_steps=2,
    mixed_tokens=12,
    copy_bytes=1 << 20,
)


def measure_copy(num_bytes: int, device: torch.device) -> float:
    """Bytes read and written per second."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(10):
        synchronize(device)
        start = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return 2 * num_bytes / min(seconds)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def decode_cases(scale: DecodeScale, device: torch.device, make: MakeEngine) -> Iterator[Case]:
    copy_rate: list[float] = []

    def rate() -> float:
        if not copy_rate:
            copy_rate.append(measure_copy(scale.copy_bytes, device))
            if device.type == "cuda":
                torch.cuda.empty_cache()
        return copy_rate[0]

    # Before the engine takes the memory.
    yield {"case": "copy"}, lambda: {"GB/s": rate() / 1e9}
    for scene in scale.scenes[:_NUM_FIRST]:
        yield {"case": "step", **scene.key}, lambda scene=scene: _time_steps(scale, scene, make(), rate)
    for answers in scale.answers:
        yield {"case": "answers", **answers.key}, lambda answers=answers: _time_answers(make(), answers)
    for scene in scale.scenes[_NUM_FIRST:]:
        yield {"case": "step", **scene.key}, lambda scene=scene: _time_steps(scale, scene, make(), rate)


def _time_steps(scale: DecodeScale, scene: Scene, made: RandomEngine, rate: Callable[[], float]) -> Row:
    engine, begun_at = made.engine, time.perf_counter()
    num_steps = scale.warm_steps + scale.steps + scale.host_steps
    _begin(made, scale, scene, num_steps)
    for _ in range(scale.warm_steps):
        engine.step()
    start = time.perf_counter()
    tokens = sum(len(engine.step()) for _ in range(scale.steps))
    seconds = time.perf_counter() - start
    try:
        host = _time_host(scale.host_steps, engine)
    except AttributeError as error:  # A timed function was renamed: the step's own time is still worth a row.
        host = {"host": str(error)}
    made.drop_all()
    context = scale.prompt_tokens + scale.warm_steps + scale.steps / 2
    base_bytes = made.size.weight_bytes() + scene.batch * context * made.token_bytes
    adapter_bytes = scene.adapter_bytes(made)
    return {
        "step ms": 1e3 * seconds / scale.steps,
        "tokens/s": tokens / seconds,
        "floor ms": 1e3 * (base_bytes + adapter_bytes) / rate(),
        "base GB": base_bytes / 1e9,
        "adapters GB": adapter_bytes / 1e9,
        **host,
        "case s": time.perf_counter() - begun_at,
    }


def _time_answers(made: RandomEngine, answers: Answers) -> Row:
    """Of two runs, the second one counts: the first one loads adapters and records steps."""
    asked = answers.prompts(made.engine.info.vocab_size)
    seconds = 0.0
    for _ in range(2):
        left = {}
        start = time.perf_counter()
        for number, prompt in enumerate(asked):
            adapter = RandomAdapter(number % answers.adapters, R16) if answers.adapters else None
            request = made.make_request(prompt, adapter, answers.output_tokens)
            made.engine.add(request)
            left[request.request_id] = True

        def have_ended(outputs: list[StepOutput], left: dict[str, bool] = left) -> bool:
            for output in outputs:
                if output.delta is not None and output.delta.finish_reason is not None:
                    del left[output.request_id]
            return not left

        made.run_until(have_ended)
        seconds = time.perf_counter() - start
        made.drop_all()
    return {"tokens/s": answers.streams * answers.output_tokens / seconds, "seconds": seconds}


def _begin(made: RandomEngine, scale: DecodeScale, scene: Scene, num_steps: int) -> None:
    """Adds the requests, and runs steps until all of them decode."""
    made.engine._num_overlapped = int(scene.overlap)
    # Requests that begin first generate tokens until the last one has begun.
    output_tokens = num_steps + 2 * scene.batch + 16
    waiting = set()
    for number, prompt in enumerate(prompts(scene.batch, scale.prompt_tokens, made.engine.info.vocab_size)):
        request = made.make_request(prompt, scene.adapter(number), output_tokens)
        made.engine.add(request)
        waiting.add(request.request_id)

    def have_begun(outputs: list[StepOutput]) -> bool:
        waiting.difference_update(output.request_id for output in outputs)
        return not waiting

    made.run_until(have_begun)


def _timed_functions() -> list[Timed]:
    return [
        Timed(Scheduler, "schedule", "schedule ms"),
        Timed(StepArrays, "build", "build ms"),
        Timed(StepArrays, "upload", "upload ms"),
        Timed(Runner, "_forward", "launch ms"),
        Timed(slora.runner.runner, "sample", "sample ms"),
        Timed(RunningStep, "wait", "wait ms"),
        Timed(Scheduler, "postprocess", "postprocess ms"),
        Timed(Engine, "_learn", "learn ms"),
    ]


def _time_host(num_steps: int, engine: Engine) -> Row:
    """Medians. `wait ms` includes the wait for the GPU."""
    clock = StepClock()
    timed = _timed_functions()
    with clock.timing(timed):
        for _ in range(num_steps):
            with clock.step():
                engine.step()
    parts = [*(one.part for one in timed), REST]
    return {part: 1e3 * statistics.median(step.get(part, 0.0) for step in clock.steps) for part in parts}


def profile_cases(scale: DecodeScale, make: MakeEngine, listing: Path) -> Iterator[Case]:
    """listing: a file for the kernels that take longest in each case."""
    for scene in scale.profiled[:3]:
        yield {"case": "step", **scene.key}, lambda scene=scene: _profile_steps(scale, scene, make(), listing)
    for scene in scale.profiled[:3]:
        key = {"case": "mixed", **scene.key}
        yield key, lambda scene=scene: _profile_mixed(scale, scene, make(), listing)
    for scene in scale.profiled[3:]:
        yield {"case": "step", **scene.key}, lambda scene=scene: _profile_steps(scale, scene, make(), listing)


def _profile_steps(scale: DecodeScale, scene: Scene, made: RandomEngine, listing: Path) -> Row:
    _begin(made, scale, scene, scale.warm_steps + 2 * scale.profiled_steps)
    for _ in range(scale.warm_steps):
        made.engine.step()

    def run() -> None:
        for _ in range(scale.profiled_steps):
            made.engine.step()

    row = profile_kernels(run, scale.profiled_steps, f"decode, {scene}", listing)
    made.drop_all()
    return row


def _profile_mixed(scale: DecodeScale, scene: Scene, made: RandomEngine, listing: Path) -> Row:
    """Steps in which the batch decodes beside a prompt of a request for a single token."""
    _begin(made, scale, scene, 64 * scale.profiled_steps)
    (prompt,) = prompts(1, scale.mixed_tokens - scene.batch, made.engine.info.vocab_size)

    def run() -> None:
        for number in range(scale.profiled_steps):
            made.engine.add(made.make_request(prompt, scene.adapter(number), 1))
            made.engine.step()

    def time_steps() -> float:
        start = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start) / scale.profiled_steps

    time_steps()  # Records the steps.
    step_ms = time_steps()
    row = profile_kernels(run, scale.profiled_steps, f"mixed, {scale.mixed_tokens} tokens, {scene}", listing)
    made.drop_all()
    return {"step ms": step_ms, **row}


def profile_kernels(run: Callable[[], None], num_steps: int, title: str, listing: Path) -> Row:
    """Runs `num_steps` steps under the profiler. On a CPU, torch's operators stand in for kernels."""
    on_gpu = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        run()
        if on_gpu:
            torch.cuda.synchronize()
    spans = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if not on_gpu or event.device_type == torch.autograd.DeviceType.CUDA
    ]
    kernels = [span for span in spans if not span[0].startswith(("Memcpy", "Memset"))]
    by_name: dict[str, list[float]] = defaultdict(list)
    for name, start, end in spans:
        by_name[name].append(end - start)
    ordered = sorted(by_name.items(), key=lambda item: -sum(item[1]))
    with listing.open("a", encoding="utf-8") as file:
        file.write(f"\n{title}: us a step, calls a step, us a call\n")
        for name, times in ordered[:TOP_KERNELS]:
            each, total = sum(times) / len(times), sum(times) / num_steps
            file.write(f"{total:10.1f} {len(times) / num_steps:7.1f} {each:9.1f}  {name[:120]}\n")
    return {
        "GPU busy ms": _union(spans) / 1e3 / num_steps,
        "kernels ms": sum(end - start for _, start, end in kernels) / 1e3 / num_steps,
        "kernels": len(kernels) / num_steps,
        "copies": (len(spans) - len(kernels)) / num_steps,
    }


def _union(spans: list[tuple[str, float, float]]) -> float:
    """The time that the spans cover together."""
    covered, last = 0.0, float("-inf")
    for _, start, end in sorted(spans, key=lambda span: span[1]):
        covered += max(0.0, end - max(start, last))
        last = max(last, end)
    return covered
