"""Chooses what each step computes: iteration-level (continuous) batching under a token budget (Orca, OSDI'22).

Decode steps and chunks of prefill share one step; a request joins at any step. The order is first come, first
served, with two exceptions: a request whose adapter is still on its way waits aside and never delays those behind
it, and when pages run short the newest running requests give way (preemption by recompute: their pages are freed
and their tokens are computed again later).

Pages are found in this order: free ones, those of idle adapters, those of the newest running sequence.

A request of several choices runs as one sequence, in as many places of `max_num_seqs` as it has choices, until its
prompt is computed. Then it forks: the choices share its pages, and each goes its own way from there. One that is
preempted gives up its references only, and comes back alone.

Where every layer has a window, a sequence gives back the blocks that no token to come looks back on.

Plain Python, deterministic given its inputs. Knows no tensor, no clock, no socket.
"""

import heapq
from collections import defaultdict
from dataclasses import dataclass

from slora.errors import AdapterFetchFailed, ContextTooLong, RequestFailed
from slora.host_copies import HostCopies
from slora.kv_footprint import KVFootprint
from slora.page_pool import PagePool
from slora.request import FinishReason, StepOutput, TokenDelta
from slora.residency import Residency, Resident
from slora.sequence import Sequence
from slora.step_plan import AdapterLoad, Chunk, Sampled, StepPlan
from slora_adapters.packing import PackedAdapter
from slora_adapters.source import AdapterSource, FetchFailed
from slora_adapters.version import AdapterVersion


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """full_page_bytes: of one page over all layers. max_num_seqs <= max_num_batched_tokens, so every decode fits.

    No request may have more choices than max_num_seqs. rope_switch: a sequence of more tokens than that is rotated with
    longrope's long factors, from its first token on.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    full_page_bytes: int
    footprint: KVFootprint
    rope_switch: int | None = None


class Scheduler:
    """Owns the sequences and, through them, every held page of `pool`."""

    def __init__(
        self, limits: SchedulerLimits, pool: PagePool, residency: Residency, source: AdapterSource
    ) -> None:
        self.num_preemptions = 0
        self.num_loads = 0
        self._limits = limits
        self._pool = pool
        self._residency = residency
        self._host = HostCopies(source)
        self._sequences: dict[str, list[Sequence]] = {}  # of each request, those that are not over
        self._num_unfinished = 0
        self._running: list[Sequence] = []  # in order of arrival
        self._free_rows = list(range(limits.max_num_seqs))  # of the sampling table
        self._ready: list[Sequence] = []  # a heap by arrival: nothing to wait for but pages
        self._forgotten: set[AdapterVersion] = set()  # deleted, but requests that came before are not over

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return self._num_unfinished - len(self._running)

    @property
    def num_awaiting_adapter(self) -> int:
        return self._host.num_awaiting

    @property
    def has_work(self) -> bool:
        """Whether a step could do something now; requests that only await an adapter do not count."""
        return bool(self._running or self._ready)

    def find(self, request_id: str) -> list[Sequence]:
        """The sequences of a request that are not over."""
        return list(self._sequences.get(request_id, ()))

    def add(self, sequence: Sequence) -> None:
        """Raises ContextTooLong if it could not run even alone."""
        self._enqueue(sequence)
        self._register(sequence)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Ends a request, or one choice of it, wherever it is; unknown or finished ones are no error.

        A choice can be ended by those who have seen a token of it: before the fork there are no choices yet.
        """
        for sequence in self.find(request_id):
            if index is None or (sequence.index == index and sequence.num_choices == 1):
                self._retire(sequence)

    def forget(self, version: AdapterVersion) -> None:
        """The adapter was deleted: it leaves now, or with the last request that runs on it or waits for it.

        Those may need its host copy again (after a preemption, say), so the source hears of it no sooner.
        """
        self._forgotten.add(version)
        self._drop_if_forgotten(version)

    def schedule(self) -> StepPlan:
        plan = StepPlan()
        self._collect_fetches(plan)
        budget = self._continue_running(plan, self._limits.max_num_batched_tokens)
        self._admit(plan, budget)
        plan.chunks.sort(key=_by_slot)
        for chunk in plan.chunks:
            for sequence in chunk.forks:  # their first tokens are drawn in this step
                self._seat(sequence, plan)
        return plan

    def postprocess(self, plan: StepPlan, sampled: list[Sampled]) -> list[StepOutput]:
        """Takes in the tokens of `plan`, one for each of the chunks' draws, in order; finished sequences leave."""
        self._release_copied(plan)
        outputs = list(plan.ended)
        tokens = iter(sampled)
        for chunk in plan.chunks:
            chunk.sequence.num_computed += chunk.num_tokens
            if chunk.sequence.scores:
                outputs.append(_tell_scores(chunk.sequence))
            if chunk.forks:
                self._fork(chunk)
            for sequence in chunk.draws:
                token = next(tokens)
                if not sequence.done:  # over, if another choice of the request just failed
                    outputs.append(self._append(sequence, token))
        return outputs

    def fail(self, plan: StepPlan, error: Exception) -> list[StepOutput]:
        """The step broke: its requests end with `error`, everybody else goes on."""
        # What was loaded in this step can't be trusted: it leaves with its last user.
        for load in plan.loads:
            load.resident.forgotten = True
        self._release_copied(plan)
        outputs = list(plan.ended)
        outputs.extend(self._end(chunk.sequence, error) for chunk in plan.chunks if not chunk.sequence.done)
        self._free_rows.extend(sequence.row for chunk in plan.chunks for sequence in chunk.forks)
        return outputs

    def check(self) -> None:
        """Proves that no page is lost and every reference has its owner."""
        held = [page for seq in self._running for page in seq.blocks.held]
        self._pool.check([*held, *self._residency.held_pages()], self._residency.cached_pages())
        users: dict[AdapterVersion, int] = defaultdict(int)
        for seq in self._running:
            if seq.resident is not None:
                users[seq.resident.version] += 1
        for resident in self._residency:
            assert resident.num_users == users[resident.version], f"{resident.version}: users do not add up"
        unfinished = [sequence for group in self._sequences.values() for sequence in group]
        assert len(unfinished) == self._num_unfinished and all(self._sequences.values())
        assert self._places_taken() <= self._limits.max_num_seqs, "more sequences run than may"
        waiting = [s for s in unfinished if s not in self._running]
        rows = sorted([*self._free_rows, *(seq.row for seq in self._running)])
        assert rows == list(range(self._limits.max_num_seqs)), "a row of the sampling table is lost or shared"
        assert all(s.blocks.num_pages == 0 and s.resident is None for s in waiting), (
            "a waiting request holds pages"
        )
        self._host.check()

    # -- waiting ------------------------------------------------------------------------------------------------

    def _enqueue(self, sequence: Sequence) -> None:
        """To the ready ones if its adapter is at hand, else aside. Raises ContextTooLong if it can never run."""
        version = sequence.request.adapter
        adapter_pages = 0 if version is None else self._adapter_pages(version)
        if adapter_pages is not None:
            self._make_ready(sequence, adapter_pages)
        elif version is not None:
            self._host.wait(sequence, version)

    def _adapter_pages(self, version: AdapterVersion) -> int | None:
        """Pages that an adapter takes which is in the pool or on the host; None if it is in neither."""
        resident = self._residency.find(version)
        if resident is not None:
            return len(resident.pages)
        packed = self._host.find(version)
        return self._pages_of(packed) if packed is not None else None

    def _make_ready(self, sequence: Sequence, adapter_pages: int) -> None:
        self._fit(sequence, adapter_pages)
        heapq.heappush(self._ready, sequence)
        if sequence.request.adapter is not None:
            self._host.retain(sequence.request.adapter)

    def _leave_ready(self, sequence: Sequence) -> None:
        """Bookkeeping when a ready sequence starts, moves aside or ends."""
        if sequence.request.adapter is not None:
            self._host.release(sequence.request.adapter)

    def _collect_fetches(self, plan: StepPlan) -> None:
        for fetch, sequences in self._host.collect():
            if isinstance(fetch, FetchFailed):
                error = AdapterFetchFailed(fetch.message, fetch.code)
                plan.ended.extend(self._end(sequence, error) for sequence in sequences if not sequence.done)
                continue
            for sequence in sequences:
                if sequence.done:  # it ended with another choice of its request
                    continue
                try:
                    self._make_ready(sequence, self._pages_of(fetch.packed))
                except ContextTooLong as error:
                    plan.ended.append(self._end(sequence, error))

    def _fit(self, sequence: Sequence, adapter_pages: int) -> None:
        """Raises ContextTooLong unless both fit an otherwise empty pool; an open-ended request is cut to what does."""
        footprint, room = self._limits.footprint, self._pool.num_pages - adapter_pages
        open_ended = sequence.request.sampling.max_tokens is None
        if open_ended and footprint.chunk_tokens(sequence.num_tokens_at_most, room) < 1:
            room_tokens = room * footprint.block_tokens
            sequence.max_tokens = min(sequence.max_tokens, max(1, room_tokens - sequence.num_prompt + 1))
        sequence.chunk_limit = footprint.chunk_tokens(sequence.num_tokens_at_most, room)
        if sequence.chunk_limit < 1:
            kv_pages = footprint.pages(sequence.num_tokens_at_most)
            raise _never_fits(sequence.num_tokens_at_most, kv_pages, adapter_pages, self._pool.num_pages)

    # -- running ------------------------------------------------------------------------------------------------

    def _continue_running(self, plan: StepPlan, budget: int) -> int:
        """Plans the next tokens of running sequences, oldest first; returns the budget left."""
        self._switch_ropes()
        # A prefill chunk leaves one token for every sequence that decodes, so a long prompt never stalls others.
        reserved = sum(1 for seq in self._running if seq.num_uncomputed == 1)
        position = 0
        while position < len(self._running):
            sequence = self._running[position]
            if sequence.num_uncomputed == 1:
                reserved -= 1
            num_tokens = min(sequence.num_uncomputed, sequence.chunk_limit, budget - reserved)
            position += 1
            if num_tokens <= 0:
                continue
            if not self._grow(sequence, num_tokens, plan):
                break  # it was the newest left and gave way itself
            plan.chunks.append(_chunk(sequence, num_tokens))
            budget -= num_tokens
        return budget

    def _switch_ropes(self) -> None:
        """Those that have grown long begin again: keys of one set of factors don't go with queries of the other."""
        if self._limits.rope_switch is None:
            return
        for sequence in self._running:
            if not sequence.is_long and self._grew_long(sequence):
                sequence.is_long = True
                sequence.blocks.release(self._pool)
                sequence.num_computed = 0

    def _grew_long(self, sequence: Sequence) -> bool:
        switch = self._limits.rope_switch
        return switch is not None and len(sequence.token_ids) > switch

    def _grow(self, sequence: Sequence, num_tokens: int, plan: StepPlan) -> bool:
        """Gets the pages for the next `num_tokens` tokens, from newer sequences if need be, and a copy of the page
        they begin in if others read it. False: it was preempted itself."""
        blocks, start, footprint = sequence.blocks, sequence.num_computed, self._limits.footprint
        if footprint.window is not None:
            blocks.free_before(footprint.first_token_seen(start), self._pool)
        missing, copied = blocks.pages_missing(start + num_tokens), blocks.must_copy(start, self._pool)
        if not missing and not copied:  # as in nearly every step of a sequence that decodes
            return True
        while not self._residency.make_room(missing + copied):
            victim = self._running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
            # When another choice gives way, the page may be left to this one.
            copied = blocks.must_copy(start, self._pool)
        if copied:
            plan.copies.append(blocks.copy_on_write(start, self._pool))
        blocks.extend(self._pool.allocate(missing))
        return True

    def _fork(self, chunk: Chunk) -> None:
        """The choices that begin with this chunk start to run beside the one whose prompt it was."""
        parent = chunk.sequence
        for sequence in chunk.forks:
            sequence.blocks = parent.blocks.fork(self._pool)
            sequence.num_computed = parent.num_computed
            sequence.resident = parent.resident
            if sequence.resident is not None:
                self._residency.acquire(sequence.resident)
            self._register(sequence)
            self._run(sequence)
        parent.num_choices = 1

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue with its tokens but without pages; its arrival keeps its place."""
        self.num_preemptions += 1
        self._give_back(sequence)
        sequence.num_computed = 0
        self._enqueue(sequence)

    def _admit(self, plan: StepPlan, budget: int) -> None:
        """Starts ready sequences in order of arrival, until one does not fit: nobody overtakes it to its pages."""
        if not self._ready:
            return
        places = self._limits.max_num_seqs - self._places_taken()
        while self._ready and budget > 0:
            sequence = self._ready[0]
            if sequence.done:
                heapq.heappop(self._ready)
                continue
            version = sequence.request.adapter
            if version is not None and self._adapter_pages(version) is None:
                # Evicted since it was found here: fetch it again, and let the next one try.
                heapq.heappop(self._ready)
                self._leave_ready(sequence)
                self._enqueue(sequence)
                continue
            num_tokens = min(sequence.num_uncomputed, sequence.chunk_limit, budget)
            if sequence.num_choices > places or not self._start(sequence, num_tokens, plan):
                break
            budget -= num_tokens
            places -= sequence.num_choices

    def _places_taken(self) -> int:
        return sum(sequence.num_choices for sequence in self._running)

    def _start(self, sequence: Sequence, num_tokens: int, plan: StepPlan) -> bool:
        """Takes the pages of its first chunk and of its adapter together, or nothing at all."""
        version = sequence.request.adapter
        resident = self._residency.find(version) if version is not None else None
        packed = self._host.find(version) if version is not None and resident is None else None
        kv_pages = sequence.blocks.pages_missing(num_tokens)
        adapter_pages = self._pages_of(packed) if packed is not None else 0
        # Running sequences will soon want a page each, and choices one as soon as they fork: starting on the very last
        # ones would preempt at once.
        spare_pages = 0
        if self._running:
            spare_pages = len(self._running) // sequence.blocks.block_tokens + sequence.num_choices
        wanted = kv_pages + adapter_pages + spare_pages
        if not self._residency.make_room(wanted, slots=int(packed is not None), spare=version):
            return False
        if resident is not None:
            self._residency.acquire(resident)
        elif packed is not None and version is not None:
            resident = self._load(version, adapter_pages, plan)
        sequence.resident = resident
        sequence.is_long = self._grew_long(sequence)
        sequence.blocks.extend(self._pool.allocate(kv_pages))
        heapq.heappop(self._ready)
        self._run(sequence)
        self._seat(sequence, plan)
        self._leave_ready(sequence)
        plan.chunks.append(_chunk(sequence, num_tokens))
        return True

    def _load(self, version: AdapterVersion, pages: int, plan: StepPlan) -> Resident:
        packed = self._host.take(version)  # it goes back when its bytes have been copied
        resident = self._residency.admit(version, pages, packed.layout.reach)
        plan.loads.append(AdapterLoad(resident, packed))
        self.num_loads += 1
        return resident

    def _seat(self, sequence: Sequence, plan: StepPlan) -> None:
        sequence.row = self._free_rows.pop()
        plan.started.append(sequence)

    def _run(self, sequence: Sequence) -> None:
        """Into the running list, kept in order of arrival; nearly always that is the end."""
        place = len(self._running)
        while place > 0 and sequence < self._running[place - 1]:
            place -= 1
        self._running.insert(place, sequence)

    # -- ending -------------------------------------------------------------------------------------------------

    def _append(self, sequence: Sequence, sampled: Sampled) -> StepOutput:
        request_id = sequence.request.request_id
        if sampled.token_id is None:
            adapter = sequence.request.adapter
            name = f"adapter {adapter.digest}" if adapter else "the base model"
            return self._end(sequence, RequestFailed(f"the logits of {name} were not finite on this prompt"))
        sequence.token_ids.append(sampled.token_id)
        reason = None
        if sampled.token_id in sequence.stop_ids:
            reason = FinishReason.STOP
        elif sequence.num_generated >= sequence.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._retire(sequence)
        logprobs = (sampled.logprobs,) if sampled.logprobs is not None else None
        return StepOutput(request_id, TokenDelta((sampled.token_id,), reason, logprobs, sequence.index))

    def _end(self, sequence: Sequence, error: Exception) -> StepOutput:
        """An error ends all of a request, whichever choice it befell."""
        request_id = sequence.request.request_id
        self.abort(request_id)
        return StepOutput(request_id, error=error)

    def _register(self, sequence: Sequence) -> None:
        self._sequences.setdefault(sequence.request.request_id, []).append(sequence)
        self._num_unfinished += 1

    def _retire(self, sequence: Sequence) -> None:
        """A terminal state: whatever it holds goes back."""
        if sequence.done:
            return
        sequence.done = True
        request_id = sequence.request.request_id
        self._sequences[request_id].remove(sequence)
        if not self._sequences[request_id]:
            del self._sequences[request_id]
        self._num_unfinished -= 1
        version = sequence.request.adapter
        if sequence in self._running:
            self._give_back(sequence)
        elif version is not None and self._host.leave(sequence, version):
            pass
        elif sequence in self._ready:
            self._leave_ready(sequence)  # its place in the heap is skipped when it comes up
        if version is not None:
            self._drop_if_forgotten(version)

    def _drop_if_forgotten(self, version: AdapterVersion) -> None:
        """A deleted adapter leaves pool and host once no unfinished request names it."""
        if version not in self._forgotten:
            return
        if any(group[0].request.adapter == version for group in self._sequences.values()):
            return
        self._forgotten.remove(version)
        self._residency.forget(version)
        self._host.forget(version)

    def _give_back(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._free_rows.append(sequence.row)
        sequence.blocks.release(self._pool)
        if sequence.resident is not None:
            self._residency.release(sequence.resident)
            sequence.resident = None

    def _release_copied(self, plan: StepPlan) -> None:
        for load in plan.loads:
            self._host.give_back(load.resident.version)

    def _pages_of(self, packed: PackedAdapter) -> int:
        return -(-packed.layout.num_bytes // self._limits.full_page_bytes)


def _chunk(sequence: Sequence, num_tokens: int) -> Chunk:
    resident = sequence.resident
    samples = num_tokens == sequence.num_uncomputed
    forks: tuple[Sequence, ...] = ()
    if samples and sequence.num_choices > 1:
        forks = tuple(sequence.fork(index) for index in range(1, sequence.num_choices))
    return Chunk(
        sequence,
        start=sequence.num_computed,
        num_tokens=num_tokens,
        samples=samples,
        slot=resident.slot if resident is not None else None,
        generation=resident.generation if resident is not None else None,
        forks=forks,
    )


def _tell_scores(sequence: Sequence) -> StepOutput:
    """A piece in each step that finds any: all of a long prompt's at once could be more than a frame may hold."""
    scores, sequence.scores = tuple(sequence.scores), []
    return StepOutput(sequence.request.request_id, TokenDelta((), prompt_logprobs=scores))


def _by_slot(chunk: Chunk) -> tuple[int, float, int]:
    """Base rows last: LoRA tiles then cover a prefix of the tokens. A tile has one weight."""
    slot = chunk.slot if chunk.slot is not None else 1 << 31
    return (slot, chunk.sequence.request.adapter_weight, chunk.sequence.arrival)


def _never_fits(num_tokens: int, kv_pages: int, adapter_pages: int, pool_pages: int) -> ContextTooLong:
    return ContextTooLong(
        f"this request needs {kv_pages} pages for {num_tokens} tokens and {adapter_pages} for its "
        f"adapter, but the pool has {pool_pages} (pool_bytes); ask for fewer tokens",
        "max_tokens",
    )
