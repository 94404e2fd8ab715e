"""The states of a sequence, from arrival to end, and the resources that it holds in each state.

                 +--------- its adapters were fetched ------------+
                 |                                                v
    add ---> waiting for its adapters    or at once ---> in the queue ---> running ---> finished
                                                                  ^              |
                                                                  +- preempted --+

A request for structured output first waits until its grammar is compiled, and then continues as drawn from `add`.
A waiting sequence holds nothing in the pool; its KV may be swapped to the host. A sequence that ends releases all its
resources, in any state. This module makes no decisions: `Admission` decides which sequence is admitted, and
`Preemption` decides which sequence is preempted.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from slora.core.engine_config import SchedulerConfig
from slora.core.errors import AdapterFetchFailed, ContextTooLong, RequestRefused
from slora.core.request import EndedRequest, PoolingKind, RequestUsage, StepOutput
from slora.core.sampling_params import StructuredOutput
from slora.grammar.grammar_compiler import GrammarCompiler, Refused
from slora.memory.unified_paging import UnifiedPaging
from slora.scheduler.adapter_loading import AdapterLoading
from slora.scheduler.beam_search import BeamSearch
from slora.scheduler.running_batch import RunningBatch
from slora.scheduler.sequence import Sequence
from slora.scheduler.served_counts import ServedRequests
from slora.scheduler.step_plan import StepPlan
from slora.scheduler.swapping import Swapping
from slora.scheduler.waiting_queues import FairQueue, FifoQueue, WaitingQueue
from slora_adapters.loader.source import FetchFailed
from slora_adapters.version import AdapterVersion


class GrammarWaiting:
    """The sequences that wait until their grammar is compiled."""

    def __init__(self, grammars: GrammarCompiler | None) -> None:
        self._grammars = grammars
        self._waiters: dict[tuple[str, StructuredOutput], list[Sequence]] = {}

    def add(self, sequence: Sequence) -> None:
        """Requests the grammar of a sequence, which then waits until `collect` yields it."""
        tenant, output = sequence.tenant.name, sequence.request.sampling.structured_output
        assert self._grammars is not None and output is not None, "nothing compiles grammars here"
        self._waiters.setdefault((tenant, output), []).append(sequence)
        self._grammars.request(tenant, output)

    def remove(self, sequence: Sequence) -> None:
        """Ends the wait of a sequence. Its grammar is still compiled, because the next request may use it."""
        tenant, output = sequence.tenant.name, sequence.request.sampling.structured_output
        if output is not None and sequence in self._waiters.get((tenant, output), ()):
            self._waiters[tenant, output].remove(sequence)

    def collect(self) -> Iterator[tuple[Sequence, RequestRefused | None]]:
        """Yields each sequence whose grammar was compiled or refused, with the error if it was refused.

        A sequence whose grammar was compiled now has its matcher.
        """
        for result in () if self._grammars is None else self._grammars.poll():
            for sequence in self._waiters.pop((result.tenant, result.output), []):
                if isinstance(result, Refused):
                    yield sequence, result.error
                else:
                    sequence.start_matcher(result.grammar.start(sequence.stop_ids))
                    yield sequence, None


class UnfinishedRequests:
    """The unfinished requests and their sequences. A request has one sequence, or one per choice after the fork. A
    deleted adapter is remembered until the last request that names it has ended.
    """

    def __init__(self) -> None:
        self._sequences: dict[str, list[Sequence]] = {}
        self._num_sequences = 0
        self._deleted: set[AdapterVersion] = set()

    def __len__(self) -> int:
        return self._num_sequences

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for group in self._sequences.values() for sequence in group)

    def find(self, request_id: str) -> list[Sequence]:
        return list(self._sequences.get(request_id, ()))

    def add(self, sequence: Sequence) -> None:
        self._sequences.setdefault(sequence.request.request_id, []).append(sequence)
        self._num_sequences += 1

    def remove(self, sequence: Sequence) -> None:
        request_id = sequence.request.request_id
        self._sequences[request_id].remove(sequence)
        if not self._sequences[request_id]:
            del self._sequences[request_id]
        self._num_sequences -= 1

    def mark_deleted(self, version: AdapterVersion) -> None:
        self._deleted.add(version)

    def pop_unused(self, version: AdapterVersion) -> bool:
        """Returns True once, after the adapter was deleted and the last unfinished request that names it has ended."""
        if version not in self._deleted:
            return False
        if any(version in group[0].request.versions for group in self._sequences.values()):
            return False
        self._deleted.remove(version)
        return True


# Page-seconds are rounded to a binary fraction, so that sums do not depend on their order.
_PAGE_SECOND = 1 << 20


class Lifecycle:
    """Moves sequences between their states, and acquires and releases their resources.

    Every unfinished sequence is in `unfinished`, and also in exactly one of four places: the batch, the queue,
    `adapters`, where it waits for its adapters, or `_grammars`, where it waits until its grammar is compiled.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        paging: UnifiedPaging,
        adapters: AdapterLoading,
        swapping: Swapping,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self.queue: WaitingQueue = FairQueue() if config.scheduling == "fair" else FifoQueue()
        self.batch = RunningBatch(config.max_num_seqs)
        self.unfinished = UnfinishedRequests()
        self.total_usage = RequestUsage()
        self.served = ServedRequests(config.metrics_tenants)
        self._ended: list[EndedRequest] = []
        self._refused: list[StepOutput] = []
        self._footprint = config.footprint
        self._rope_switch = config.rope_switch
        self._paging = paging
        self._adapters = adapters
        self._swapping = swapping
        self._grammars = GrammarWaiting(grammars)

    def add(self, sequence: Sequence) -> None:
        """Queues the sequence, or lets it wait for its grammar or its adapters.

        Raises RequestRefused if the sequence can never run.
        """
        if sequence.awaits_grammar:
            self._grammars.add(sequence)
        else:
            self._enqueue(sequence)
        self.unfinished.add(sequence)

    def collect_grammars(self) -> Iterator[StepOutput]:
        """Queues the sequences whose grammar has been compiled.

        Yields an error output for each sequence that can't run.
        """
        for sequence, error in self._grammars.collect():
            refusal = error or self._try_enqueue(sequence)
            if refusal is not None:
                yield self.fail(sequence, refusal)

    def collect_fetches(self) -> Iterator[StepOutput]:
        """Moves sequences whose last missing adapter has been fetched to the queue.

        Yields an error output for each sequence that can't run.
        """
        for fetch, sequences in self._adapters.collect_fetches():
            for sequence in sequences:
                if sequence.is_finished:  # Another choice has ended the request.
                    continue
                if isinstance(fetch, FetchFailed):
                    yield self.fail(sequence, AdapterFetchFailed(fetch.message, fetch.code))
                elif not self._adapters.find_missing(sequence):
                    self._stop_waiting(sequence)
                    error = self._try_enqueue(sequence)
                    if error is not None:
                        yield self.fail(sequence, error)
                elif self._adapters.has_fetched_all(sequence):
                    # An adapter that was in the pool when the wait began has been evicted.
                    self._stop_waiting(sequence)
                    self._wait_for_all(sequence)

    def start_running(self, sequence: Sequence, num_tokens: int, plan: StepPlan) -> None:
        """Moves a sequence from the queue to the batch, with pages for its first `num_tokens` tokens.

        Swapped KV is copied back. The caller has made room.
        """
        self.dequeue(sequence)
        if sequence.times.admitted_at is None:
            sequence.times.admitted_at = self._paging.pool.now
        if sequence.swapped is not None:
            self._swapping.swap_in(sequence, plan)
        blocks, kv = sequence.blocks, self._paging.kv
        blocks.allocate(blocks.pages_missing(num_tokens), sequence.tenant, kv)
        # A state of the prefix cache is copied.
        plan.copies.extend(blocks.copy_on_write(sequence.num_computed, kv, sequence.tenant))
        self.batch.assign_row(sequence)
        plan.rows_to_write.append(sequence)
        self._add_to_batch(sequence)

    def dequeue(self, sequence: Sequence) -> None:
        """Removes a sequence from the queue, and releases its adapters' copies in the host cache."""
        self.queue.remove(sequence)
        self._adapters.release_copies(sequence)

    def wait_for_adapters(self, sequence: Sequence) -> None:
        """Moves a sequence out of the queue to wait for its adapters, one of which has been evicted."""
        self.queue.remove(sequence)
        self._wait_for_all(sequence)

    def _wait_for_all(self, sequence: Sequence) -> None:
        """Fetches all adapters of a sequence to the host, even those in the pool.

        The host keeps them until the sequence is admitted. So an eviction from the pool can't delay it again.
        """
        self._adapters.release_copies(sequence)
        self._wait(sequence, sequence.request.versions)

    def _wait(self, sequence: Sequence, missing: Iterable[AdapterVersion]) -> None:
        sequence.times.begin_fetch(self._paging.pool.now)
        self._adapters.add_waiter(sequence, missing)

    def _stop_waiting(self, sequence: Sequence) -> None:
        sequence.times.end_fetch(self._paging.pool.now)
        self._adapters.remove_waiter(sequence)

    def release_background_copies(self) -> None:
        """Releases the copies in the host cache that background sequences in the queue keep.

        Interactive sequences need this room. If adapters of a background sequence are missing when the sequence is next
        in the queue, `Admission` lets it wait for them again.
        """
        for sequence in self.unfinished:
            if sequence.is_background and sequence in self.queue:
                self._adapters.release_copies(sequence)

    def restart_if_needed(self, sequence: Sequence) -> None:
        """Restarts a sequence that has become longer than `rope_switch` tokens, or whose recurrent state is too late.

        Keys that were rotated with the short factors can't be used with queries that are rotated with the long factors.
        """
        switch = self._rope_switch
        is_long = switch is not None and len(sequence.token_ids) > switch
        if sequence.uses_long_rope == is_long and not sequence.has_overrun:
            return
        assert not sequence.num_pending, "a sequence restarts before its last token is known"
        sequence.uses_long_rope = is_long
        sequence.num_computed = sequence.num_named = sequence.num_ready = 0
        sequence.block_keys.clear()
        sequence.blocks.release(self._paging.kv)
        self._swapping.discard(sequence)

    def add_fork(self, sequence: Sequence, parent: Sequence) -> None:
        """Adds a fork of `parent` to the batch.

        The fork shares the KV of `parent`, and already has its row of the sampling table.
        """
        sequence.blocks = parent.blocks.fork(self._paging.kv)
        parent.num_ready = 0  # Its last page is shared now.
        sequence.num_computed, sequence.num_named = parent.num_computed, parent.num_named
        sequence.num_state_tokens = parent.num_state_tokens
        sequence.block_keys = parent.block_keys.copy()
        sequence.set_residents(parent.residents)
        for resident in sequence.residents:
            self._paging.residency.acquire(resident)
        self.unfinished.add(sequence)
        self._add_to_batch(sequence)

    def queue_fork(self, sequence: Sequence, parent: Sequence) -> None:
        """Queues a fork of `parent` that has no place in the batch. It continues as if it had been preempted.

        If it can't be queued, its whole request ends.
        """
        sequence.block_keys = parent.block_keys.copy()
        sequence.num_preemptions = 1
        self.unfinished.add(sequence)
        error = self._try_enqueue(sequence)
        if error is not None:
            self._refused.append(self.fail(sequence, error))

    def pop_refused(self) -> list[StepOutput]:
        """Returns the outputs of the requests that `queue_fork` has ended since the last call."""
        refused, self._refused = self._refused, []
        return refused

    def requeue(self, sequence: Sequence) -> RequestRefused | None:
        """Moves a running sequence back to the queue.

        Returns an error if it can't be queued because its tenant's ceiling was lowered; the caller then ends the
        request.
        """
        sequence.record_preemption()
        self._stop_running(sequence)
        if sequence.search is not None:
            sequence.search.withdraw(sequence.index)
        sequence.num_computed = sequence.num_named = 0
        return self._try_enqueue(sequence)

    def _try_enqueue(self, sequence: Sequence) -> RequestRefused | None:
        try:
            self._enqueue(sequence)
        except RequestRefused as error:
            return error
        return None

    def fail(self, sequence: Sequence, error: Exception) -> StepOutput:
        """Ends a whole request with `error`, whichever of its choices failed."""
        request_id = sequence.request.request_id
        self.abort(request_id)
        return StepOutput(request_id, error=error)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Ends a request, or only its choice `index`, in any state. An unknown or finished request is not an error.

        With an `index`, nothing happens before the fork or in a beam search. Clients see no token of a choice before
        the fork, and no token of a beam before the search ends.
        """
        for sequence in self.unfinished.find(request_id):
            is_choice = sequence.num_choices == 1 and sequence.search is None
            if index is None or (sequence.index == index and is_choice):
                self.finish(sequence)

    def remove_adapter(self, version: AdapterVersion) -> None:
        """Drops a deleted adapter now, or when the last request that names the adapter has ended.

        Until then, its copy in the host cache is kept, because these requests may need it again after a preemption.
        """
        self.unfinished.mark_deleted(version)
        self._remove_deleted(version)

    def check_invariants(self, num_running_steps: int) -> None:
        """Asserts that no page is lost and that every reference has an owner."""
        running = list(self.batch)
        self.batch.check_invariants()
        waiting = [sequence for sequence in self.unfinished if not sequence.is_running]
        assert len(running) + len(waiting) == len(self.unfinished), (
            "a sequence is neither running nor waiting"
        )
        assert not any(s.blocks.num_pages or s.blocks.state_pages or s.residents for s in waiting), (
            "a waiting request holds pages"
        )
        self._swapping.check_invariants(waiting)
        self._adapters.check_invariants(waiting, num_running_steps)
        assert num_running_steps or not any(sequence.num_pending for sequence in self.unfinished), (
            "a token is pending although no step runs"
        )
        self._check_beams()
        users: dict[AdapterVersion, int] = defaultdict(int)
        for sequence in running:
            held = tuple(resident.version for resident in sequence.residents)
            assert held == sequence.request.versions, "a sequence runs without one of its adapters"
        for resident in [resident for s in running for resident in s.residents] + list(
            self._adapters.loading_residents()
        ):
            users[resident.version] += 1
        for resident in self._paging.residency:
            assert resident.num_users == users[resident.version], (
                f"{resident.version}: the number of users is wrong"
            )

    def _check_beams(self) -> None:
        searches: dict[BeamSearch, list[Sequence]] = defaultdict(list)
        for sequence in self.unfinished:
            if sequence.search is not None:
                searches[sequence.search].append(sequence)
            is_computed = sequence.num_uncomputed == 0 and sequence.pooled is None
            assert is_computed == sequence.has_proposed, "a beam has no proposal for what it computed"
            assert sequence.is_running or not is_computed, "a beam has a proposal but is not running"
        for search, beams in searches.items():
            assert sorted(search.beams) == sorted(beam.index for beam in beams), (
                "a beam of the search is missing"
            )
            assert sum(beam.num_choices for beam in beams) == search.width, "a search has too few beams"
            assert not search.is_ready, "all beams wait for each other (deadlock)"

    def _enqueue(self, sequence: Sequence) -> None:
        """Queues the sequence if all of its adapters are in the pool or on the host. Otherwise the sequence waits.

        Raises RequestRefused if the sequence can never run.
        """
        missing = self._adapters.find_missing(sequence)
        if missing:
            self._wait(sequence, missing)
            return
        self._prepare_adapters(sequence)
        self._limit_to_pool(sequence)
        self.queue.push(sequence)
        self._adapters.retain_copies(sequence)

    def _prepare_adapters(self, sequence: Sequence) -> None:
        """Finds where an activated adapter begins. Raises RequestRefused if adapters can't be added up."""
        adapters, pooling = sequence.request.adapters, sequence.request.pooling
        classifies = pooling is not None and pooling.kind is PoolingKind.CLASSIFY
        if len(adapters) == 1 and adapters[0].weight == 1:
            targets = self._adapters.find_targets(adapters[0].version)
            if sequence.num_added > targets.num_added:
                raise RequestRefused(
                    f"adapter {adapters[0].version.digest[:12]} has {targets.num_added} added tokens behind those of "
                    f"the base model, and the request has ids for {sequence.num_added}; use ids of its tokenizer",
                    "prompt",
                )
            sequence.num_added = targets.num_added
            if targets.invocation:
                sequence.activate_after(targets.invocation)
            if classifies and not targets.num_labels:
                raise RequestRefused(
                    f"adapter {adapters[0].version.digest[:12]} has no head that classifies texts", "model"
                )
            if targets.num_labels and pooling is None:
                raise RequestRefused(
                    f"adapter {adapters[0].version.digest[:12]} classifies texts and writes none; send the text to "
                    "/v1/classify",
                    "model",
                )
            return
        if classifies and not adapters:
            raise RequestRefused("the base model has no head that classifies texts; name an adapter", "model")
        if classifies:
            total = ", ".join(f"{weight:g}" for _, weight in adapters)
            raise RequestRefused(
                f"the head of one adapter classifies texts, with the weight 1; this request has {len(adapters)} "
                f"adapters with the weights {total}; name one adapter as the model instead",
                "adapters",
            )
        for version, weight in adapters:
            if self._adapters.find_targets(version).stands_alone:
                raise RequestRefused(
                    f"adapter {version.digest[:12]} has DoRA, norms or rows of the embedding or the head of its own, "
                    "or invocation tokens, so it is served alone and with the weight 1; this request has "
                    f"{len(adapters)} adapters and gives it the weight {weight:g}; name it as the model instead",
                    "adapters",
                )

    def _limit_to_pool(self, sequence: Sequence) -> None:
        """Limits the sequence to the pages that its tenant may hold. Its adapters are in the pool or on the host.

        Raises ContextTooLong if the sequence and its adapters together need more pages.

        If the request has no max_tokens, its answer is shortened to what fits. Tokens that are already generated are
        kept. They may exceed the limit if the tenant's ceiling was lowered.

        Beams wait for each other, so all beams of a search must fit at the same time, each at full length and without
        shared pages. Then preempting all other users of pages always makes enough room for the last beam.
        """
        footprint, most = self._footprint, self._paging.tenants.page_limit(sequence.tenant)
        adapter_pages = sum(self._adapters.num_pages(version) or 0 for version in sequence.request.versions)
        width = 1 if sequence.search is None else sequence.search.width
        room = (most - adapter_pages) // width
        open_ended = sequence.request.sampling.max_tokens is None
        if open_ended and footprint.chunk_tokens(sequence.max_kv_tokens, room) < 1:
            room_tokens = footprint.tokens(room)
            num_sampled = sequence.num_generated + sequence.num_pending
            most_tokens = max(room_tokens - sequence.num_prompt, num_sampled) + 1
            sequence.max_tokens = min(sequence.max_tokens, most_tokens)
        sequence.max_chunk_tokens = footprint.chunk_tokens(sequence.max_kv_tokens, room)
        if sequence.max_chunk_tokens < 1:
            raise self._never_fits(sequence, width, adapter_pages, most)

    def _never_fits(self, sequence: Sequence, width: int, adapter_pages: int, most: int) -> ContextTooLong:
        num_tokens = sequence.max_kv_tokens
        kv_pages = width * self._footprint.pages(num_tokens)
        bound, setting = (
            f"its tenant may hold only {most} pages of the pool (max_pool_share)",
            "max_pool_share",
        )
        if most == self._paging.pool.num_pages:
            bound, setting = f"the pool has only {most} (pool_bytes)", "pool_bytes"
        most_tokens = self._footprint.tokens(max(0, most - adapter_pages) // width)
        beams, remedy = (f" for each of {width} beams", " or beams") if width > 1 else ("", "")
        adapters = "adapter"
        if len(sequence.request.adapters) > 1:
            adapters, remedy = f"{len(sequence.request.adapters)} adapters", f"{remedy} or adapters"
        what, param = f"ask for fewer tokens{remedy}", "max_tokens"
        if sequence.pooled is not None:
            what, param = "shorten the input", "input"
        return ContextTooLong.of(
            most_tokens,
            f"This request needs {kv_pages} pages for {num_tokens} tokens{beams} and {adapter_pages} for its "
            f"{adapters}, but {bound}; {what}",
            param,
            setting,
        )

    def finish(self, sequence: Sequence) -> None:
        """Moves a sequence to its terminal state and releases everything that it holds."""
        if sequence.is_finished:
            return
        sequence.is_finished = True
        self.unfinished.remove(sequence)
        if sequence.is_running:
            self._stop_running(sequence)
        elif sequence.awaits_grammar:
            self._grammars.remove(sequence)
        elif sequence in self.queue:
            self.dequeue(sequence)
        else:
            self._stop_waiting(sequence)
        self._adapters.release_copies(sequence)
        self._swapping.discard(sequence)
        sequence.usage.page_seconds += sequence.blocks.page_seconds
        if not self.unfinished.find(sequence.request.request_id):
            self._record_usage(sequence)
        for version in sequence.request.versions:
            self._remove_deleted(version)

    def pop_usage(self) -> list[EndedRequest]:
        """Returns the usage of the requests that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def _record_usage(self, last: Sequence) -> None:
        """Records the usage of a request that has ended. last: its last sequence."""
        counter = last.usage
        usage = RequestUsage(
            prompt_tokens=last.num_charged,
            cached_tokens=last.num_cached,
            generated_tokens=counter.generated_tokens,
            adapter_bytes=counter.adapter_bytes,
            page_seconds=round(counter.page_seconds * _PAGE_SECOND) / _PAGE_SECOND,
        )
        timing = last.times.end(self._paging.pool.now)
        self.served.add(last.request, usage, timing)
        self._ended.append(EndedRequest(last.request.request_id, usage, timing))
        self.total_usage += usage

    def _add_to_batch(self, sequence: Sequence) -> None:
        for resident in sequence.residents:
            sequence.usage.page_seconds -= self._paging.residency.read(resident)
        self.batch.add(sequence)

    def _stop_running(self, sequence: Sequence) -> None:
        self.batch.remove(sequence)
        sequence.num_ready = 0
        sequence.blocks.release(self._paging.kv)
        for resident in sequence.residents:
            sequence.usage.page_seconds += self._paging.residency.read(resident)
            self._paging.residency.release(resident)
        sequence.set_residents(())

    def _remove_deleted(self, version: AdapterVersion) -> None:
        """Removes a deleted adapter from pool and host once no unfinished request names it."""
        if self.unfinished.pop_unused(version):
            self._adapters.remove(version)
            self._paging.kv.remove_adapter(version)
