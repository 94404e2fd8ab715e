"""A scheduler with a runner that computes nothing but remembers what each page holds.

Each KV place holds the mark that was written last, a new one for each token computed; each adapter page the (version,
part) that was loaded. A chunk may run only if it finds all marks of its sequence, those that it was forked with
included, up to where its window begins. So a shared page that is written to, a block that is given back too soon, or a
plan that reads what was never computed fails the step that does it.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator

from slora.kv_footprint import KVFootprint
from slora.page_pool import PagePool
from slora.request import EngineRequest, StepOutput
from slora.residency import Residency
from slora.sampling_params import SamplingParams
from slora.scheduler import Scheduler, SchedulerLimits
from slora.sequence import Sequence
from slora.step_plan import AdapterLoad, Chunk, Sampled, StepPlan
from slora_adapters.version import AdapterVersion
from tests.support.scripted_source import FULL_PAGE_BYTES, ScriptedSource

BLOCK_TOKENS = 4
STOP_TOKEN = 0


class BrokenStep(Exception):
    """What a step fails with here."""


class SchedulerBench:
    """`choose` draws the token of a sequence; None stands for logits that are not finite. host_pages: the pages of all
    adapters that the host can hold at once.
    """

    def __init__(
        self,
        adapters: dict[AdapterVersion, int],
        *,
        num_pages: int,
        num_slots: int = 8,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 16,
        window: int | None = None,
        rope_switch: int | None = None,
        host_pages: int | None = None,
        choose: Callable[[Sequence], int | None] = lambda sequence: 1,
    ) -> None:
        self.footprint = KVFootprint(BLOCK_TOKENS, window)
        self.limits = SchedulerLimits(
            max_num_seqs, max_num_batched_tokens, FULL_PAGE_BYTES, self.footprint, rope_switch
        )
        self.pool = PagePool(num_pages)
        self.residency = Residency(self.pool, num_slots)
        host_bytes = host_pages * FULL_PAGE_BYTES if host_pages is not None else None
        self.source = ScriptedSource(adapters, host_bytes)
        self.scheduler = Scheduler(self.limits, self.pool, self.residency, self.source)
        self.last_plan = StepPlan()
        self._choose = choose
        self.num_copies = 0
        self._marks = itertools.count()
        self._long_marks: set[int] = set()  # of tokens that were rotated with the long factors
        self._kv: dict[tuple[int, int], int] = {}
        self._written: dict[tuple[str, int], list[int]] = {}  # by choice: the mark of each of its tokens
        self._adapter_pages: dict[int, tuple[AdapterVersion, int]] = {}
        self._slots: dict[int, tuple[int, AdapterVersion]] = {}

    def add(
        self,
        request_id: str,
        *,
        prompt: int = 1,
        max_tokens: int | None = 1,
        adapter: AdapterVersion | None = None,
        longest: int = 64,
        n: int = 1,
    ) -> Sequence:
        """`longest`: what max_tokens None means. Raises ContextTooLong."""
        sampling = SamplingParams(max_tokens=max_tokens, n=n)
        request = EngineRequest(request_id, "tenant", [1] * prompt, adapter, sampling)
        sequence = Sequence(request, max_tokens or longest, frozenset([STOP_TOKEN]), 0, BLOCK_TOKENS)
        self.scheduler.add(sequence)
        return sequence

    def step(self, *, breaks: bool = False) -> list[StepOutput]:
        plan = self.last_plan = self.scheduler.schedule()
        self._check_plan(plan)
        if breaks:
            outputs = self.scheduler.fail(plan, BrokenStep())
        else:
            outputs = self.scheduler.postprocess(plan, self._run(plan))
        self.scheduler.check()
        return outputs

    def run_to_end(self, most_steps: int) -> Iterator[StepOutput]:
        """Steps, with every fetch arriving at once, until nobody is left; outputs as they come."""
        for _ in range(most_steps):
            if not self.scheduler.num_running + self.scheduler.num_waiting:
                return
            self.source.deliver()
            yield from self.step()
        raise AssertionError(f"requests are left after {most_steps} steps")

    def _check_plan(self, plan: StepPlan) -> None:
        assert plan.num_tokens <= self.limits.max_num_batched_tokens
        assert len(plan.chunks) <= self.scheduler.num_running <= self.limits.max_num_seqs
        assert sum(len(chunk.draws) for chunk in plan.chunks) <= self.limits.max_num_seqs
        sequences = [chunk.sequence for chunk in plan.chunks]
        assert len(set(map(id, sequences))) == len(sequences), "a sequence is twice in a step"
        slots = [chunk.slot if chunk.slot is not None else 1 << 31 for chunk in plan.chunks]
        assert slots == sorted(slots), "tokens of an adapter are not side by side"
        for chunk in plan.chunks:
            self._check_chunk(chunk)

    def _run(self, plan: StepPlan) -> list[Sampled]:
        self._copy(plan.copies)
        for load in plan.loads:
            self._load(load)
        for chunk in plan.chunks:
            self._check_adapter(chunk)
            self._compute(chunk)
        return [Sampled(self._choose(sequence)) for chunk in plan.chunks for sequence in chunk.draws]

    def _copy(self, copies: list[tuple[int, int]]) -> None:
        self.num_copies += len(copies)
        places = [(source, target, offset) for source, target in copies for offset in range(BLOCK_TOKENS)]
        found = {(target, offset): self._kv.get((source, offset)) for source, target, offset in places}
        self._write({target for _, target in copies})
        self._kv |= {place: mark for place, mark in found.items() if mark is not None}

    def _load(self, load: AdapterLoad) -> None:
        resident = load.resident
        assert self.source.is_pinned(load.packed), "a host copy was read after it was released"
        assert len(resident.pages) * FULL_PAGE_BYTES >= len(load.packed.buffer)
        self._write(resident.pages)
        for part, page in enumerate(resident.pages):
            self._adapter_pages[page] = resident.version, part
        self._slots[resident.slot] = resident.generation, resident.version

    def _check_adapter(self, chunk: Chunk) -> None:
        version = chunk.sequence.request.adapter
        if version is None:
            assert chunk.slot is None, "a request without an adapter got one"
            return
        assert chunk.slot is not None and chunk.generation is not None, "a request runs without its adapter"
        assert self._slots[chunk.slot] == (chunk.generation, version)
        resident = self.residency.find(version)
        assert resident is not None and resident.num_users > 0
        held = [self._adapter_pages.get(page) for page in resident.pages]
        assert held == [(version, part) for part in range(len(held))], "an adapter's pages were overwritten"

    def _compute(self, chunk: Chunk) -> None:
        request_id, end = chunk.sequence.request.request_id, chunk.start + chunk.num_tokens
        pages = chunk.sequence.blocks.pages.tolist()
        places = [(pages[t // BLOCK_TOKENS], t % BLOCK_TOKENS) for t in range(end)]
        marks = self._written.setdefault((request_id, chunk.sequence.index), [])
        marks[chunk.start :] = [next(self._marks) for _ in range(chunk.num_tokens)]
        self._write({page for page, _ in places[chunk.start :]}, keep_kv=True)
        self._kv |= dict(zip(places[chunk.start :], marks[chunk.start :], strict=True))
        if chunk.sequence.is_long:
            self._long_marks.update(marks[chunk.start :])
        seen = self.footprint.first_token_seen(chunk.start)
        assert [self._kv.get(place) for place in places[seen:]] == marks[seen:], "KV was lost or overwritten"
        ropes = {mark in self._long_marks for mark in marks[seen:]}
        assert ropes == {chunk.sequence.is_long}, "KV of one rope was read with the other"
        for sequence in chunk.forks:
            self._written[request_id, sequence.index] = marks.copy()

    def _write(self, pages: Iterable[int], *, keep_kv: bool = False) -> None:
        """Whoever writes to a page ends what else was there."""
        for page in pages:
            self._adapter_pages.pop(page, None)
            if not keep_kv:
                for offset in range(BLOCK_TOKENS):
                    self._kv.pop((page, offset), None)

    def _check_chunk(self, chunk: Chunk) -> None:
        sequence = chunk.sequence
        assert not sequence.done, "an ended request was planned"
        assert chunk.num_tokens > 0
        assert chunk.start == sequence.num_computed
        end = chunk.start + chunk.num_tokens
        assert end <= len(sequence.token_ids)
        assert chunk.samples == (end == len(sequence.token_ids))
        assert len(chunk.draws) == (sequence.num_choices if chunk.samples else 0)
        assert sequence.blocks.num_pages * BLOCK_TOKENS >= end
        switch = self.limits.rope_switch
        assert sequence.is_long == (switch is not None and len(sequence.token_ids) > switch)
        held, entries = sequence.blocks.held, sequence.blocks.pages.tolist()
        assert set(entries) == set(held), "an entry is no page of the sequence"
        assert len(held) <= self.footprint.pages(end, chunk.num_tokens)
        written = sequence.blocks.pages[chunk.start // BLOCK_TOKENS : -(-end // BLOCK_TOKENS)]
        assert not any(self.pool.is_shared(page) for page in written.tolist()), "a shared page is written to"
