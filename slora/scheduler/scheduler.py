"""The scheduler: it decides what each step computes.

It does iteration-level (continuous) batching under a token budget (Orca, OSDI'22). Decode rows and prefill chunks share
one step. A request can join the batch at any step.

Admission: the waiting queue chooses the next sequence. If it does not fit, no later sequence is admitted before it.
There are two exceptions. A request with an adapter that is not yet on the host waits outside the queue. A tenant at
its ceiling is skipped.

Background requests: interactive requests are planned first. Background requests fill the rest of the step, as long as
this makes the step only a little longer (`_background_budget`). No background request is admitted while an interactive
request waits that could run. Background requests are preempted first. They are preempted even to admit an interactive
request.

Pages come from three sources, in this order:

    1. free pages
    2. cached pages; the evictor chooses between prefixes and idle adapters
    3. pages of running sequences, which are preempted in the order that the queue defines

The KV of a preempted sequence is swapped to the host or recomputed later, whichever the cost model estimates to be
cheaper.

Overlapped steps: `schedule` may plan a step while the device still runs the one before. `advance` records that a
planned step is launched, and `postprocess` applies its results later. In between, the tokens that the step samples are
pending: a sequence with a pending token takes part in the next plan, and the device fills in the token's id. The device
runs all copies and computations in the order of the plans. So a page that is freed while a launched step still uses it
can be used by the next plan.

Forks: a request with several choices runs as one sequence until its prompt is computed. From the start it occupies one
place of `max_num_seqs` per choice, or as many as there are. Then it forks: the choices share the prompt's pages and
decode independently. Choices without a place are queued. A preempted choice drops only its own page references and
resumes alone.

Places: if all places of the batch are taken, tenants with more than their share of them yield some to the next sequence
in the queue. Their sequences are preempted (`FairQueue.choose_displaced`). So no tenant waits for the ends of another
tenant's answers.

Rows: beside work of other tenants, a step computes only some of a tenant's decode rows (`RowBudget`). The others keep
their places and pages.

Beams: the beams of a search fork after each token. A beam that has proposed its continuations waits for the other beams
and keeps its pages (`beams`). If every running sequence is a waiting beam, no sequence can continue. The scheduler then
preempts a beam to make room for the next sequence in the queue. It never preempts a beam of that sequence's own search.

If every layer has a sliding window, a sequence frees the blocks that no later token attends to.

Plain Python without tensors or sockets. The same inputs, which include the time, always give the same plans.
"""

import math
from collections import Counter
from collections.abc import Iterable
from itertools import chain
from operator import attrgetter

from slora.core.cost_model import CostModel
from slora.core.engine_config import SchedulerConfig
from slora.core.engine_state import AdapterPlace, Backlog, ServiceSpan
from slora.core.errors import DeadlineMissed, RequestFailed, RequestRefused
from slora.core.request import (
    EndedRequest,
    FinishReason,
    RequestUsage,
    StepOutput,
    TokenDelta,
    TokenLogprobs,
)
from slora.grammar.grammar_compiler import GrammarCompiler
from slora.memory.swap_space import SwapSpace
from slora.memory.tenant_account import TenantAccount
from slora.memory.unified_paging import UnifiedPaging
from slora.scheduler.adapter_loading import AdapterLoading
from slora.scheduler.admission import Admission
from slora.scheduler.beams import Beams
from slora.scheduler.budgets import (
    ABSENT_STEPS,
    MIN_ROWS,
    QUIET_STEPS,
    BackgroundBudget,
    PrefillBudget,
    RowBudget,
    tokens_beside_others,
)
from slora.scheduler.charges import charge_mask, charge_output, charge_prompt, estimate_backlog
from slora.scheduler.deadlines import Deadlines
from slora.scheduler.drafting import Drafting
from slora.scheduler.lifecycle import Lifecycle
from slora.scheduler.pins import Pins, Prewarming
from slora.scheduler.preemption import Preemption
from slora.scheduler.prefix_cache import PrefixCache
from slora.scheduler.sequence import Sequence
from slora.scheduler.served_counts import ServedRequests
from slora.scheduler.service_elsewhere import ServiceElsewhere
from slora.scheduler.step_plan import Chunk, SampledToken, StepPlan
from slora.scheduler.swapping import Swapping
from slora.scheduler.waiting_queues import FairQueue
from slora_adapters.loader.source import AdapterSource
from slora_adapters.version import AdapterVersion

# A request fails when this many steps have failed of which it may be the cause, since it last gained a token. It may be
# if a step failed to move its adapter or its KV, or failed without a known culprit.
_MAX_FAILED_STEPS = 3
_CHUNK_ORDER = attrgetter("sequence.chunk_order")

# A sequence, the tokens that it gets, and their log-probabilities if the request wants them.
_Gain = tuple[Sequence, tuple[int, ...], tuple[TokenLogprobs, ...] | None]


class Scheduler:
    """Owns the sequences and, through them, every held page of `paging`.

    It is composed of parts. Each part depends only on the parts before it in this list:

        paging      the page pool and its users
        adapters    fetches adapters to the host and loads them into the pool
        prefixes    the prefix cache
        swapping    swaps KV to the host and back
        lifecycle   the state of each sequence
        preemption  eviction and preemption
        admission   admits waiting sequences to the batch
        pins        keeps pinned adapters in the pool
        prewarming  loads adapters before their first request, if there is room
        drafting    prompt lookup: drafts the next tokens of decoding sequences
    """

    def __init__(
        self,
        config: SchedulerConfig,
        source: AdapterSource,
        costs: CostModel,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """grammars: the source of compiled grammars. None if no request uses structured output."""
        self.num_deadlines_missed = 0
        self.num_not_finite = 0
        self.paging = UnifiedPaging(config)
        self.adapters = AdapterLoading(
            self.paging,
            source,
            costs,
            config.full_page_bytes,
            config.load_pages,
            beside=config.loads_beside,
        )
        self.prefixes = PrefixCache(
            self.paging, self.adapters.changes_kv, is_public=config.prefix_cache == "public"
        )
        self.swapping = Swapping(SwapSpace(config.swap_pages), self.paging.kv, costs, config.preemption)
        self._config = config
        self._costs = costs
        # Whether the last step had nothing to do.
        self._was_idle = True
        # The times of the previous tokens of the sequences that got a token in the last step.
        self._last_tokens: list[float] = []
        # Sequences whose sampling table rows `undo_step` left outdated.
        self._stale_rows: list[Sequence] = []
        # Number of steps that are launched and not postprocessed.
        self._num_running_steps = 0
        self._num_quiet_steps = QUIET_STEPS
        # Number of steps since the last one with interactive work of several tenants, and these tenants.
        self._num_steps_alone = ABSENT_STEPS
        self._last_together: set[TenantAccount] = set()
        self._lifecycle = Lifecycle(config, self.paging, self.adapters, self.swapping, grammars)
        self.unfinished = self._lifecycle.unfinished
        self._deadlines = Deadlines(costs, self.unfinished)
        self.batch = self._lifecycle.batch
        queue = self._lifecycle.queue
        self._elsewhere = (
            ServiceElsewhere(self.paging.tenants, queue, costs) if isinstance(queue, FairQueue) else None
        )
        self._preemption = Preemption(self.paging, self._lifecycle, self.swapping)
        self._beams = Beams(self._lifecycle)
        self._admission = Admission(
            self.paging, self.adapters, self.prefixes, self._lifecycle, self._preemption
        )
        self.pins = Pins(self.paging, self.adapters, self._preemption, self.batch)
        self.prewarming = Prewarming(self.paging, self.adapters, self._preemption, self.batch)
        self.drafting = Drafting(config, self.paging, costs)

    @property
    def num_running(self) -> int:
        return len(self.batch)

    @property
    def num_waiting(self) -> int:
        return len(self.unfinished) - len(self.batch)

    def count_sequences(self) -> tuple[Counter[str], Counter[str]]:
        """Returns the numbers of running sequences and of waiting sequences, each by tenant."""
        running = Counter(sequence.tenant.name for sequence in self.batch)
        return running, Counter(sequence.tenant.name for sequence in self.unfinished) - running

    def estimate_backlog(self) -> Backlog:
        return estimate_backlog(
            self.unfinished, self.num_waiting, self.num_running, self._costs, self._config
        )

    @property
    def wanted_adapters(self) -> frozenset[AdapterVersion]:
        """The adapters that are in the pool, and those that are fetched for requests or prewarms."""
        resident = (adapter.version for adapter in self.paging.residency)
        return frozenset(chain(resident, self.adapters.waited_for, self.prewarming.requested))

    @property
    def num_awaiting_adapter(self) -> int:
        return self.adapters.num_waiting

    @property
    def num_preemptions(self) -> int:
        return sum(self._preemption.counts.values())

    @property
    def preemptions_by_kind(self) -> dict[str, int]:
        """Number of preemptions by kind: `swap`, `recompute` or `background`. Background sequences are always
        recomputed.
        """
        return dict(self._preemption.counts)

    @property
    def has_work(self) -> bool:
        """Whether a step could make progress now. Requests that only wait for an adapter fetch do not count as work.

        A pinned adapter that is not in the pool counts as work after a step that did something, which may have freed
        room. It no longer counts as work after a step that found nothing to do.
        """
        if len(self.batch) or len(self._lifecycle.queue) or self.adapters.num_loading:
            return True
        return not self._was_idle and not self.pins.all_resident

    @property
    def next_due_s(self) -> float | None:
        """The time at which `schedule` must be called again even without new work; None: never."""
        times = (self._deadlines.next_due_s, self.pins.next_retry_s)
        return min((time for time in times if time is not None), default=None)

    def find(self, request_id: str) -> list[Sequence]:
        """The unfinished sequences of a request."""
        return self.unfinished.find(request_id)

    def add(self, sequence: Sequence, now: float = 0.0) -> None:
        """Adds a new sequence. Raises ContextTooLong if it could not run even alone in the pool."""
        sequence.times.arrived_at = now
        self._lifecycle.add(sequence)
        deadline_s = sequence.request.deadline_s
        if deadline_s is not None:
            self._deadlines.add(sequence, now + deadline_s)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Ends a request, or only its choice `index`, in any state. An unknown or finished request is not an error."""
        self._lifecycle.abort(request_id, index)

    def set_pins(self, versions: Iterable[AdapterVersion]) -> None:
        """Replaces the set of pinned adapters.

        Pinned adapters are loaded before their first request and stay in the pool.
        """
        self.pins.replace(versions)

    def prewarm(self, version: AdapterVersion) -> AdapterPlace:
        """Fetches an adapter to the host, and loads it into the pool if there is room.

        Returns where the adapter is now.
        """
        return self.prewarming.request(version)

    def remove_adapter(self, version: AdapterVersion) -> None:
        """Drops a deleted adapter now, or when the last request that names the adapter has ended."""
        self.pins.remove(version)
        self.prewarming.remove(version)
        self._lifecycle.remove_adapter(version)

    def purge_tenant(self, name: str, error: Exception) -> list[StepOutput]:
        """Ends the tenant's requests with `error`, and drops its adapters and prefixes. Called between two steps."""
        unfinished = [sequence for sequence in self.unfinished if sequence.tenant.name == name]
        ended = {
            sequence.request.request_id: self._lifecycle.fail(sequence, error) for sequence in unfinished
        }
        self.adapters.purge(name)
        for version in [
            adapter.version for adapter in self.paging.residency if adapter.version.tenant == name
        ]:
            self.remove_adapter(version)
        for account in self.paging.tenants.find_both(name):
            self.paging.kv.remove_tenant(account)
        self.swapping.finish_step()
        return list(ended.values())

    def add_service_elsewhere(self, engine: str, spans: Iterable[ServiceSpan]) -> None:
        """Counts what another engine has charged to tenants. See `ServiceElsewhere`."""
        if self._elsewhere is not None:
            self._elsewhere.add(engine, spans)

    def advance_clock(self, now: float) -> None:
        """Advances the clock that measures page-seconds. now: seconds on the clock of `schedule`."""
        self.paging.pool.now = max(self.paging.pool.now, now)

    def pop_usage(self) -> list[EndedRequest]:
        """Returns the usage of the requests that ended since the last call."""
        return self._lifecycle.pop_usage()

    @property
    def token_gaps(self) -> list[tuple[float, int]]:
        """Seconds between the tokens of the last step and the tokens before them, and the number of sequences with each
        gap.
        """
        now = self.paging.pool.now
        return [(now - last_at, count) for last_at, count in Counter(self._last_tokens).items()]

    @property
    def served(self) -> ServedRequests:
        return self._lifecycle.served

    @property
    def total_usage(self) -> RequestUsage:
        """The sum over all requests that have ended."""
        return self._lifecycle.total_usage

    def schedule(self, now: float = 0.0) -> StepPlan:
        """Plans one step. now: seconds on any monotonic clock."""
        assert not (self._num_running_steps and self._config.prompt_lookup_tokens), (
            "drafts need the results of all earlier steps"
        )
        self.advance_clock(now)
        plan = StepPlan()
        self._preemption.begin_step()
        self._fail_missed_deadlines(plan, now)
        self._beams.start_forks(plan)
        plan.rows_to_write.extend(sequence for sequence in self._stale_rows if sequence.is_running)
        self._stale_rows = []
        plan.ended.extend(self._lifecycle.collect_grammars())
        plan.ended.extend(self._lifecycle.collect_fetches())
        if self.adapters.is_short_of_room:
            self._lifecycle.release_background_copies()
        self.adapters.begin_step(plan, self.batch)
        budget, rows = self._continue_running(plan)
        self._admission.admit(plan, budget)
        self._continue_held_back(plan, budget, rows)
        self._plan_background(plan, budget.num_tokens)
        while self._is_stuck_on_beams(plan) and self._preemption.preempt_for_stuck_beams(plan):
            self._admission.admit(plan, budget)
            self._admission.admit_background(plan, self._background_budget(plan, budget.num_tokens))
        self._admission.load_upcoming(plan)
        self._load_without_requests(plan, now)
        self._plan_forks(plan)
        self.drafting.add_drafts(plan)
        plan.chunks.sort(key=_CHUNK_ORDER)
        self._was_idle = not (plan.chunks or plan.loads or plan.ended)
        return plan

    def advance(self, plan: StepPlan) -> None:
        """Records that the step of `plan` is launched, before the next plan is made."""
        self._num_running_steps += 1
        self.swapping.finish_step()
        footprint = self.paging.footprint
        block_tokens, has_states = footprint.block_tokens, footprint.state_pages > 0
        for chunk in plan.chunks:
            sequence, start, num_tokens, samples, _, forks, drafts = chunk
            # The results decide how many of the drafted tokens count. So no plan is made before they are known.
            if sequence.is_finished or drafts:
                continue
            num_computed = sequence.num_computed + num_tokens
            sequence.num_computed = sequence.num_state_tokens = num_computed
            # If the chunk samples, its last token may be pending or be computed again.
            if num_computed - samples - sequence.num_named >= block_tokens:
                self.prefixes.insert(sequence, num_computed - samples)
            if has_states:
                self.prefixes.insert_state(sequence, start)
            if not samples:
                continue
            if sequence.num_choices > 1 and sequence.search is None:
                self._fork(chunk)
            sequence.num_pending += 1
            for fork in forks:
                fork.num_pending += 1

    def postprocess(self, plan: StepPlan, sampled: list[SampledToken]) -> list[StepOutput]:
        """Applies the results of a launched step: appends the sampled tokens, and ends the sequences that are finished.

        Steps are postprocessed in the order of their launch. A sequence that has ended since the launch gets nothing.

        sampled: one entry for each entry of each chunk's `sampled_sequences`, in order.
        """
        self._num_running_steps -= 1
        self._last_tokens.clear()
        self.adapters.finish_step(plan)
        self.pins.finish_step(plan)
        outputs = self._lifecycle.pop_refused()
        block_tokens, gains, first = self.paging.footprint.block_tokens, list[_Gain](), 0
        for chunk in plan.chunks:
            sequence, _, _, samples, _, forks, drafts = chunk
            is_plain = samples and not (forks or drafts or sequence.scores)
            is_plain = is_plain and sequence.matcher is None and sequence.search is None
            token_id = sampled[first].token_id if is_plain else None
            if token_id is None:
                outputs += self._append(gains)
                gains, end = [], first + len(chunk.sampled_sequences)
                outputs += self._apply_chunk(chunk, sampled[first:end])
                first = end
                continue
            # Nearly all chunks: the sequence gets one token. Its neighbours append theirs together with it.
            logprobs = sampled[first].logprobs
            first += 1
            if sequence.is_finished:
                continue
            sequence.num_pending -= 1
            if sequence.num_computed - sequence.num_named >= block_tokens and sequence.is_running:
                self.prefixes.insert(sequence, min(sequence.num_computed, len(sequence.token_ids)))
            gains.append((sequence, (token_id,), None if logprobs is None else (logprobs,)))
        return outputs + self._append(gains)

    def _apply_chunk(self, chunk: Chunk, sampled: list[SampledToken]) -> list[StepOutput]:
        """Applies the results of a chunk. sampled: one token for each of its `sampled_sequences`."""
        sequence, choices, outputs = chunk.sequence, chunk.sampled_sequences, list[StepOutput]()
        if sequence.is_finished and not chunk.forks:
            return []
        if chunk.drafts:
            return self._apply_drafts(chunk, sampled)
        for choice, token in zip(choices, sampled, strict=True):
            choice.num_pending -= 1
            if token.is_deferred:
                self._uncompute_last(choice)
        if sampled and sequence.is_running:
            self.prefixes.insert(sequence, min(sequence.num_computed, len(sequence.token_ids)))
        if sequence.scores and not sequence.is_finished:
            outputs.append(self._report_prompt_logprobs(sequence))
        if sequence.pooled is not None and chunk.completes_embedding and not sequence.is_finished:
            outputs.append(self._finish_embedding(sequence))
        for choice, token in zip(choices, sampled, strict=True):
            # Another choice of the request may just have failed.
            if not (choice.is_finished or token.is_deferred):
                outputs += self._apply_sampled(choice, token)
        return outputs

    def _uncompute_last(self, sequence: Sequence) -> None:
        """Lets a sequence compute its last token again. It may have been preempted and swapped out meanwhile.

        Its window then begins one token earlier. If the block of that token was not saved, all KV is recomputed.
        """
        sequence.num_ready = 0
        if sequence.is_running:
            sequence.num_computed -= 1
        elif sequence.swapped is not None and sequence.search is None:
            swapped = sequence.swapped._replace(num_computed=sequence.swapped.num_computed - 1)
            footprint = self.paging.footprint
            if footprint.first_token_seen(swapped.num_computed) < swapped.num_freed * footprint.block_tokens:
                self.swapping.discard(sequence)
            else:
                sequence.swapped = swapped

    def fail_chunks(self, plan: StepPlan, chunks: list[Chunk], error: Exception) -> list[StepOutput]:
        """Removes chunks that could not be computed from the plan, and ends their requests with `error`.

        Called before `advance`.
        """
        dropped = {id(chunk.sequence) for chunk in chunks}
        plan.chunks[:] = [chunk for chunk in plan.chunks if id(chunk.sequence) not in dropped]
        outputs = []
        for chunk in chunks:
            for fork in chunk.forks:
                self.batch.release_row(fork)
            # The sequence is already finished if another dropped chunk belongs to the same request.
            if not chunk.sequence.is_finished:
                self.paging.kv.invalidate(chunk.sequence.block_keys)
                outputs.append(self._lifecycle.fail(chunk.sequence, error))
        return outputs

    def restart_chunks(self, plan: StepPlan, error: Exception, *, has_culprits: bool) -> list[StepOutput]:
        """Removes all chunks of a failed step from the plan. Their sequences are computed from the beginning.

        has_culprits: whether other chunks of the step were the cause. If not, the step counts as a failed one for each
        of these sequences, and ends those that have `_MAX_FAILED_STEPS` with `error`. Called before `advance`.
        """
        outputs = []
        for chunk in plan.chunks:
            for fork in chunk.forks:
                self.batch.release_row(fork)
            if not chunk.sequence.is_finished:
                chunk.sequence.drop_unreported()
                outputs += self._requeue_failed(chunk.sequence, error, counts=not has_culprits)
        plan.chunks.clear()
        return outputs

    def _requeue_failed(self, sequence: Sequence, error: Exception, *, counts: bool) -> list[StepOutput]:
        """counts: whether the sequence may be the cause of the failure."""
        sequence.num_failed_steps += counts
        if counts and sequence.num_failed_steps >= _MAX_FAILED_STEPS:
            return [self._lifecycle.fail(sequence, error)]
        misfit = self._lifecycle.requeue(sequence)
        return [self._lifecycle.fail(sequence, misfit)] if misfit is not None else []

    def undo_step(self, plan: StepPlan, error: Exception) -> list[StepOutput]:
        """Undoes a step that failed to move its pages and does not count. No other step is running.

        All content that this step was to write into the pool is invalid, and so are the recurrent states that it may
        have advanced. Sequences that need this content go back to the queue. After `_MAX_FAILED_STEPS` steps that could
        not move its pages, a sequence ends with `error`. All other sequences continue as before the step.
        """
        outputs: list[StepOutput] = []
        for chunk in plan.chunks:
            for fork in chunk.forks:
                self.batch.release_row(fork)
        residents = self.adapters.abandon_loads(plan)
        self.pins.record_failed_loads(residents)
        restored = self.swapping.undo_step()
        targets = {target for _, target in plan.copies}
        advanced = [chunk.sequence for chunk in plan.chunks] if self.paging.footprint.state_pages else []
        for sequence in self.batch:
            is_untouched = residents.isdisjoint(sequence.residents) and sequence not in restored
            has_moved = not (is_untouched and targets.isdisjoint(sequence.blocks.held_pages))
            if sequence.is_finished or not (has_moved or sequence in advanced):
                continue
            outputs += self._requeue_failed(sequence, error, counts=has_moved)
        self.swapping.finish_step()
        # The step may not have written the sampling table rows of these sequences, or may have counted tokens in them
        # that are lost.
        self._stale_rows += [*plan.rows_to_write, *(chunk.sequence for chunk in plan.chunks)]
        return outputs

    def check_invariants(self) -> None:
        """Asserts that no page is lost and that every reference has an owner."""
        self.paging.check_invariants(page for sequence in self.batch for page in sequence.blocks.held_pages)
        self.pins.check_invariants()
        for sequence in self.batch:
            start, end = sequence.num_computed, sequence.num_ready
            if start < end:
                num_missing = sequence.blocks.pages_missing(end)
                num_shared = sequence.blocks.count_shared(start, self.paging.kv)
                assert not (num_missing or num_shared) and self.adapters.are_ready(sequence.residents), (
                    f"tokens [{start}, {end}) of a sequence are not ready to be computed"
                )
        self._lifecycle.check_invariants(self._num_running_steps)

    def _fail_missed_deadlines(self, plan: StepPlan, now: float) -> None:
        for sequence in self._deadlines.pop_missed(now):
            self.num_deadlines_missed += 1
            num_others = self.num_waiting - (not sequence.is_running)
            plan.ended.append(self._lifecycle.fail(sequence, _deadline_missed(sequence, num_others)))

    def _load_without_requests(self, plan: StepPlan, now: float) -> None:
        """Loads adapters that the operator pinned or a tenant prewarms, and requests further fetches."""
        fetched = self.adapters.pop_prefetched()
        self.prewarming.load_fetched(fetched)
        self.pins.load_missing(plan, now, fetched)
        # Release before the next prefetches: a small host cache may have room for only one adapter.
        self.adapters.release_prefetched(fetched)
        self.pins.prefetch_missing()
        self.prewarming.prefetch_requested()

    def _plan_forks(self, plan: StepPlan) -> None:
        """Adds the choices that start in this step. The first token of each is sampled in this step."""
        several = [
            number
            for number, chunk in enumerate(plan.chunks)
            if chunk.sequence.num_choices > 1 and chunk.samples
        ]
        for number in several:
            chunk = plan.chunks[number]
            sequence = chunk.sequence
            if sequence.search is not None:
                continue
            num_places = sequence.num_places + self.batch.free_capacity
            self.batch.resize(sequence, min(sequence.num_choices, num_places))
            forks = tuple(sequence.fork(index) for index in range(1, sequence.num_places))
            plan.chunks[number] = chunk._replace(forks=forks)
            for fork in forks:
                self.batch.assign_row(fork)
                plan.rows_to_write.append(fork)

    def _is_stuck_on_beams(self, plan: StepPlan) -> bool:
        """Whether beams wait for each other and no sequence can make progress in this step or in the next one."""
        if plan.chunks or self.adapters.num_loading or self._num_running_steps:
            return False
        return any(sequence.has_proposed for sequence in self.batch)

    def _plan_background(self, plan: StepPlan, num_tokens: int) -> None:
        """Fills the step with background work. num_tokens: the tokens that interactive requests leave of the budget."""
        running = [sequence for sequence in self.batch.background if not self._awaits_result(sequence)]
        self._num_quiet_steps = 0 if self.batch.interactive else self._num_quiet_steps + 1
        if not (running or self._lifecycle.queue.num_background):
            return
        budget = self._background_budget(plan, num_tokens)
        for sequence in running:
            fitting = budget.fit(sequence, min(sequence.num_uncomputed, sequence.max_chunk_tokens))
            fitting = self.prefixes.limit_chunk(sequence, sequence.num_computed, fitting)
            if fitting and self._continue_sequence(sequence, fitting, plan):
                budget.spend(sequence, fitting)
        self._admission.admit_background(plan, budget)

    def _background_budget(self, plan: StepPlan, num_tokens: int) -> BackgroundBudget:
        work = plan.measure_work(self._config.full_page_bytes) if self.batch.interactive else None
        return BackgroundBudget(self._costs, num_tokens, work, self._num_quiet_steps)

    def _continue_running(self, plan: StepPlan) -> tuple[PrefillBudget, RowBudget]:
        """Plans the next tokens of the running interactive sequences, oldest first.

        Returns the number of tokens that the step can still spend on prompts of waiting sequences, and the decode rows
        that are held back until these prompts are known.
        """
        if self._config.rope_switch is not None or self.paging.footprint.state_pages:
            for sequence in self.batch:
                if not sequence.num_pending:
                    self._lifecycle.restart_if_needed(sequence)
        # Nearly all sequences are ready. The others may preempt some of them.
        ready, unready = list[Sequence](), list[tuple[Sequence, int]]()
        for sequence in self.batch.interactive:
            if sequence.num_computed < sequence.num_ready:
                ready.append(sequence)
            elif not (sequence.num_pending and self._awaits_result(sequence)):
                unready.append((sequence, sequence.num_uncomputed))
        decoding = ready + [sequence for sequence, num_uncomputed in unready if num_uncomputed == 1]
        rows = self._row_budget(decoding, unready)
        budget = self._prefill_budget(decoding, unready)
        if rows.held_back:
            # If every token of the step is a decode row, a row that is held back leaves its token to a prompt.
            budget.num_tokens = max(1, budget.num_tokens)
            held_back = set(rows.held_back)
            ready = [sequence for sequence in ready if sequence not in held_back]
            unready = [entry for entry in unready if entry[0] not in held_back]
        plan.chunks.extend(Chunk.decode_rows(ready))
        for sequence, num_uncomputed in unready:
            if num_uncomputed == 1:
                self._continue_sequence(sequence, 1, plan)
                continue
            fitting = budget.fit(sequence.tenant, sequence.num_computed)
            num_tokens = min(num_uncomputed, sequence.max_chunk_tokens, fitting)
            num_tokens = self.prefixes.limit_chunk(sequence, sequence.num_computed, num_tokens)
            if num_tokens > 0 and self._continue_sequence(sequence, num_tokens, plan):
                budget.spend(sequence.tenant, num_tokens, sequence.num_computed)
        return budget, rows

    def _row_budget(self, decoding: list[Sequence], unready: list[tuple[Sequence, int]]) -> RowBudget:
        """The step's budget for decode rows. Only rows of tenants that are not alone are limited.

        decoding, unready: see `_prefill_budget`.
        """
        most_places = max(self.batch.num_places.values(), default=0)
        if self._config.scheduling == "fcfs" or most_places <= MIN_ROWS:
            return RowBudget(self._costs)
        tenants = {sequence.tenant for sequence in decoding}.union(sequence.tenant for sequence, _ in unready)
        is_alone = len(tenants) == 1 and not self._lifecycle.queue.count_tenants(tenants)
        if is_alone and self._num_steps_alone >= ABSENT_STEPS:
            return RowBudget(self._costs)
        return RowBudget(self._costs, decoding)

    def _continue_held_back(self, plan: StepPlan, budget: PrefillBudget, rows: RowBudget) -> None:
        """Plans the decode rows that were held back and fit beside the work of other tenants."""
        tenants = {chunk.sequence.tenant for chunk in plan.chunks}
        if len(tenants) > 1:
            self._num_steps_alone, self._last_together = 0, tenants
        elif tenants:
            self._num_steps_alone += 1
        if not rows.held_back:
            return
        absent = self._last_together - tenants if 0 < self._num_steps_alone <= ABSENT_STEPS else ()
        num_left = self._config.max_num_batched_tokens - plan.num_tokens
        for sequence in rows.release(plan.chunks, absent)[:num_left]:
            self._continue_sequence(sequence, 1, plan)
        budget.num_tokens = self._config.max_num_batched_tokens - plan.num_tokens

    def _awaits_result(self, sequence: Sequence) -> bool:
        """Whether the sequence is left out of this plan, because it depends on a token that a running step samples."""
        if sequence.awaits_result:
            return True
        switch = self._config.rope_switch
        if switch is None or sequence.uses_long_rope:
            return False
        # With the pending token, the sequence restarts with the long factors.
        return sequence.num_pending > 0 and len(sequence.token_ids) + sequence.num_pending > switch

    def _prefill_budget(self, decoding: list[Sequence], unready: list[tuple[Sequence, int]]) -> PrefillBudget:
        """The step's budget for prompt tokens. The budget excludes one token for each decode row, so that a long prompt
        never stalls decoding.

        decoding: the running interactive sequences that compute one token. unready: those that are not ready, and how
        many tokens of each are not computed.
        """
        num_tokens = self._config.max_num_batched_tokens - len(decoding)
        if self._config.scheduling == "fcfs":
            return PrefillBudget(self._costs, num_tokens, num_tokens)
        wanted: Counter[TenantAccount] = Counter()
        for sequence, num_uncomputed in unready:
            if num_uncomputed > 1 and self.adapters.are_ready(sequence.residents):
                wanted[sequence.tenant] += num_uncomputed
        prefilling = set(wanted)
        rows, queue = {sequence.tenant for sequence in decoding}, self._lifecycle.queue
        num_startable = self.batch.free_capacity
        if num_startable:
            num_startable = min(num_startable, queue.count_tenants(rows | prefilling))
        num_waiting = len(prefilling - rows) + num_startable
        # Only the limits of running prompts depend on the prompt that may join them.
        following = queue.peek(prefilling) if prefilling else None
        if following is not None and not following.is_background and self._admission.has_place(following):
            count = self._admission.count_tokens(following, max(1, num_tokens))
            if count is not None:
                wanted[following.tenant] = count
            prefilling.add(following.tenant)
        num_beside_others = tokens_beside_others(self._costs, num_waiting, len(rows))
        short_tokens = tokens_beside_others(self._costs, 0, 0)
        return PrefillBudget(
            self._costs, num_tokens, num_beside_others, rows, prefilling, wanted, short_tokens
        )

    def _continue_sequence(self, sequence: Sequence, num_tokens: int, plan: StepPlan) -> bool:
        """Plans the next `num_tokens` tokens of a running sequence. Returns False if it can't compute in this step."""
        if not sequence.is_running:  # Preempted after the caller had listed the running sequences.
            return False
        if not self.adapters.are_ready(sequence.residents):
            return False
        if not self._allocate_pages(sequence, num_tokens, plan):
            return False
        plan.add(sequence, num_tokens)
        if sequence.times.computed_at is None:
            sequence.times.computed_at = self.paging.pool.now
        if sequence.num_charged < sequence.num_prompt:
            charge_prompt(sequence, num_tokens)
        if sequence.num_computed >= sequence.num_prompt and sequence.num_uncomputed == 1:
            sequence.num_ready = self._find_ready_end(sequence)
        return True

    def _find_ready_end(self, sequence: Sequence) -> int:
        """Returns `Sequence.num_ready` for a sequence that decodes: up to where its next page begins, the next page
        leaves its window, or a decision depends on its last token.
        """
        footprint, switch = self.paging.footprint, self._config.rope_switch
        if footprint.state_pages or sequence.matcher is not None or sequence.search is not None:
            return 0
        start, block_tokens = sequence.num_computed, footprint.block_tokens
        ends = [sequence.max_kv_tokens, start + block_tokens - start % block_tokens]
        if footprint.window is not None:
            ends.append(start + block_tokens - footprint.first_token_seen(start) % block_tokens)
        if switch is not None and not sequence.uses_long_rope:
            ends.append(switch)
        return min(ends)

    def _allocate_pages(self, sequence: Sequence, num_tokens: int, plan: StepPlan) -> bool:
        """Allocates the pages for the next `num_tokens` tokens, and preempts sequences if the pool has too few.

        If other sequences share the page of the first token or the recurrent state, or the prefix cache keeps the
        state, these pages are copied first (copy-on-write). Returns False if `sequence` itself was preempted or ended.
        """
        blocks, start, kv = sequence.blocks, sequence.num_computed, self.paging.kv
        self._preemption.free_behind_window(sequence)
        missing, copied = blocks.pages_missing(start + num_tokens), blocks.count_shared(start, kv)
        if not (missing or copied):  # The common case: a decoding sequence whose last block has room.
            return True
        while not self._preemption.make_room(missing + copied, sequence):
            if blocks.claim_state(kv):
                copied = blocks.count_shared(start, kv)
                continue
            victim = self._preemption.choose_victim(missing + copied, sequence.tenant)
            self._preemption.preempt(victim, plan)
            # A victim that cannot be queued again ends its whole request. If `sequence` is another choice of that
            # request, it has stopped running too.
            if not sequence.is_running:
                return False
            # After another choice was preempted, this sequence may be the only user of the pages.
            copied = blocks.count_shared(start, kv)
        if copied:
            plan.copies.extend(blocks.copy_on_write(start, kv, sequence.tenant))
        blocks.allocate(missing, sequence.tenant, kv)
        return True

    def _fork(self, chunk: Chunk) -> None:
        """Starts the choices that fork from this chunk's sequence, and queues those that have no place."""
        parent = chunk.sequence
        for fork in chunk.forks:
            self._lifecycle.add_fork(fork, parent)
        for index in range(parent.num_places, parent.num_choices):
            if not parent.is_finished:
                self._lifecycle.queue_fork(parent.fork(index), parent)
        parent.num_choices = 1
        self.batch.resize(parent, 1)

    def _apply_drafts(self, chunk: Chunk, sampled: list[SampledToken]) -> list[StepOutput]:
        """Appends the sampled tokens up to the first one that differs from its draft."""
        sequence = chunk.sequence
        kept = self.drafting.keep_sampled(chunk, sampled)
        if kept[0].token_id is None:
            return self._apply_sampled(sequence, kept[0])
        # The step has computed the KV of all kept tokens except the last one.
        token_ids = tuple([token.token_id for token in kept if token.token_id is not None])
        logprobs = tuple([token.logprobs for token in kept if token.logprobs is not None])
        gains: list[_Gain] = [(sequence, token_ids, logprobs or None)]
        self._extend(gains)
        sequence.num_computed += len(kept)
        self.prefixes.insert(sequence, sequence.num_computed)
        return self._report(gains)

    def _apply_sampled(self, sequence: Sequence, sampled: SampledToken) -> list[StepOutput]:
        if sequence.matcher is not None:
            charge_mask(sequence, self._costs)
            if sequence.matcher.error is not None:
                return [self._lifecycle.fail(sequence, _cannot_continue(sequence, sequence.matcher.error))]
        if sampled.token_id is None:
            return [self._fail_not_finite(sequence, "logits")]
        if sequence.search is not None:
            if not sequence.is_running:  # Preempted while the step ran: it computes its proposal again.
                return []
            assert sampled.proposal is not None, "a beam has no proposal"
            return self._beams.propose(sequence, sequence.search, sampled.proposal)
        logprobs = None if sampled.logprobs is None else (sampled.logprobs,)
        return self._append([(sequence, (sampled.token_id,), logprobs)])

    def _finish_embedding(self, sequence: Sequence) -> StepOutput:
        pooled = sequence.pooled
        assert pooled is not None and pooled.next_token == sequence.num_prompt, (
            "a hidden state was not pooled"
        )
        if pooled.embedding is None:
            return self._fail_not_finite(sequence, "hidden states")
        self._lifecycle.finish(sequence)
        delta = TokenDelta((), FinishReason.STOP, num_cached=sequence.num_cached, embedding=pooled.embedding)
        return StepOutput(sequence.request.request_id, delta)

    def _report_prompt_logprobs(self, sequence: Sequence) -> StepOutput:
        """Reports the prompt log-probabilities that this step computed, or fails the request if one is not finite.

        All log-probabilities of a long prompt together could exceed the size of one message frame, so each step reports
        its own part.
        """
        scores, sequence.scores = tuple(sequence.scores), []
        if not all(score is None or math.isfinite(score.logprob) for score in scores):
            return self._fail_not_finite(sequence, "logits")
        return StepOutput(sequence.request.request_id, TokenDelta((), prompt_logprobs=scores))

    def _fail_not_finite(self, sequence: Sequence, what: str) -> StepOutput:
        """Ends a request whose logits or hidden states were not finite."""
        self.num_not_finite += 1
        # No other request may reuse the KV that led to NaN.
        self.paging.kv.invalidate(sequence.block_keys)
        digests = sequence.request.adapter_digests
        name = "the base model" if digests is None else f"adapter {digests}"
        error = RequestFailed(f"the {what} of {name} were not finite on this prompt")
        return self._lifecycle.fail(sequence, error)

    def _append(self, gains: list[_Gain]) -> list[StepOutput]:
        self._extend(gains)
        return self._report(gains)

    def _extend(self, gains: list[_Gain]) -> None:
        """Appends sampled tokens to their sequences, and charges them."""
        now, last_tokens = self.paging.pool.now, self._last_tokens
        for sequence, token_ids, _ in gains:
            sequence.extend(token_ids)
            charge_output(sequence, len(token_ids))
            if sequence.last_token_at is not None:
                last_tokens.append(sequence.last_token_at)
            elif sequence.times.first_token_at is None:
                sequence.times.first_token_at = now
            sequence.last_token_at = now

    def _report(self, gains: list[_Gain]) -> list[StepOutput]:
        """Reports tokens that were just appended. Ends each sequence whose last token ends it."""
        outputs = []
        for sequence, token_ids, logprobs in gains:
            reason, num_generated = None, len(sequence.token_ids) - sequence.num_prompt
            if token_ids[-1] in sequence.stop_ids:
                reason = FinishReason.STOP
            elif num_generated >= sequence.max_tokens:
                reason = FinishReason.LENGTH
            if reason is not None:
                self._lifecycle.finish(sequence)
            delta = TokenDelta(token_ids, reason, logprobs, sequence.index)
            if num_generated == 1 and sequence.index == 0:
                delta.num_cached = sequence.num_cached
            outputs.append(StepOutput(sequence.request.request_id, delta))
        return outputs


def _cannot_continue(sequence: Sequence, reason: str) -> RequestRefused:
    output = sequence.request.sampling.structured_output
    assert output is not None, "only the matcher of a form has an error"
    return RequestRefused(
        f"{output.param} can't be enforced after {sequence.num_generated} tokens of the answer: {reason}; simplify it",
        output.param,
    )


def _deadline_missed(sequence: Sequence, num_others: int) -> DeadlineMissed:
    what = "the first token was to come"
    if sequence.search is not None:
        what = "the beam search was to end"
    elif sequence.pooled is not None:
        what = "the embedding was to come"
    return DeadlineMissed(
        f"{what} within {sequence.request.deadline_s:g} s, which is not possible ({num_others} other "
        "requests are waiting); allow more time, or send the request later"
    )
