"""A scheduler with a runner that computes nothing but records the content of each page.

Each KV position stores a hash of everything that the token's key and value depend on: the tenant, the adapters, their
weights, the rotary factors and all tokens up to this one. Each adapter page stores the (version, part) that was loaded
into it. Before a chunk counts as computed, the bench compares the stored KV in its attention window with the expected
KV.

The step fails at once if the scheduler:
- writes to a shared page,
- frees a block too early,
- gives a sequence a block of another sequence,
- plans to read KV that was never computed.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from slora.core.cost_model import CostModel
from slora.core.engine_config import KVFootprint, SchedulerConfig
from slora.core.request import (
    NOT_SAMPLED,
    EngineRequest,
    PoolingKind,
    RequestTiming,
    RequestUsage,
    StepOutput,
    TenantShare,
    WeightedAdapter,
    compose_adapters,
    single_adapter,
)
from slora.core.sampling_params import SamplingParams
from slora.memory.kv_cache import BlockTable
from slora.memory.residency import AdapterLoad
from slora.sampling.prompt_rows import find_pooled_rows
from slora.scheduler.scheduler import Scheduler
from slora.scheduler.sequence import PooledPrompt, Sequence
from slora.scheduler.step_plan import Chunk, SampledToken, StepPlan
from slora_adapters.version import AdapterVersion
from tests.support.beam_model import Model, beam_params, propose, random_model
from tests.support.scripted_source import FULL_PAGE_BYTES, ScriptedSource

BLOCK_TOKENS = 4
STOP_TOKEN = 0
# The token that the runner samples after a wrong draft. No answer has it.
WRONG_TOKEN = 1000
# Four of the five tokens do not end a hypothesis. A search here may therefore have at most four beams.
BEAM_MODEL = random_model(5, seed=0)
NO_SHARE = TenantShare()
# Copying a page takes as long as computing two tokens.
COSTS = CostModel(
    step_s=0.01, token_s=0.001, decode_s=0.001, context_token_s=1e-6, page_copy_s=0.002, load_byte_s=1e-7
)


_STEP_S = 0.25


class BrokenStep(Exception):
    """The error with which a step of the bench fails."""


class SchedulerBench:
    """choose: samples the token of a sequence; None stands for logits that are not finite.

    defer: whether a step samples no token for a sequence with a matcher.
    beam_model: the model whose log-probabilities beams propose tokens by, if `choose` returns any token.
    host_pages: the capacity of the host for adapter copies, in pages.
    overlap: the results of a step arrive after the next step has been launched.
    options: fields of SchedulerConfig.

    usage, timings: of each request that has ended.
    page_seconds: the pages held for requests, integrated over time. Each step takes `_STEP_S`.
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
        host_pages: int | None = None,
        choose: Callable[[Sequence], int | None] = lambda sequence: 1,
        defer: Callable[[Sequence], bool] = lambda sequence: False,
        beam_model: Model = BEAM_MODEL,
        costs: CostModel = COSTS,
        prefix_cache: str = "off",
        overlap: bool = False,
        **options: Any,
    ) -> None:
        self.footprint = KVFootprint(BLOCK_TOKENS, window)
        self.config = SchedulerConfig(
            num_pages=num_pages,
            num_slots=num_slots,
            full_page_bytes=FULL_PAGE_BYTES,
            footprint=self.footprint,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            prefix_cache=prefix_cache,
            **options,
        )
        host_bytes = host_pages * FULL_PAGE_BYTES if host_pages is not None else None
        self.adapters = adapters
        self.source = ScriptedSource(adapters, host_bytes)
        self.scheduler = Scheduler(self.config, self.source, costs)
        self.memory = self.scheduler.paging
        self.pool, self.residency = self.memory.pool, self.memory.residency
        self.last_plan = StepPlan()
        # `id` of a sequence whose last chunk was undone -> the tokens of its largest chunk since the last computed one.
        self._undone: dict[int, int] = {}
        self.now = 0.0
        self.usage: dict[str, RequestUsage] = {}
        self.timings: dict[str, RequestTiming] = {}
        self.page_seconds = 0.0
        self.num_copies = 0
        self._num_overlapped = int(overlap)
        # The launched steps whose results have not arrived, with these results.
        self._launched: deque[tuple[StepPlan, list[SampledToken]]] = deque()
        # The tokens that these steps sample.
        self._pending: dict[Sequence, list[int]] = {}
        self._choose, self._defer = choose, defer
        self._beam_model = beam_model
        self._chosen: dict[tuple[Sequence, int], int | None] = {}
        self._kv: dict[tuple[int, int], int] = {}
        self._host_kv: dict[tuple[int, int], int] = {}
        self._adapter_pages: dict[int, tuple[AdapterVersion, int]] = {}
        self._slots: dict[int, tuple[int, AdapterVersion]] = {}

    def add(
        self,
        request_id: str,
        *,
        prompt: int = 1,
        max_tokens: int | None = 1,
        adapter: AdapterVersion | None = None,
        adapters: Iterable[WeightedAdapter] = (),
        longest: int = 64,
        n: int = 1,
        beams: int | None = None,
        tenant: str = "tenant",
        tokens: list[int] | None = None,
        share: TenantShare = NO_SHARE,
        **fields: Any,
    ) -> Sequence:
        """Adds one request. Raises ContextTooLong.

        longest: the limit that applies if max_tokens is None.
        adapter: the only adapter of the request; otherwise it has `adapters`.
        beams: the width of a beam search.
        tokens: the prompt's token ids, used instead of the length `prompt`.
        """
        sampling = NOT_SAMPLED if fields.get("pooling") else SamplingParams(max_tokens=max_tokens, n=n)
        if beams is not None:
            sampling = beam_params(beams, n, max_tokens, 1.0, early_stopping=False)
        request = EngineRequest(
            request_id,
            tenant,
            tokens or [1] * prompt,
            single_adapter(adapter) or compose_adapters(adapters),
            sampling,
            share=share,
            **fields,
        )
        self.memory.tenants.set_share(tenant, share)
        owner = self.memory.tenants.find(tenant, is_background=request.is_background)
        max_tokens = sampling.max_tokens or longest
        sequence = Sequence(request, owner, max_tokens, frozenset([STOP_TOKEN]), 0, BlockTable(BLOCK_TOKENS))
        self.scheduler.add(sequence, self.now)
        return sequence

    def step(self, *, breaks: bool = False, culprits: int = 0) -> list[StepOutput]:
        """Runs one step. breaks: the step's page moves fail. culprits: number of chunks that fail to compute.

        With `overlap`, launches a step and delivers the results of the step before.
        """
        self._pass_time(self.now - self.pool.now)
        plan = self.last_plan = self.scheduler.schedule(self.now)
        self._check_plan(plan)
        self._pass_time(_STEP_S)
        outputs = list(plan.ended)
        if breaks or culprits:
            outputs += self._deliver(0)
            plan.drop_finished()
        if breaks:
            for chunk in plan.chunks:
                undone = self._undone.get(id(chunk.sequence), 0)
                self._undone[id(chunk.sequence)] = max(undone, chunk.num_tokens)
            self._spoil_targets(plan)
            outputs += self.scheduler.undo_step(plan, BrokenStep())
        else:
            for chunk in plan.chunks:
                self._undone.pop(id(chunk.sequence), None)
            outputs += self.scheduler.fail_chunks(plan, plan.chunks[:culprits], BrokenStep())
            sampled = self._run(plan)
            self.scheduler.advance(plan)
            self._launch(plan, sampled)
            outputs += self._deliver(self._num_overlapped if plan.chunks else 0)
        self.scheduler.check_invariants()
        for request_id, usage, timing in self.scheduler.pop_usage():
            assert request_id not in self.usage and not self.scheduler.find(request_id)
            assert timing is not None
            self.usage[request_id], self.timings[request_id] = usage, timing
        return outputs

    def run_steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def deliver_and_step(self) -> list[StepOutput]:
        """Delivers every fetch and runs one step."""
        self.source.deliver()
        return self.step()

    @property
    def num_unfinished(self) -> int:
        return self.scheduler.num_running + self.scheduler.num_waiting

    @property
    def planned(self) -> dict[str, int]:
        """The tokens of each request in the last step."""
        return {chunk.sequence.request.request_id: chunk.num_tokens for chunk in self.last_plan.chunks}

    def _launch(self, plan: StepPlan, sampled: list[SampledToken]) -> None:
        self._launched.append((plan, sampled))
        tokens = iter(sampled)
        for chunk in plan.chunks:
            for sequence in chunk.sampled_sequences:
                token_id = next(tokens).token_id
                if not chunk.drafts:
                    self._pending.setdefault(sequence, []).append(
                        WRONG_TOKEN if token_id is None else token_id
                    )

    def _deliver(self, num_left: int) -> list[StepOutput]:
        outputs = []
        while len(self._launched) > num_left:
            plan, sampled = self._launched.popleft()
            for load in plan.loads:
                assert not load.resident.is_loading or self.source.is_pinned(load.packed), (
                    "a host copy was released before the step that reads it had ended"
                )
            for chunk in plan.chunks:
                for sequence in chunk.sampled_sequences:
                    if not chunk.drafts:
                        del self._pending[sequence][0]
            outputs += self.scheduler.postprocess(plan, sampled)
        return outputs

    def _tokens(self, sequence: Sequence) -> list[int]:
        """The tokens of a sequence, with the pending ones."""
        return [*sequence.token_ids, *self._pending.get(sequence, ())]

    def _pass_time(self, seconds: float) -> None:
        if seconds <= 0:
            return
        running = list(self.scheduler.batch)
        kv_pages = {page for sequence in running for page in sequence.blocks.held_pages}
        adapters = {resident for sequence in running for resident in sequence.residents}
        self.page_seconds += seconds * (len(kv_pages) + sum(len(one.pages) for one in adapters))
        self.scheduler.advance_clock(self.pool.now + seconds)

    def run_to_end(self, patience: int) -> Iterator[StepOutput]:
        """Steps until no request is left, and delivers every fetch before each step. Yields the outputs.

        Fails after `patience` steps in a row without output, because requests that wait for each other would loop for
        ever.
        """
        silent = 0
        while self.num_unfinished:
            outputs = self.deliver_and_step()
            yield from outputs
            silent = 0 if outputs else silent + 1
            assert silent < patience, f"requests are left, and {patience} steps told nothing"

    def come_to_rest(self, *, pauses: bool = False) -> None:
        """Steps as an idle engine does: only when there is work or a fetch has arrived.

        pauses: also step when the next attempt of a pin is due.
        """
        self.step()  # executes the pending command
        for _ in range(100):
            due_s = self.scheduler.pins.next_retry_s if pauses else None
            if not (self.scheduler.has_work or self.source.in_flight or due_s):
                return
            self.now = max(self.now, due_s or 0.0)
            self.source.deliver()
            self.step()
        raise AssertionError("it never comes to rest")

    def _check_plan(self, plan: StepPlan) -> None:
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        assert len(plan.chunks) <= self.scheduler.num_running <= self.config.max_num_seqs
        assert sum(len(chunk.sampled_sequences) for chunk in plan.chunks) <= self.config.max_num_seqs
        sequences = [chunk.sequence for chunk in plan.chunks]
        assert len(set(map(id, sequences))) == len(sequences), "a sequence is twice in a step"
        slots = [chunk.slots or ((1 << 31,),) for chunk in plan.chunks]
        assert slots == sorted(slots), "tokens of an adapter are not side by side"
        for chunk in plan.chunks:
            self._check_chunk(chunk)

    def _run(self, plan: StepPlan) -> list[SampledToken]:
        self._swap_out(plan.swaps_out)
        self._copy(plan.copies)
        self._swap_in(plan.swaps_in)
        for load in plan.loads:
            self._load(load)
        for chunk in plan.chunks:
            if chunk.sequence.is_finished:  # another choice of its request was a culprit
                continue
            self._check_adapter(chunk)
            self._compute(chunk)
        return [token for chunk in plan.chunks for token in self._sample_chunk(chunk)]

    def _sample_chunk(self, chunk: Chunk) -> list[SampledToken]:
        """A token after a wrong draft is never used, so `choose` is not asked for it."""
        if chunk.samples and not chunk.drafts and self._defer(chunk.sequence):
            return [SampledToken(None, is_deferred=True)]
        if not chunk.drafts:
            return [self._sample_token(sequence) for sequence in chunk.sampled_sequences]
        sequence, is_right, sampled = chunk.sequence, True, []
        for number, draft in enumerate([*chunk.drafts, None]):
            sampled.append(self._sample_token(sequence, number) if is_right else SampledToken(WRONG_TOKEN))
            is_right = is_right and sampled[-1].token_id == draft != STOP_TOKEN
        return sampled

    def _spoil_targets(self, plan: StepPlan) -> None:
        """Erases every page and host page that the step would have written."""
        loaded = {
            page for load in plan.loads for page in load.resident.pages[load.first_page :][: load.num_pages]
        }
        self._write({*loaded, *(page for _, page in (*plan.copies, *plan.swaps_in))})
        saved = {page for _, page in plan.swaps_out}
        self._host_kv = {place: content for place, content in self._host_kv.items() if place[0] not in saved}

    def _sample_token(self, sequence: Sequence, offset: int = 0) -> SampledToken:
        """A step may sample a token that the next step samples again, because its logits were not finite. It is the
        same one."""
        place = sequence, len(self._tokens(sequence)) + offset
        if place not in self._chosen:
            self._chosen[place] = self._choose(sequence)
        token = self._chosen[place]
        if token is None or sequence.search is None:
            return SampledToken(token)
        generated = tuple(sequence.token_ids[sequence.num_prompt :])
        count = sequence.search.width + len(sequence.stop_ids)
        return SampledToken(token, proposal=propose(self._beam_model, generated, count))

    def _swap_out(self, pairs: list[tuple[int, int]]) -> None:
        for page, host_page in pairs:
            for offset in range(BLOCK_TOKENS):
                _move(self._kv.get((page, offset)), self._host_kv, (host_page, offset))

    def _swap_in(self, pairs: list[tuple[int, int]]) -> None:
        self._write({page for _, page in pairs})
        for host_page, page in pairs:
            for offset in range(BLOCK_TOKENS):
                _move(self._host_kv.get((host_page, offset)), self._kv, (page, offset))

    def _copy(self, copies: list[tuple[int, int]]) -> None:
        self.num_copies += len(copies)
        assert len({target for _, target in copies}) == len(copies), "a page is copied to twice"
        places = [(source, target, offset) for source, target in copies for offset in range(BLOCK_TOKENS)]
        found = {(target, offset): self._kv.get((source, offset)) for source, target, offset in places}
        self._write({target for _, target in copies})
        self._kv |= {place: content for place, content in found.items() if content is not None}

    def _load(self, load: AdapterLoad) -> None:
        resident = load.resident
        assert self.source.is_pinned(load.packed), "a host copy was read after it was released"
        assert len(resident.pages) * FULL_PAGE_BYTES >= len(load.packed.buffer)
        parts = range(load.first_page, load.first_page + load.num_pages)
        self._write({resident.pages[part] for part in parts})
        for part in parts:
            self._adapter_pages[resident.pages[part]] = resident.version, part
        if load.is_last:
            self._slots[resident.slot] = resident.generation, resident.version

    def _check_adapter(self, chunk: Chunk) -> None:
        adapters = chunk.sequence.request.adapters
        assert len(chunk.slots) == len(adapters), "a request runs without one of its adapters"
        for (slot, generation, weight), (version, asked) in zip(chunk.slots, adapters, strict=True):
            assert self._slots[slot] == (generation, version) and weight == asked
            resident = self.residency.find(version)
            assert resident is not None and resident.num_users > 0
            held = [self._adapter_pages.get(page) for page in resident.pages]
            assert held == [(version, part) for part in range(len(held))], (
                "an adapter's pages were overwritten"
            )

    def _compute(self, chunk: Chunk) -> None:
        end = chunk.start + chunk.num_tokens
        pages = chunk.sequence.blocks.pages.tolist()
        places = [(pages[t // BLOCK_TOKENS], t % BLOCK_TOKENS) for t in range(end)]
        contents = self._contents(chunk.sequence, end, chunk.drafts)
        self._write({page for page, _ in places[chunk.start :]}, keep_kv=True)
        self._kv |= dict(zip(places[chunk.start :], contents[chunk.start :], strict=True))
        seen = self.footprint.first_token_seen(chunk.start)
        assert [self._kv.get(place) for place in places[seen:]] == contents[seen:], (
            "KV was lost or overwritten"
        )
        if chunk.sequence.pooled is not None:
            self._pool(chunk, chunk.sequence.pooled, contents)

    def _pool(self, chunk: Chunk, pooled: PooledPrompt, contents: list[int]) -> None:
        """Adds up the contents of the tokens in place of their hidden states."""
        for rows in find_pooled_rows([chunk], np.zeros(1, np.int32)):
            pooled.total = (pooled.total or 0) + sum(contents[chunk.start + row] for row in rows.tokens)
            pooled.next_token += len(rows.tokens)
        if pooled.next_token == chunk.sequence.num_prompt:
            pooled.embedding = str(pooled.total).encode()

    def embed_plainly(self, sequence: Sequence) -> bytes:
        """The embedding of a prompt that was computed in one step."""
        pooling = sequence.request.pooling
        contents = self._contents(sequence, sequence.num_prompt, ())
        is_mean = pooling is not None and pooling.kind is PoolingKind.MEAN
        return str(sum(contents if is_mean else contents[-1:])).encode()

    def _contents(self, sequence: Sequence, end: int, drafts: tuple[int, ...]) -> list[int]:
        """One hash for each token of [0, end): everything that the token's KV depends on."""
        request = sequence.request
        is_public = self.config.prefix_cache == "public" and not request.adapters
        owner = None if is_public else request.tenant
        content = hash((owner, request.adapters, sequence.uses_long_rope))
        contents = []
        for token in [*self._tokens(sequence), *drafts][:end]:
            content = hash((content, token))
            contents.append(content)
        return contents

    def _write(self, pages: Iterable[int], *, keep_kv: bool = False) -> None:
        """Marks the pages as overwritten: their previous content is gone."""
        for page in pages:
            self._adapter_pages.pop(page, None)
            if not keep_kv:
                for offset in range(BLOCK_TOKENS):
                    self._kv.pop((page, offset), None)

    def _check_chunk(self, chunk: Chunk) -> None:
        sequence = chunk.sequence
        assert not sequence.is_finished, "an ended request was planned"
        assert chunk.num_tokens > 0
        assert chunk.start == sequence.num_computed
        end = chunk.start + chunk.num_tokens
        num_tokens = len(sequence.token_ids) + sequence.num_pending + len(chunk.drafts)
        assert end <= num_tokens <= sequence.num_prompt + sequence.max_tokens
        assert chunk.samples == (end == num_tokens and sequence.pooled is None)
        num_sampled = 1 if sequence.search is not None else sequence.num_places
        if chunk.drafts:
            assert sequence.search is None and sequence.num_generated and num_sampled == 1 and not chunk.forks
            assert chunk.num_tokens == 1 + len(chunk.drafts)
            num_sampled = chunk.num_tokens
        assert len(chunk.sampled_sequences) == (num_sampled if chunk.samples else 0)
        assert sequence.blocks.num_pages * BLOCK_TOKENS >= end
        switch = self.config.rope_switch
        assert sequence.uses_long_rope == (switch is not None and num_tokens > switch)
        held, entries = sequence.blocks.held_pages, sequence.blocks.pages.tolist()
        assert set(entries) == set(held), "an entry is no page of the sequence"
        # A sequence that waits for its adapters holds pages for its first chunk, which may be shortened later. An
        # overdue sequence holds all pages that it will ever need.
        # Pages of rejected drafts are kept for the next tokens, and those of an undone chunk for the next chunk, which
        # may be shorter.
        is_exact = not sequence.residents and not sequence.is_starving
        is_exact = is_exact and sequence.draft_state is None
        undone = self._undone.get(id(sequence), 0)
        most = max(chunk.num_tokens, undone) if is_exact else sequence.max_chunk_tokens
        assert len(held) <= self.footprint.pages(sequence.blocks.num_pages * BLOCK_TOKENS, most)
        written = sequence.blocks.pages[chunk.start // BLOCK_TOKENS : -(-end // BLOCK_TOKENS)]
        assert not any(self.pool.is_shared(page) for page in written.tolist()), "a shared page is written to"


def _move(content: int | None, memory: dict[tuple[int, int], int], place: tuple[int, int]) -> None:
    """Moves one position's content. A position that was never written has none."""
    memory.pop(place, None)
    if content is not None:
        memory[place] = content
