"""Chooses what each step computes: iteration-level (continuous) batching under a token budget (Orca, OSDI'22).

Decode steps and chunks of prefill share one step; a request joins at any step. Who is next is the waiting queue's
choice; nobody overtakes the next one to its pages, with two exceptions: a request whose adapter is still on its way
waits aside, and a tenant at its own ceiling is passed over.

Pages are found in this order: free ones, cached ones (prefixes and idle adapters, whichever the evictor gives up),
those of running sequences, which give way as the queue says: their KV goes to the host (swap), or is computed again
later (recompute), whichever is estimated to cost less.

A request of several choices runs as one sequence, in as many places of `max_num_seqs` as it has choices, until its
prompt is computed. Then it forks: the choices share its pages, and each goes its own way from there. One that is
preempted gives up its references only, and comes back alone. The beams of a search fork after each token, and wait for
each other (`beams`) with their pages. Where all who run wait, others give way to those whom they wait for.

Where every layer has a window, a sequence gives back the blocks that no token to come looks back on.

Plain Python, deterministic given its inputs, the time among them. Knows no tensor, no socket.
"""

from collections.abc import Iterable
from dataclasses import replace

from slora.adapter_place import AdapterPlace
from slora.cost_model import Costs
from slora.errors import DeadlineMissed, RequestFailed
from slora.pool.swap_space import SwapSpace
from slora.request import FinishReason, StepOutput, TokenDelta, TokenLogprobs
from slora.scheduler.adapter_supply import AdapterSupply
from slora.scheduler.admission import Admission
from slora.scheduler.beams import Beams
from slora.scheduler.charges import Charges
from slora.scheduler.deadlines import Deadlines
from slora.scheduler.lifecycle import Lifecycle
from slora.scheduler.load_pace import LoadPace
from slora.scheduler.pins import Pins
from slora.scheduler.prefix_cache import PrefixCache
from slora.scheduler.prewarming import Prewarming
from slora.scheduler.reclaim import Reclaim
from slora.scheduler.sequence import Sequence
from slora.scheduler.step_plan import Chunk, Sampled, StepPlan
from slora.scheduler.swapping import Swapping
from slora.scheduler.unified_memory import UnifiedMemory
from slora.scheduler_config import SchedulerConfig
from slora_adapters.loader.source import AdapterSource
from slora_adapters.version import AdapterVersion

# A request ends after so many steps that could not bring what it needs: perhaps its adapter breaks them.
_MOST_BROKEN_STEPS = 3


class Scheduler:
    """Owns the sequences and, through them, every held page of `memory`.

    Its parts, each of which knows those before it: memory, supply (adapters), prefixes, swapping, lifecycle (where each
    sequence is), reclaim (who gives way), admission (who starts), pins (what is there before anybody asks), prewarming
    (what comes if there is room).
    """

    def __init__(self, config: SchedulerConfig, source: AdapterSource, costs: Costs) -> None:
        self.num_deadlines_missed = 0
        self._is_at_rest = True
        self.memory = UnifiedMemory(config, costs)
        self.supply = AdapterSupply(self.memory.residency, source, config.full_page_bytes)
        self.prefixes = PrefixCache(
            self.memory.kv, config.footprint, is_public=config.prefix_cache == "public"
        )
        self.swapping = Swapping(SwapSpace(config.swap_pages), self.memory.kv, costs, config.preemption)
        self._config = config
        self._costs = costs
        self._charges = Charges(costs)
        self._deadlines = Deadlines()
        self._unwritten: list[Sequence] = []  # since a step that was taken back
        self._lifecycle = Lifecycle(config, self.memory, self.supply, self.swapping)
        self._batch = self._lifecycle.batch
        self._reclaim = Reclaim(config.footprint, self.memory, self.supply, self._lifecycle, self.swapping)
        self._beams = Beams(self._lifecycle, self._charges)
        self._admission = Admission(
            config,
            self.memory,
            self.supply,
            self._lifecycle,
            self._reclaim,
            self.prefixes,
            self.swapping,
            self._charges,
            LoadPace(costs, config.full_page_bytes, config.load_pages),
        )
        self.pins = Pins(self.memory, self.supply, self._reclaim, self._batch)
        self.prewarming = Prewarming(self.memory, self.supply, self._reclaim, self._batch)

    @property
    def num_running(self) -> int:
        return len(self._batch)

    @property
    def num_waiting(self) -> int:
        return len(self._lifecycle.unfinished) - len(self._batch)

    @property
    def num_awaiting_adapter(self) -> int:
        return self.supply.num_awaiting

    @property
    def num_preemptions(self) -> int:
        return self._reclaim.num_preemptions

    @property
    def has_work(self) -> bool:
        """Whether a step could do something now; requests that only await an adapter do not count.

        Pins count until a step has done nothing: what the one before left may be room for them.
        """
        if len(self._batch) or len(self._lifecycle.queue) or self.supply.num_loading:
            return True
        return not self._is_at_rest and not self.pins.is_complete

    @property
    def next_due_s(self) -> float | None:
        """On the clock of `schedule`: then it should be called, even if nothing else has come up."""
        times = (self._deadlines.next_s, self.pins.next_try_s)
        return min((time for time in times if time is not None), default=None)

    def find(self, request_id: str) -> list[Sequence]:
        """The sequences of a request that are not over."""
        return self._lifecycle.unfinished.find(request_id)

    def add(self, sequence: Sequence, now: float = 0.0) -> None:
        """Raises ContextTooLong if it could not run even alone."""
        self._lifecycle.add(sequence)
        deadline_s = sequence.request.deadline_s
        if deadline_s is not None:
            self._deadlines.add(sequence, now + deadline_s - self._costs.prefill_s(sequence.num_prompt))

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Ends a request, or one choice of it, wherever it is; unknown or finished ones are no error."""
        self._lifecycle.abort(request_id, index)

    def set_pins(self, versions: Iterable[AdapterVersion]) -> None:
        """These adapters and no others are brought to the pool before anybody asks for them, and stay."""
        self.pins.want(versions)

    def prewarm(self, version: AdapterVersion) -> AdapterPlace:
        """Brings an adapter to the host, and to the pool if there is room. Returns where it is now."""
        return self.prewarming.want(version)

    def forget(self, version: AdapterVersion) -> None:
        """The adapter was deleted: it leaves now, or with the last request that runs on it or waits for it."""
        self.pins.forget(version)
        self.prewarming.forget(version)
        self._lifecycle.forget(version)

    def schedule(self, now: float = 0.0) -> StepPlan:
        """now: seconds on any clock that only grows."""
        plan = StepPlan()
        self._reclaim.begin_step()
        self._beams.start_forks(plan)
        plan.started.extend(sequence for sequence in self._unwritten if sequence.is_running)
        self._unwritten = []
        for sequence in self._deadlines.missed(now):
            self.num_deadlines_missed += 1
            plan.ended.append(self._lifecycle.end(sequence, _too_late(sequence, self.num_waiting)))
        plan.ended.extend(self._lifecycle.collect_fetches())
        self._admission.continue_loads(plan)
        budget = self._continue_running(plan, self._config.max_num_batched_tokens)
        self._admission.admit(plan, budget)
        while self._is_stuck(plan) and self._admission.make_way(plan):
            self._admission.admit(plan, budget)
        fetched, num_pages = self.supply.take_prefetched(), self._admission.load_ahead(plan)
        self.prewarming.load(fetched)
        self.pins.bring(plan, num_pages, now, fetched)
        self.prewarming.fetch()
        plan.chunks.sort(key=_by_slot)
        for chunk in plan.chunks:
            for sequence in chunk.forks:  # their first tokens are drawn in this step
                self._batch.seat(sequence)
                plan.started.append(sequence)
        self._is_at_rest = not (plan.chunks or plan.loads or plan.ended)
        return plan

    def postprocess(self, plan: StepPlan, sampled: list[Sampled]) -> list[StepOutput]:
        """Takes in the tokens of `plan`, one for each of the chunks' draws, in order; finished sequences leave."""
        self.supply.settle(plan)
        self.pins.settle(plan)
        self.swapping.settle()
        outputs = list(plan.ended)
        tokens = iter(sampled)
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.num_computed += chunk.num_tokens
            if not sequence.done:  # nor is it over, with a choice that failed in this step
                self.prefixes.name(sequence)
            if sequence.scores and not sequence.done:
                outputs.append(_tell_scores(sequence))
            if chunk.forks:
                self._fork(chunk)
            for choice in chunk.draws:
                token = next(tokens)
                if not choice.done:  # over, if another choice of the request just failed
                    outputs.extend(self._take(choice, token))
        return outputs

    def drop(self, plan: StepPlan, chunks: list[Chunk], error: Exception) -> list[StepOutput]:
        """These chunks could not be computed: they leave the plan, and their requests end with `error`."""
        dropped = {id(chunk.sequence) for chunk in chunks}
        plan.chunks[:] = [chunk for chunk in plan.chunks if id(chunk.sequence) not in dropped]
        outputs = []
        for chunk in chunks:
            for fork in chunk.forks:
                self._batch.unseat(fork)
            if not chunk.sequence.done:  # another choice of its request may have been dropped, too
                self.memory.kv.discard(chunk.sequence.block_keys)
                outputs.append(self._lifecycle.end(chunk.sequence, error))
        return outputs

    def take_back(self, plan: StepPlan, error: Exception) -> list[StepOutput]:
        """Undoes a step that could not move its pages. Nothing that it was to bring to the pool is trusted: sequences
        that need it start over, or end with `error` after too many such steps. All others go on as before the step."""
        outputs = list(plan.ended)
        for chunk in plan.chunks:
            for fork in chunk.forks:
                self._batch.unseat(fork)
        residents = self.supply.distrust(plan)
        self.pins.fail(residents)
        restored = self.swapping.distrust()
        targets = {target for _, target in plan.copies}
        for sequence in self._batch:
            is_trusted = sequence.resident not in residents and sequence not in restored
            if sequence.done or (is_trusted and targets.isdisjoint(sequence.blocks.held)):
                continue
            sequence.num_broken_steps += 1
            if sequence.num_broken_steps >= _MOST_BROKEN_STEPS:
                outputs.append(self._lifecycle.end(sequence, error))
            elif (misfit := self._lifecycle.back_to_queue(sequence)) is not None:
                outputs.append(self._lifecycle.end(sequence, misfit))
        self.swapping.settle()
        # Their rows of the sampling table were not written, or count tokens that are lost.
        self._unwritten += [*plan.started, *(chunk.sequence for chunk in plan.chunks)]
        return outputs

    def check(self) -> None:
        """Proves that no page is lost and every reference has its owner."""
        self.memory.check(list(self._batch))
        self.supply.check()
        self.pins.check()
        self._lifecycle.check()

    def _is_stuck(self, plan: StepPlan) -> bool:
        """Whether nothing happens in this step, or will by itself in the next, while beams wait for each other."""
        if plan.chunks or self.supply.num_loading:
            return False
        return any(sequence.has_proposed for sequence in self._batch)

    def _continue_running(self, plan: StepPlan, budget: int) -> int:
        """Plans the next tokens of running sequences, oldest first; returns the budget left."""
        running = list(self._batch)
        if self._config.rope_switch is not None:
            for sequence in running:
                self._lifecycle.switch_rope(sequence)
        # A prefill chunk leaves one token for every sequence that decodes, so a long prompt never stalls others.
        reserved = sum(1 for sequence in running if len(sequence.token_ids) - sequence.num_computed == 1)
        for sequence in running:
            num_tokens = len(sequence.token_ids) - sequence.num_computed
            if num_tokens == 1:
                reserved -= 1
            else:
                num_tokens = min(num_tokens, sequence.chunk_limit, budget - reserved)
            if num_tokens <= 0 or not sequence.is_running:  # it gave way meanwhile
                continue
            resident = sequence.resident
            if resident is not None and not self.supply.is_ready(resident):
                continue
            if self._grow(sequence, num_tokens, plan):
                plan.add(sequence, num_tokens)
                self._charges.prompt(sequence, num_tokens)
                budget -= num_tokens
        return budget

    def _grow(self, sequence: Sequence, num_tokens: int, plan: StepPlan) -> bool:
        """Gets the pages for the next `num_tokens` tokens, from those who give way if need be, and a copy of the page
        they begin in if others read it. False: it gave way itself."""
        blocks, start, kv = sequence.blocks, sequence.num_computed, self.memory.kv
        self._reclaim.free_behind_window(sequence)
        missing, copied = blocks.pages_missing(start + num_tokens), blocks.must_copy(start, kv)
        if not missing and not copied:  # as in nearly every step of a sequence that decodes
            return True
        while not self._reclaim.make_room(missing + copied, sequence):
            victim = self._reclaim.victim(missing + copied, sequence.tenant)
            self._reclaim.preempt(victim, plan)
            if not sequence.is_running:  # nor is it, if a choice of its request gave way and can't come back
                return False
            # When another choice gives way, the page may be left to this one.
            copied = blocks.must_copy(start, kv)
        if copied:
            plan.copies.append(blocks.copy_on_write(start, kv, sequence.tenant))
        blocks.extend(kv.allocate(missing, sequence.tenant))
        return True

    def _fork(self, chunk: Chunk) -> None:
        """The choices that begin with this chunk start to run beside the one whose prompt it was."""
        for sequence in chunk.forks:
            self._lifecycle.join(sequence, chunk.sequence)
        chunk.sequence.num_choices = 1

    def _take(self, sequence: Sequence, sampled: Sampled) -> list[StepOutput]:
        if sampled.token_id is None:
            self.memory.kv.discard(sequence.block_keys)  # nobody else shall find the KV that led here
            adapter = sequence.request.adapter
            name = f"adapter {adapter.digest}" if adapter else "the base model"
            error = RequestFailed(f"the logits of {name} were not finite on this prompt")
            return [self._lifecycle.end(sequence, error)]
        if sequence.search is not None:
            assert sampled.proposal is not None, "a beam proposes"
            return self._beams.propose(sequence, sequence.search, sampled.proposal)
        return [self._append(sequence, sampled.token_id, sampled.logprobs)]

    def _append(self, sequence: Sequence, token_id: int, entry: TokenLogprobs | None) -> StepOutput:
        sequence.token_ids.append(token_id)
        self._charges.output(sequence)
        reason = None
        if token_id in sequence.stop_ids:
            reason = FinishReason.STOP
        elif sequence.num_generated >= sequence.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._lifecycle.retire(sequence)
        logprobs = (entry,) if entry is not None else None
        delta = TokenDelta((token_id,), reason, logprobs, sequence.index)
        if sequence.num_cached and sequence.index == 0 and sequence.num_generated == 1:
            delta = replace(delta, num_cached=sequence.num_cached)
        return StepOutput(sequence.request.request_id, delta)


def _tell_scores(sequence: Sequence) -> StepOutput:
    """A piece in each step that finds any: all of a long prompt's at once could be more than a frame may hold."""
    scores, sequence.scores = tuple(sequence.scores), []
    return StepOutput(sequence.request.request_id, TokenDelta((), prompt_logprobs=scores))


def _by_slot(chunk: Chunk) -> tuple[int, float, int]:
    """Base rows last: LoRA tiles then cover a prefix of the tokens. A tile has one weight."""
    slot = chunk.slot if chunk.slot is not None else 1 << 31
    return (slot, chunk.sequence.request.adapter_weight, chunk.sequence.arrival)


def _too_late(sequence: Sequence, num_waiting: int) -> DeadlineMissed:
    return DeadlineMissed(
        f"the first token was to come within {sequence.request.deadline_s:g} s, which can't be kept ({num_waiting - 1} "
        "others wait); allow more time or send it later"
    )
