"""Pages that choices of one request share: what parallel sampling and beam search save of the KV.

saved = 1 - pages held / pages that the same sequences would hold alone, both summed over all steps: the paper's words
for its figure 15 are blocks saved by sharing over total blocks without sharing, on average while the trace is served.
`counting_rows` has what other ways to count would give.

All runs through the production scheduler, on traces that leave no queue. Sampling forks a request when its prompt is
computed, and all its choices are of one length. Beams are forked, copied on write and dropped as the production beam
search has it; what they propose comes from `NextTokens`.

Few requests say little: in what sampling saves, long prompts must happen to meet long answers as often as they will in
the long run. On Alpaca-like lengths two choices saved 8.9% of 20 requests' blocks, 5.3% of 200's and 7.1% of 1,000's.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from statistics import fmean

from bench.machines import A100_7B
from bench.simulation.lengths import ALPACA, SHAREGPT, SHAREGPT_SHAPED, LengthPair, Lognormal
from bench.simulation.next_tokens import SENTENCE_TOKENS, NextTokens
from bench.simulation.simulation import Policies, Setup, Simulation
from bench.simulation.traces import base_trace
from bench.table import Row
from slora.scheduler.sequence import Sequence
from slora.scheduler.step_plan import StepPlan

WIDTHS = (2, 4, 6)
BEAMS = {"alike": NextTokens(0), "sentence": NextTokens(SENTENCE_TOKENS), "independent": NextTokens(None)}


@dataclass(frozen=True, slots=True)
class Workload:
    """rate: requests/s with which nobody waits and nobody gives way. sampling, beams: by width, percent of blocks that
    the paper saved (SOSP'23, figure 15 and section 6.3); of ShareGPT it gives ranges."""

    lengths: LengthPair
    rate: float
    sampling: dict[int, float]
    beams: dict[int, float]


ON_ALPACA = Workload(ALPACA, 20.0, {2: 6.1, 4: 8.5, 6: 9.8}, {2: 37.6, 4: 53.1, 6: 55.2})
ON_SHAREGPT = Workload(SHAREGPT, 1.0, {2: 16.2, 6: 30.5}, {2: 44.3, 6: 66.3})
WORKLOADS = (ON_ALPACA, ON_SHAREGPT, replace(ON_SHAREGPT, lengths=SHAREGPT_SHAPED))


@dataclass(frozen=True, slots=True)
class Blocks:
    """held: those that there are; alone: those that there would be without sharing."""

    held: int = 0
    alone: int = 0

    def __add__(self, other: "Blocks") -> "Blocks":
        return Blocks(self.held + other.held, self.alone + other.alone)

    @property
    def percent(self) -> float:
        """What is saved."""
        return 100 * (1 - self.held / self.alone)


@dataclass(slots=True)
class SharingMeter:
    """Looks at every `every`-th step. total: over all steps. by_step: each alone. by_request: each over all its steps.
    at_end: each in its last one. with_partial: as total, if choices shared the block that their prompt fills in part,
    as they do for no more than the step in which they begin."""

    every: int = 8
    total: Blocks = field(default_factory=Blocks)
    with_partial: Blocks = field(default_factory=Blocks)
    by_step: list[Blocks] = field(default_factory=list)
    by_request: dict[str, Blocks] = field(default_factory=dict)
    at_end: dict[str, Blocks] = field(default_factory=dict)
    _num_steps: int = 0

    def observe(self, simulation: Simulation, plan: StepPlan, seconds: float) -> None:
        self._num_steps += 1
        if self._num_steps % self.every:
            return
        groups: dict[str, list[Sequence]] = {}
        for sequence in simulation.running.values():
            if sequence.blocks.num_pages:  # a choice that begins in this step has none yet
                groups.setdefault(sequence.request.request_id, []).append(sequence)
        step = Blocks()
        for name, group in groups.items():
            blocks = _count(group)
            self.at_end[name] = blocks
            self.by_request[name] = self.by_request.get(name, Blocks()) + blocks
            step += blocks
            if group[0].num_prompt % simulation.machine.block_tokens:
                blocks = Blocks(blocks.held - len(group) + 1, blocks.alone)
            self.with_partial += blocks
        self.by_step.append(step)
        self.total += step


def _count(group: list[Sequence]) -> Blocks:
    """Of one request; blocks that are given back don't occur here."""
    held = len({page for sequence in group for page in sequence.blocks.held_pages})
    return Blocks(held, sum(sequence.blocks.num_pages for sequence in group))


def measure(workload: Workload, width: int, count: int, beams: NextTokens | None = None) -> SharingMeter:
    """count: requests. beams: None draws the answers."""
    meter = SharingMeter()
    # Nothing but forks shall share pages.
    setup = Setup(A100_7B, (8,), num_choices=width, beams=beams, policies=Policies(prefix_cache="off"))
    Simulation(setup, [meter]).run(base_trace(count, workload.rate, workload.lengths))
    return meter


def sharing_rows(count: int) -> list[Row]:
    """count: requests of each search; five times as many are sampled, which costs less and varies more."""
    return [_sharing_row(workload, width, count) for workload in WORKLOADS for width in WIDTHS]


def _sharing_row(workload: Workload, width: int, count: int) -> Row:
    return {
        "lengths": workload.lengths.name,
        "width": width,
        "sampling saves %": measure(workload, width, 5 * count).total.percent,
        "paper": workload.sampling.get(width),
        **{
            f"{name} beams save %": measure(workload, width, count, beams).total.percent
            for name, beams in BEAMS.items()
        },
        "paper, beams": workload.beams.get(width),
    }


def counting_rows(count: int) -> list[Row]:
    """What sampling saves, in percent, by what is counted."""
    return [
        _counting_row(replace(workload, lengths=lengths), width, count)
        for workload in (ON_ALPACA, ON_SHAREGPT)
        for lengths in _shapes(workload.lengths)
        for width in WIDTHS
    ]


def _shapes(lengths: LengthPair) -> list[LengthPair]:
    """The same means in other shapes."""
    narrow, wide = (
        replace(lengths, name=f"{lengths.name}, sigma {shape.sigma}", prompts=shape, outputs=shape)
        for shape in (Lognormal(0.7), Lognormal(1.3))
    )
    return [narrow, lengths, wide, *([SHAREGPT_SHAPED] if lengths is SHAREGPT else [])]


def _counting_row(workload: Workload, width: int, count: int) -> Row:
    meter = measure(workload, width, count)
    return {
        "lengths": workload.lengths.name,
        "width": width,
        "over all steps": meter.total.percent,
        "mean of steps": _mean(meter.by_step),
        "mean of requests": _mean(meter.by_request.values()),
        "at their ends": _mean(meter.at_end.values()),
        "with partial blocks": meter.with_partial.percent,
        "paper": workload.sampling.get(width),
    }


def _mean(savings: Iterable[Blocks]) -> float:
    return fmean(saving.percent for saving in savings if saving.alone)
