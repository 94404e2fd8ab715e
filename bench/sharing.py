"""Pages that choices of one request share: what parallel sampling and beam search save of the KV.

saved = 1 - pages held / pages that the same sequences would hold alone, both summed over all steps.

Sampling runs through the production scheduler, which forks a request when its prompt is computed; all its choices are
of one length. Beam search runs its beams' tables directly: each step they are forked, copied on write and released as
the beams of `BeamProcess` live and die.
"""

from dataclasses import dataclass

import numpy as np

from bench.beam_process import BeamProcess
from bench.lengths import ALPACA, SHAREGPT, SIGMA, LengthPair
from bench.machines import A100_7B, BLOCK_TOKENS
from bench.simulation import Policies, Setup, Simulation, uncached_kv
from bench.table import Row
from bench.traces import base_trace
from slora.block_table import BlockTable
from slora.kv_cache import KVCache
from slora.step_plan import StepPlan
from slora.tenant import Tenant

WIDTHS = (2, 4, 6)
# Percent of blocks saved in the PagedAttention paper (SOSP'23, figure 15 and section 6.3); of ShareGPT it gives ranges.
PAPER = {
    ("sampling", "Alpaca-like"): {2: "6.1", 4: "8.5", 6: "9.8"},
    ("sampling", "ShareGPT-like"): {2: "16.2", 4: "", 6: "30.5"},
    ("beam", "Alpaca-like"): {2: "37.6", 4: "53.1", 6: "55.2"},
    ("beam", "ShareGPT-like"): {2: "44.3", 4: "", 6: "66.3"},
}
RATES = {"Alpaca-like": 20.0, "ShareGPT-like": 1.0}  # requests/s: no queue, no preemption


@dataclass(slots=True)
class Saving:
    held: int = 0
    alone: int = 0

    def count(self, tables: list[BlockTable]) -> None:
        """Tables of one request; blocks that are given back don't occur here."""
        self.alone += sum(table.num_pages for table in tables)
        self.held += len({page for table in tables for page in table.held})

    @property
    def percent(self) -> float:
        return 100 * (1 - self.held / self.alone)


class SharingMeter:
    """Looks at every `every`-th step."""

    def __init__(self, every: int = 8) -> None:
        self.saving = Saving()
        self._every = every
        self._steps = 0

    def observe(self, simulation: Simulation, plan: StepPlan, seconds: float) -> None:
        self._steps += 1
        if self._steps % self._every:
            return
        groups: dict[str, list[BlockTable]] = {}
        for sequence in simulation.running.values():
            groups.setdefault(sequence.request.request_id, []).append(sequence.blocks)
        for tables in groups.values():
            self.saving.count(tables)


def sampling_saved(lengths: LengthPair, width: int, count: int, sigma: float) -> float:
    """Percent."""
    meter = SharingMeter()
    simulation = Simulation(
        # Nothing but forks shall share pages.
        Setup(A100_7B, (8,), num_choices=width, policies=Policies(prefix_cache="off")),
        [meter],
    )
    simulation.run(base_trace(count, RATES[lengths.name], lengths, sigma=sigma))
    return meter.saving.percent


def beam_saved(lengths: LengthPair, width: int, count: int, sigma: float, *, is_alike: bool) -> float:
    """Percent. One request after another: how many run at once changes nothing about sharing."""
    random = np.random.default_rng(0)
    prompts, outputs = lengths.draw(count, random, sigma)
    saving = Saving()
    for prompt, output in zip(prompts, outputs, strict=True):
        _run_beams(prompt, output, BeamProcess(width, random, is_alike=is_alike), saving)
    return saving.percent


def _run_beams(prompt: int, output: int, process: BeamProcess, saving: Saving) -> None:
    """The prompt's KV, then `output` tokens a beam; the last one's KV is never computed."""
    pages, tenant = process.width * (-(-(prompt + output) // BLOCK_TOKENS) + 1), Tenant("beams")
    kv = uncached_kv(pages, BLOCK_TOKENS)
    beams = [BlockTable(BLOCK_TOKENS)]
    beams[0].extend(kv.allocate(beams[0].pages_missing(prompt), tenant))
    saving.count(beams)
    for position in range(prompt, prompt + output - 1):
        beams = _follow(beams, process.next_parents(), kv)
        for beam in beams:
            if beam.must_copy(position, kv):
                beam.copy_on_write(position, kv, tenant)
            beam.extend(kv.allocate(beam.pages_missing(position + 1), tenant))
        saving.count(beams)
    for beam in beams:
        beam.release(kv)
    assert tenant.num_pages == 0, "a beam's page was lost"


def _follow(beams: list[BlockTable], parents: list[int], kv: KVCache) -> list[BlockTable]:
    """The tables of the beams that continue `parents`; those whom nobody continues give their pages back."""
    survivors = [beams[parent].fork(kv) for parent in parents]
    for beam in beams:
        beam.release(kv)
    return survivors


def sharing_rows(count: int, sigma: float = SIGMA) -> list[Row]:
    """count: requests of each kind. sigma: of their lengths."""
    rows = []
    for lengths in (ALPACA, SHAREGPT):
        for width in WIDTHS:
            rows.append(
                {
                    "lengths": lengths.name,
                    "sigma": sigma,
                    "width": width,
                    "sampling saves %": sampling_saved(lengths, width, count, sigma),
                    "paper": PAPER["sampling", lengths.name][width],
                    "alike beams save %": beam_saved(lengths, width, count, sigma, is_alike=True),
                    "independent %": beam_saved(lengths, width, count, sigma, is_alike=False),
                    "paper, beams": PAPER["beam", lengths.name][width],
                }
            )
    return rows
