"""A plain continuous-batching loop over a memory layout: for baselines only.

First come, first served; a prompt is computed as a whole or in chunks of the step's budget; when a layout runs out of
room, the newest request gives way and computes everything again. The same rules as the production scheduler's with
`scheduling="fcfs"` and `preemption="recompute"`, and the same costs of a step, so what differs is the memory.
"""

from collections import deque
from dataclasses import dataclass

from bench.memory_layouts import Job, Layout
from bench.simulation.machine import Machine
from bench.simulation.traces import Trace
from slora.core.cost_model import StepWork


@dataclass(frozen=True, slots=True)
class LoopResult:
    """Means over the time in which somebody waited, after the warm-up.

    useful_of_taken: real token states and adapter bytes over the memory taken for them; useful_of_all: over all of it.
    """

    running: float
    useful_of_taken: float
    useful_of_all: float
    requests_per_s: float
    preemptions: int


class ServingLoop:
    def __init__(
        self,
        machine: Machine,
        layout: Layout,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        warm_up_s: float,
    ) -> None:
        self._machine = machine
        self._layout = layout
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._warm_up_s = warm_up_s
        self._now = 0.0
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._preemptions = 0
        self._seconds = self._sum_running = self._sum_of_taken = self._sum_of_all = 0.0

    def run(self, trace: Trace) -> LoopResult:
        position = 0
        while position < len(trace) or self._waiting or self._running:
            while position < len(trace) and trace[position].arrival_s <= self._now:
                self._waiting.append(Job(trace[position]))
                position += 1
            if self._waiting or self._running:
                self._step()
            else:
                self._now = trace[position].arrival_s
        total = self._seconds or 1.0
        return LoopResult(
            self._sum_running / total,
            self._sum_of_taken / total,
            self._sum_of_all / total,
            len(trace) / self._now,
            self._preemptions,
        )

    def _step(self) -> None:
        chunks: dict[Job, int] = {}
        budget = self._continue_running(chunks)
        loaded = self._admit(chunks, budget)
        assert chunks, "a request does not fit into an empty pool"
        seconds = self._cost(chunks, loaded)
        self._measure(chunks, seconds)
        self._now += seconds
        for job, count in chunks.items():
            job.num_held += count
            if job.num_uncomputed == 0:
                job.num_generated += 1
                if job.num_generated == job.request.output_tokens:
                    self._layout.stop(job)
                    self._running.remove(job)

    def _continue_running(self, chunks: dict[Job, int]) -> int:
        budget = self._max_num_batched_tokens
        position = 0
        while position < len(self._running):
            job = self._running[position]
            position += 1
            count = min(job.num_uncomputed, budget)
            if count and self._grow(job, count):
                chunks[job] = count
                budget -= count
        return budget

    def _grow(self, job: Job, count: int) -> bool:
        while not self._layout.grow(job, job.num_held + count):
            newest = self._running.pop()
            self._layout.stop(newest)
            newest.num_held = 0
            self._waiting.appendleft(newest)
            self._preemptions += 1
            if newest is job:
                return False
        return True

    def _admit(self, chunks: dict[Job, int], budget: int) -> int:
        """Returns how much of adapters is loaded."""
        loaded = 0
        while self._waiting and budget and len(self._running) < self._max_num_seqs:
            job = self._waiting[0]
            count = min(job.num_uncomputed, budget)
            load = self._layout.start(job, count, len(self._running))
            if load is None:
                break
            loaded += load
            self._running.append(self._waiting.popleft())
            chunks[job] = count
            budget -= count
        return loaded

    def _cost(self, chunks: dict[Job, int], loaded: int) -> float:
        decoding = [j for j, count in chunks.items() if count == 1 and j.num_held >= j.request.prompt_tokens]
        prefill = sum(chunks.values()) - len(decoding)
        context = sum(job.num_held + 1 for job in decoding)
        loaded_bytes = loaded * self._machine.token_bytes
        return self._machine.costs.step_seconds(StepWork(prefill, len(decoding), context, 0, loaded_bytes))

    def _measure(self, chunks: dict[Job, int], seconds: float) -> None:
        if self._now < self._warm_up_s or not self._waiting:
            return
        tokens = sum(job.num_held for job in self._running) + sum(chunks.values())
        useful = tokens + self._layout.num_adapter
        self._seconds += seconds
        self._sum_running += seconds * len(self._running)
        self._sum_of_taken += seconds * useful / self._layout.num_taken
        self._sum_of_all += seconds * useful / (self._machine.num_pages * self._machine.block_tokens)
