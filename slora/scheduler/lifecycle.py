"""Where each sequence is, from arrival to its end, and what it holds there.

                 +--------------- its adapter came ---------------+
                 |                                                v
    add ---> aside (awaits its adapter)     or at once ---> in the queue ---> running ---> over
                                                                  ^              |
                                                                  +-- gave way --+

Who waits holds nothing of the pool; it may have its KV on the host. Whoever ends gives back all that it has, wherever
it is. Decides nothing: who starts is `Admission`'s choice, who gives way `Reclaim`'s.
"""

from collections import defaultdict
from collections.abc import Iterator

from slora.errors import AdapterFetchFailed, ContextTooLong
from slora.request import StepOutput
from slora.scheduler.adapter_supply import AdapterSupply
from slora.scheduler.beam_search import BeamSearch
from slora.scheduler.fair_queue import FairQueue
from slora.scheduler.fifo_queue import FifoQueue
from slora.scheduler.running_batch import RunningBatch
from slora.scheduler.sequence import Sequence
from slora.scheduler.swapping import Swapping
from slora.scheduler.unfinished import UnfinishedRequests
from slora.scheduler.unified_memory import UnifiedMemory
from slora.scheduler.waiting_queue import WaitingQueue
from slora.scheduler_config import SchedulerConfig
from slora_adapters.loader.source import FetchFailed
from slora_adapters.version import AdapterVersion


class Lifecycle:
    """Every sequence that is not over is in `unfinished`, and running, in the queue, or aside with `supply`."""

    def __init__(
        self, config: SchedulerConfig, memory: UnifiedMemory, supply: AdapterSupply, swapping: Swapping
    ) -> None:
        self.queue: WaitingQueue = FairQueue() if config.scheduling == "fair" else FifoQueue()
        self.batch = RunningBatch(config.max_num_seqs)
        self.unfinished = UnfinishedRequests()
        self._footprint = config.footprint
        self._rope_switch = config.rope_switch
        self._memory = memory
        self._supply = supply
        self._swapping = swapping

    def add(self, sequence: Sequence) -> None:
        """Raises ContextTooLong if it could not run even alone."""
        self._enqueue(sequence)
        self.unfinished.add(sequence)

    def collect_fetches(self) -> Iterator[StepOutput]:
        """Who waited for an adapter that has come is ready; yields the ends of those that can't be."""
        for fetch, sequences in self._supply.collect():
            for sequence in sequences:
                if sequence.done:  # it ended with another choice of its request
                    continue
                if isinstance(fetch, FetchFailed):
                    yield self.end(sequence, AdapterFetchFailed(fetch.message, fetch.code))
                    continue
                try:
                    self._make_ready(sequence, self._supply.pages_of(fetch.packed))
                except ContextTooLong as error:
                    yield self.end(sequence, error)

    def leave_queue(self, sequence: Sequence) -> None:
        """It starts: it needs its adapter's copy on the host no longer."""
        self.queue.remove(sequence)
        if sequence.request.adapter is not None:
            self._supply.release(sequence.request.adapter)

    def move_aside(self, sequence: Sequence) -> None:
        """Its adapter was evicted since it was found here: it is fetched again."""
        self.leave_queue(sequence)
        self._enqueue(sequence)

    def switch_rope(self, sequence: Sequence) -> None:
        """One that has grown long begins again: keys of one set of factors don't go with queries of the other."""
        switch = self._rope_switch
        if switch is None or sequence.is_long or len(sequence.token_ids) <= switch:
            return
        sequence.is_long = True
        sequence.num_computed = sequence.num_named = 0
        sequence.block_keys.clear()
        sequence.blocks.release(self._memory.kv)
        self._swapping.drop(sequence)

    def join(self, sequence: Sequence, parent: Sequence) -> None:
        """A fork of `parent`, which has a row already, runs beside it on the same KV."""
        sequence.blocks = parent.blocks.fork(self._memory.kv)
        sequence.num_computed, sequence.num_named = parent.num_computed, parent.num_named
        sequence.block_keys = parent.block_keys.copy()
        sequence.resident = parent.resident
        if sequence.resident is not None:
            self._memory.residency.acquire(sequence.resident)
        self.unfinished.add(sequence)
        self.batch.join(sequence)

    def back_to_queue(self, sequence: Sequence) -> ContextTooLong | None:
        """It waits again. Returns why it can't, if its tenant's ceiling has come down: then it is to be ended."""
        sequence.note_preemption()
        self._give_back(sequence)
        if sequence.search is not None:
            sequence.search.withdraw(sequence.index)
        sequence.num_computed = sequence.num_named = 0
        try:
            self._enqueue(sequence)
        except ContextTooLong as error:
            return error
        return None

    def end(self, sequence: Sequence, error: Exception) -> StepOutput:
        """An error ends all of a request, whichever choice it befell."""
        request_id = sequence.request.request_id
        self.abort(request_id)
        return StepOutput(request_id, error=error)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Ends a request, or one choice of it, wherever it is; unknown or finished ones are no error.

        A choice can be ended by those who have seen a token of it: before the fork there are no choices yet. Of beams
        nobody sees any before they all end.
        """
        for sequence in self.unfinished.find(request_id):
            is_choice = sequence.num_choices == 1 and sequence.search is None
            if index is None or (sequence.index == index and is_choice):
                self.retire(sequence)

    def forget(self, version: AdapterVersion) -> None:
        """The adapter was deleted: it leaves now, or with the last request that runs on it or waits for it.

        Those may need its host copy again (after a preemption, say), so the source hears of it no sooner.
        """
        self.unfinished.mark_deleted(version)
        self._let_go(version)

    def check(self) -> None:
        """Proves that no page is lost and every reference has its owner."""
        running = list(self.batch)
        self.batch.check()
        waiting = [sequence for sequence in self.unfinished if not sequence.is_running]
        assert len(running) + len(waiting) == len(self.unfinished), (
            "a sequence is neither running nor waiting"
        )
        assert all(s.blocks.num_pages == 0 and s.resident is None for s in waiting), (
            "a waiting request holds pages"
        )
        self._swapping.check(waiting)
        self._check_beams()
        users: dict[AdapterVersion, int] = defaultdict(int)
        for resident in [s.resident for s in running if s.resident is not None] + list(
            self._supply.loading()
        ):
            users[resident.version] += 1
        for resident in self._memory.residency:
            assert resident.num_users == users[resident.version], f"{resident.version}: users do not add up"

    def _check_beams(self) -> None:
        searches: dict[BeamSearch, list[Sequence]] = defaultdict(list)
        for sequence in self.unfinished:
            if sequence.search is not None:
                searches[sequence.search].append(sequence)
            is_computed = sequence.num_computed == len(sequence.token_ids)
            assert is_computed == sequence.has_proposed, "a beam has no proposal for what it computed"
            assert sequence.is_running or not is_computed, "a beam has proposed and does not run"
        for search, beams in searches.items():
            assert sorted(search.beams) == sorted(beam.index for beam in beams), "a beam is lost"
            assert sum(beam.num_choices for beam in beams) == search.width, "a search has lost a place"
            assert not search.is_ready, "all beams wait for each other"

    def _enqueue(self, sequence: Sequence) -> None:
        """To the queue if its adapter is at hand, else aside. Raises ContextTooLong if it can never run."""
        version = sequence.request.adapter
        adapter_pages = 0 if version is None else self._supply.num_pages(version)
        if adapter_pages is not None:
            self._make_ready(sequence, adapter_pages)
        elif version is not None:
            self._supply.wait(sequence, version)

    def _make_ready(self, sequence: Sequence, adapter_pages: int) -> None:
        self._fit(sequence, adapter_pages)
        self.queue.push(sequence)
        if sequence.request.adapter is not None:
            self._supply.retain(sequence.request.adapter)

    def _fit(self, sequence: Sequence, adapter_pages: int) -> None:
        """Raises ContextTooLong unless both fit what its tenant may hold; an open-ended request is cut to what does,
        but not below what it has already, which its tenant's ceiling may have come down on.

        Beams wait for each other, so all of a search must fit at once, each at its full length and with nothing shared:
        then whatever else holds pages can give way to them, and the last of them finds its own.
        """
        footprint, most = self._footprint, self._memory.tenants.most_pages(sequence.tenant)
        width = 1 if sequence.search is None else sequence.search.width
        room = (most - adapter_pages) // width
        open_ended = sequence.request.sampling.max_tokens is None
        if open_ended and footprint.chunk_tokens(sequence.num_tokens_at_most, room) < 1:
            room_tokens = room * footprint.block_tokens
            most_tokens = max(room_tokens - sequence.num_prompt, sequence.num_generated) + 1
            sequence.max_tokens = min(sequence.max_tokens, most_tokens)
        sequence.chunk_limit = footprint.chunk_tokens(sequence.num_tokens_at_most, room)
        if sequence.chunk_limit < 1:
            raise self._never_fits(sequence, width, adapter_pages, most)

    def _never_fits(self, sequence: Sequence, width: int, adapter_pages: int, most: int) -> ContextTooLong:
        num_tokens = sequence.num_tokens_at_most
        kv_pages = width * self._footprint.pages(num_tokens)
        bound = (
            f"the pool has {most} (pool_bytes)"
            if most == self._memory.pool.num_pages
            else f"its tenant may hold {most} of the pool (max_pool_share)"
        )
        beams, remedy = (f" of each of {width} beams", " or beams") if width > 1 else ("", "")
        return ContextTooLong(
            f"this request needs {kv_pages} pages for {num_tokens} tokens{beams} and {adapter_pages} for its "
            f"adapter, but {bound}; ask for fewer tokens{remedy}",
            "max_tokens",
        )

    def retire(self, sequence: Sequence) -> None:
        """A terminal state: whatever it holds goes back."""
        if sequence.done:
            return
        sequence.done = True
        self.unfinished.remove(sequence)
        version = sequence.request.adapter
        if sequence.is_running:
            self._give_back(sequence)
        elif sequence in self.queue:
            self.leave_queue(sequence)
        elif version is not None:
            self._supply.leave(sequence, version)
        self._swapping.drop(sequence)
        if version is not None:
            self._let_go(version)

    def _give_back(self, sequence: Sequence) -> None:
        self.batch.leave(sequence)
        sequence.blocks.release(self._memory.kv)
        if sequence.resident is not None:
            self._memory.residency.release(sequence.resident)
            sequence.resident = None

    def _let_go(self, version: AdapterVersion) -> None:
        """A deleted adapter leaves pool and host once no unfinished request names it."""
        if self.unfinished.lets_go(version):
            self._supply.forget(version)
            self._memory.kv.forget(version)
