"""Tokens per second of all contenders over the same requests, in rounds: each runs once in each round, in turn.

Our own base runs in the process that serves the adapters, in the same rounds: what adapters cost is a ratio of one
round, and so is the floor. Medians over the rounds.
"""

import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench.contender import ContenderFailed, ContenderProcess, Launch, Measured
from bench.contenders.answering import Run, Setup
from bench.floor import adapter_numbers, adapters_s, read_weight_numbers, single_step_s
from bench.machine_rates import MachineRates, RateMeter
from bench.table import Row
from bench.workload import SMALL, prompts
from slora_adapters.process.progress_bar import track_progress
from slora_kernels.machine_limits import machine_limits

# So many adapters are given out in turn; of more, each request draws one, all equally popular.
_IN_TURN = 64
BASE = "slora base"


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    input_tokens: int
    output_tokens: int

    @property
    def length(self) -> int:
        return self.input_tokens + self.output_tokens


SHAPES = {
    shape.name: shape
    for shape in (Shape("decode", 64, 64), Shape("prefill", 1024, 16), Shape("long", 4080, 16))
}


@dataclass(frozen=True, slots=True)
class Fleet:
    """A model and its adapters on disk. element_bytes: of a weight of `dtype`."""

    model: Path
    adapters: list[Path]
    dtype: str
    vocab_size: int = SMALL.vocab

    @property
    def element_bytes(self) -> int:
        torch_dtype: torch.dtype = getattr(torch, self.dtype)
        return torch_dtype.itemsize


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured of one fleet. launches: how contenders start, or why they can't; by name."""

    num_adapters: int
    shapes: Sequence[Shape]
    batches: Sequence[int]
    rounds: int
    threads: int
    pool_bytes: int
    launches: dict[str, Launch | str]


@dataclass(slots=True)
class _Cell:
    """One shape and batch. runs: by contender. floors: the floor's seconds by round."""

    shape: Shape
    batch: int
    runs: dict[str, list[Measured]] = field(default_factory=dict)
    floors: list[float] = field(default_factory=list)
    single_steps: list[float] = field(default_factory=list)

    def note(self, name: str, measured: Measured) -> None:
        self.runs.setdefault(name, []).append(measured)


def give_out(num_adapters: int, batch: int, number: int) -> list[int | None]:
    """Adapters of the requests of round `number`."""
    if num_adapters == 0:
        return [None] * batch
    if num_adapters <= _IN_TURN:
        return [index % num_adapters for index in range(batch)]
    draw = random.Random(number)
    return [draw.randrange(num_adapters) for _ in range(batch)]


@dataclass(slots=True)
class _Field:
    """Who takes part. reasons: of those who do not, or not any more. started: whoever did."""

    active: dict[str, ContenderProcess] = field(default_factory=dict)
    started: dict[str, ContenderProcess] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def enter(self, launch: Launch, setup: Setup, log: Path) -> None:
        try:
            contender = ContenderProcess(launch, setup, log)
        except ContenderFailed as error:
            self.reasons[launch.name] = str(error)
        else:
            self.active[launch.name] = self.started[launch.name] = contender

    def leave(self, name: str, error: ContenderFailed) -> None:
        del self.active[name]
        self.reasons[name] = str(error)

    def stop(self) -> None:
        for contender in self.started.values():
            contender.stop()


def throughput_rows(fleet: Fleet, plan: Plan, logs: Path) -> list[Row]:
    """Rows of all shapes and batches for one dtype and number of adapters, then who was not measured, and why.

    Raises ContenderFailed if it is our own engine that failed.
    """
    key: Row = {"dtype": fleet.dtype, "adapters": plan.num_adapters}
    if reason := _lack_of_room(fleet, plan):
        return [{**key, "contender": "slora", "version": f"not measured: {reason}"}]
    cells = [_Cell(shape, batch) for shape in plan.shapes for batch in plan.batches]
    torch.set_num_threads(plan.threads)
    meter = RateMeter(getattr(torch, fleet.dtype))
    contenders = _Field()
    try:
        _start(fleet, plan, logs, contenders)
        for cell in cells:
            for number in track_progress("Rounds", range(plan.rounds + 1), "round"):  # the first is a warm-up
                _run_round(fleet, plan, cell, contenders, meter.measure(), number)
    finally:
        contenders.stop()
    rows = [{**key, **row} for cell in cells for row in _rows(plan, cell, contenders.started)]
    reasons = contenders.reasons.items()
    return rows + [{**key, "contender": name, "version": f"not measured: {why}"} for name, why in reasons]


def _lack_of_room(fleet: Fleet, plan: Plan) -> str | None:
    """A machine without the memory would kill our engine, hours into a run."""
    numbers = read_weight_numbers() + sum(adapter_numbers(index) for index in range(plan.num_adapters))
    wanted, free = plan.pool_bytes + fleet.element_bytes * numbers, machine_limits().free_memory_bytes()
    if wanted <= free:
        return None
    return (
        f"weights, pool and {plan.num_adapters} adapters take {wanted / 1e9:.1f} GB of memory, and "
        f"{free / 1e9:.1f} are free; choose fewer adapters (--adapters) or a smaller pool (--pool-gib)"
    )


def _start(fleet: Fleet, plan: Plan, logs: Path, contenders: _Field) -> None:
    paths = [str(fleet.adapters[index % len(fleet.adapters)]) for index in range(plan.num_adapters)]
    length = max(shape.length for shape in plan.shapes)
    setup = Setup(
        str(fleet.model), paths, fleet.dtype, plan.threads, length, max(plan.batches), plan.pool_bytes
    )
    for name, launch in plan.launches.items():
        if isinstance(launch, str):
            contenders.reasons[name] = launch
        else:
            contenders.enter(launch, setup, logs / f"{name}-{plan.num_adapters}.log")


def _run_round(
    fleet: Fleet, plan: Plan, cell: _Cell, contenders: _Field, rates: MachineRates, number: int
) -> None:
    shape, given = cell.shape, give_out(plan.num_adapters, cell.batch, number)
    asked = prompts(cell.batch, shape.input_tokens, fleet.vocab_size)
    for name, run_name, adapters in _runs(plan, given):
        if name not in contenders.active:
            continue
        try:
            measured = contenders.active[name].run(Run(asked, adapters, shape.output_tokens))
        except ContenderFailed as error:
            if name == "slora":
                raise
            contenders.leave(name, error)
            cell.runs.pop(run_name, None)  # fewer rounds than the others' are no comparison
            continue
        if measured.tokens != cell.batch * shape.output_tokens:
            raise RuntimeError(f"{name} made {measured.tokens} tokens of {cell.batch * shape.output_tokens}")
        if number:
            cell.note(run_name, measured)
    if number:
        extra_s = adapters_s(given, shape.input_tokens, shape.output_tokens, fleet.element_bytes, rates)
        cell.floors.append(cell.runs[BASE][-1].seconds + extra_s)
        cell.single_steps.append(single_step_s(fleet.element_bytes, rates))


def _runs(plan: Plan, given: list[int | None]) -> Iterator[tuple[str, str, list[int | None]]]:
    """Contender, what the run is called, and its adapters."""
    yield "slora", BASE, [None] * len(given)
    for name in plan.launches:
        if plan.num_adapters or name != "slora":
            yield name, name, given


def _rows(plan: Plan, cell: _Cell, contenders: dict[str, ContenderProcess]) -> Iterator[Row]:
    ours = cell.runs.get("slora" if plan.num_adapters else BASE, [])
    for name, runs in cell.runs.items():
        contender = contenders["slora" if name == BASE else name]
        is_peer = name not in ("slora", BASE)
        rates = [measured.tokens_per_s for measured in runs]
        of_floor = of_read = None
        if name == "slora":
            of_floor = statistics.median(f / r.seconds for f, r in zip(cell.floors, runs, strict=True))
        if name == BASE and cell.batch == 1 and cell.shape.output_tokens >= cell.shape.input_tokens:
            of_read = statistics.median(
                r.tokens * s / r.seconds for s, r in zip(cell.single_steps, runs, strict=True)
            )
        yield {
            "shape": cell.shape.name,
            "batch": cell.batch,
            "contender": name,
            "tokens/s": statistics.median(rates),
            "min": min(rates),
            "max": max(rates),
            "prompt+output tokens/s": statistics.median(rates) * cell.shape.length / cell.shape.output_tokens,
            "of floor": of_floor,
            "of read": of_read,
            "ours over it": _over(ours, runs) if is_peer and ours else None,
            "peak RSS MiB": max(r.peak_rss_mib for r in runs),
            "ready s": contender.ready_s,
            "version": contender.version,
        }


def _over(ours: list[Measured], theirs: list[Measured]) -> float:
    """Median over the rounds of how many times as fast ours is."""
    return statistics.median(b.seconds / a.seconds for a, b in zip(ours, theirs, strict=True))
