"""One sequence: the tokens of one choice of a request, how many of them are computed, and the resources that it holds.

A request with several choices is one sequence until its prompt is computed; then the sequence forks. In a beam search
every beam is a sequence. All beams share one `search`, in which each has its own number (`index`), and they fork after
every token.

Invariants:
    tokens    [0, num_prompt) are the prompt; [num_prompt, len(token_ids)) were generated
    computed  the KV of tokens [0, num_computed) is in `blocks`; num_computed < len(token_ids) + num_pending until the
              sequence ends, except for a beam that has proposed: it keeps running while it waits for the other beams
    adapters  a running sequence is a user of all of `residents`, which are the adapters of its request in the same
              order; a waiting sequence has none and holds nothing in the pool
    row       a running sequence owns row `row` of the sampling table
    named     the blocks of tokens [0, num_named) were offered to the prefix cache, under `block_keys`
    state     for a model with recurrent layers: the pages of the state hold it as it is after `num_state_tokens`
              tokens; a sequence that must compute one of these tokens again restarts. The prefix cache had the blocks
              of the first `num_matched` tokens, and has the state after `num_kept` tokens
    charged   prompt tokens [0, num_charged) were charged to its tenant, or were found in the prefix cache
    swapped   a waiting sequence may keep its KV in host pages, which saves the recompute
    ready     a running sequence can compute its tokens up to `num_ready`, one in each step, without further checks:
              its own pages are there for them, its adapters are loaded and its whole prompt is charged
    matcher   for structured output: the matcher in the state after the generated tokens; None while the sequence waits
              for its grammar to be compiled
    pending   `num_pending` tokens that launched steps sample are not in `token_ids` yet; tokens count as computed when
              their step is launched
    drafted   KV of drafted tokens may follow the computed KV in `blocks`; no token ever attends to it
    scored    with prompt_logprobs, tokens [0, num_scored) of the prompt are scored; `scores` are not reported yet
    pooled    for embeddings: what the computed tokens of the prompt contribute to the embedding
    added     the adapter has `num_added` tokens behind those of the base model, which only its own sequences have
"""

import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from slora.core.request import EmittedTokens, EngineRequest, PoolingKind, RequestTiming, TokenLogprobs
from slora.core.sampling_params import choice_seed
from slora.grammar.matcher import Matcher, TokenFilter
from slora.memory.kv_cache import BlockTable
from slora.memory.residency import Resident
from slora.memory.tenant_account import TenantAccount
from slora.scheduler.beam_search import BeamSearch
from slora.scheduler.draft_state import DraftState


class RequestTimes:
    """The times at which one unfinished request passed the stages of the engine. All of its sequences share them.
    Seconds on the clock of `Scheduler.schedule`.

    fetch_s: time that the request waited for its adapters to be on the host, before its first admission.
    is_cold: whether the request waited for an adapter to be fetched to the host or to be loaded into the pool.
    admitted_at: None until the request is admitted.
    computed_at: None until the request's first tokens are computed.
    first_token_at: None until a token is sampled; for a beam search always None.
    """

    __slots__ = (
        "_fetching_since",
        "admitted_at",
        "arrived_at",
        "computed_at",
        "fetch_s",
        "first_token_at",
        "is_cold",
        "num_preemptions",
    )

    def __init__(self) -> None:
        self.arrived_at = 0.0
        self.fetch_s = 0.0
        self.is_cold = False
        self.admitted_at: float | None = None
        self.computed_at: float | None = None
        self.first_token_at: float | None = None
        self.num_preemptions = 0
        self._fetching_since: float | None = None

    def begin_fetch(self, now: float) -> None:
        """Starts to measure the wait for the request's adapters. A wait after the first admission is not counted."""
        if self.admitted_at is None:
            self.is_cold = True
            # `now` may be the time of the last step, before the request arrived.
            self._fetching_since = max(now, self.arrived_at)

    def end_fetch(self, now: float) -> None:
        """Ends the measured wait for the request's adapters. A no-op if the request does not wait."""
        if self._fetching_since is not None:
            self.fetch_s += now - self._fetching_since
            self._fetching_since = None

    def end(self, now: float) -> RequestTiming:
        self.end_fetch(now)
        return RequestTiming(
            self.arrived_at,
            self.fetch_s,
            self.is_cold,
            self.admitted_at,
            self.computed_at,
            self.first_token_at,
            max(now, self.arrived_at),
            self.num_preemptions,
        )


class UsageCounter:
    """Counts what all sequences of one unfinished request use together: the parts of `RequestUsage` that grow while the
    request runs.

    page_seconds: complete only after all sequences of the request have ended.
    """

    __slots__ = ("adapter_bytes", "generated_tokens", "page_seconds")

    def __init__(self) -> None:
        self.generated_tokens = 0
        self.adapter_bytes = 0
        self.page_seconds = 0.0


_arrivals = itertools.count()
# A sequence that was preempted this often without a new token in between is starving.
MAX_REPEAT_PREEMPTIONS = 3


class SwappedBlocks(NamedTuple):
    """The swapped KV of tokens [0, num_computed)."""

    # The host pages of the recurrent state, and then those of blocks num_freed, num_freed + 1, and so on, in order.
    host_pages: list[int]
    num_freed: int  # Number of leading blocks that lie behind the sliding window and were not saved.
    num_computed: int


class AdapterSlot(NamedTuple):
    """An adapter in the kernels' tables, and the weight with which a sequence uses it."""

    slot: int
    generation: int
    weight: float


@dataclass(slots=True, eq=False)
class PooledPrompt:
    """The sum of a prompt's hidden states so far. Only `slora.sampling.prompt_rows` adds to it."""

    # The first token whose hidden state is still needed. Tokens before it may be computed again, after a preemption
    # for example, but are not added again.
    next_token: int
    count: int  # Number of hidden states in the complete sum.
    total: Any = None  # The sum, a float32 tensor [H] on the model's device; None before the first chunk.
    # The result, once the sum is complete; None also if a hidden state was not finite.
    embedding: bytes | None = None

    @staticmethod
    def of(request: EngineRequest) -> "PooledPrompt | None":
        num_tokens = len(request.prompt_token_ids)
        if request.pooling is None:
            return None
        count = num_tokens if request.pooling.kind is PoolingKind.MEAN else 1
        return PooledPrompt(num_tokens - count, count)


# The index of a token that no sequence has.
NEVER = 1 << 62


def find_last(token_ids: list[int], pattern: tuple[int, ...]) -> int | None:
    """The index at which `pattern` begins for the last time; None if it does not occur.

    The time depends on the two lengths only, not on the tokens that a client sends.
    """
    count = len(token_ids) - len(pattern) + 1
    if count <= 0:
        return None
    tokens, matches = np.array(token_ids), np.ones(count, bool)
    for offset, token in enumerate(pattern):
        matches &= tokens[offset : offset + count] == token
    places = matches.nonzero()[0]
    return int(places[-1]) if len(places) else None


class Sequence:
    """The state of one choice or one beam of a request."""

    __slots__ = (
        "active_from",
        "arrival",
        "block_keys",
        "blocks",
        "chunk_order",
        "draft_state",
        "index",
        "is_finished",
        "is_running",
        "last_token_at",
        "len_at_preemption",
        "mask_s",
        "matcher",
        "max_chunk_tokens",
        "max_tokens",
        "num_added",
        "num_cached",
        "num_charged",
        "num_choices",
        "num_computed",
        "num_deferrals",
        "num_failed_steps",
        "num_kept",
        "num_left_out",
        "num_matched",
        "num_named",
        "num_pending",
        "num_places",
        "num_preemptions",
        "num_prompt",
        "num_ready",
        "num_repeat_preemptions",
        "num_scored",
        "num_state_tokens",
        "pooled",
        "request",
        "residents",
        "row",
        "scores",
        "search",
        "seed",
        "slots",
        "stop_ids",
        "swapped",
        "tenant",
        "times",
        "token_ids",
        "usage",
        "uses_long_rope",
    )

    def __init__(
        self,
        request: EngineRequest,
        tenant: TenantAccount,
        max_tokens: int,
        stop_ids: frozenset[int],
        seed: int,
        blocks: BlockTable,
    ) -> None:
        """blocks: an empty table, for the pages of the sequence."""
        self.arrival = next(_arrivals)
        self.index = 0  # The number of this choice or beam within the request.
        # Number of choices that start when the prompt is computed; 1 afterwards and in the forks.
        self.num_choices = request.sampling.width
        # Number of places that it occupies while it runs: 1, and more for choices that have not started. Choices
        # without a place are queued when the others start.
        self.num_places = self.num_choices
        self.request = request
        self.tenant = tenant
        self.usage = UsageCounter()  # Counters and times of the request, which all of its sequences share.
        self.times = RequestTimes()
        # Time of the last token, on the clock of `Scheduler.schedule`.
        self.last_token_at: float | None = None
        # The request's value; if it sets none, as many as the context and the pool allow.
        self.max_tokens = max_tokens
        self.stop_ids = stop_ids
        self.seed = seed
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt = len(self.token_ids)
        self.num_computed = 0
        self.num_pending = 0
        self.num_ready = 0
        self.num_cached = 0  # Prompt tokens that the prefix cache held when the sequence was first admitted.
        self.num_charged = 0
        self.num_preemptions = 0
        self.num_repeat_preemptions = 0  # Since the sequence last gained a token.
        self.len_at_preemption = 0  # Number of tokens at the last preemption.
        # Number of failed steps of which the sequence may be the cause, since it last gained a token.
        self.num_failed_steps = 0
        self.blocks = blocks
        self.num_state_tokens = self.num_matched = self.num_kept = 0
        self.block_keys: list[bytes] = []
        self.num_named = 0
        self.swapped: SwappedBlocks | None = None
        self.residents: tuple[Resident, ...] = ()
        self.slots: tuple[AdapterSlot, ...] = ()  # Where `residents` are in the kernels' tables.
        # The sort key of its chunks in a step. All tokens of a tile must have the same adapter and weight. Chunks of
        # the base model come last, so that the LoRA tiles of the first adapters cover a prefix of the batch's tokens.
        self.chunk_order: tuple[int, tuple[AdapterSlot, ...], int, int] = (NEVER, (), self.arrival, 0)
        # The first token on which the adapters have an effect. Known once they are in the pool or on the host.
        self.active_from = 0
        self.num_added = 0
        self.matcher: Matcher | None = TokenFilter.of(request.sampling)
        self.mask_s = 0.0  # CPU seconds of the last mask.
        # Number of steps since the last token that deferred the sequence; see `token_masks`.
        self.num_deferrals = 0
        self.num_left_out = 0  # Number of steps since its last decode row that left it out; see `RowBudget`.
        self.draft_state: DraftState | None = None  # None before the first draft.
        self.search = BeamSearch(request.sampling, stop_ids) if request.sampling.use_beam_search else None
        self.row = 0
        self.is_running = False
        # Maximum number of tokens that one step may compute. With larger chunks, the sequence's pages might not fit
        # into the pool.
        self.max_chunk_tokens = len(self.token_ids)
        self.uses_long_rope = False  # Whether K is rotated with the long factors of a longrope model.
        wanted = request.sampling.prompt_logprobs is not None
        # The first token has no log-probability: no token precedes it.
        self.scores: list[TokenLogprobs | None] = [None] if wanted else []
        self.num_scored = 1 if wanted else self.num_prompt
        self.pooled = PooledPrompt.of(request)
        self.is_finished = False

    def __lt__(self, other: "Sequence") -> bool:
        return (self.arrival, self.index) < (other.arrival, other.index)

    def fork(self, index: int) -> "Sequence":
        """Creates choice or beam `index` of the same request. The new sequence has the same place in the order of
        arrival, and holds no pages yet.
        """
        blocks = BlockTable(self.blocks.block_tokens, self.blocks.num_state_pages)
        seed = choice_seed(self.seed, index)
        choice = Sequence(self.request, self.tenant, self.max_tokens, self.stop_ids, seed, blocks)
        choice.arrival, choice.index = self.arrival, index
        choice.num_choices = choice.num_places = 1
        choice.token_ids, choice.search = self.token_ids.copy(), self.search
        choice.active_from, choice.num_added = self.active_from, self.num_added
        choice.usage, choice.times = self.usage, self.times
        choice.matcher = None if self.matcher is None else self.matcher.copy()
        choice.num_charged, choice.num_cached = self.num_prompt, self.num_cached
        choice.max_chunk_tokens, choice.uses_long_rope = self.max_chunk_tokens, self.uses_long_rope
        choice.scores, choice.num_scored = [], self.num_prompt
        return choice

    def activate_after(self, invocation: tuple[int, ...]) -> None:
        """Lets the adapter have an effect from the last occurrence of `invocation` in the prompt on.

        As in PEFT, an adapter that the prompt does not invoke has no effect at all.
        """
        at = find_last(self.token_ids[: self.num_prompt], invocation)
        self.active_from = NEVER if at is None else at

    def set_residents(self, residents: tuple[Resident, ...]) -> None:
        """Sets `residents`, `slots` and `chunk_order`. The caller acquires and releases the residents."""
        self.residents = residents
        self.slots = tuple(
            AdapterSlot(resident.slot, resident.generation, weight)
            for resident, (_, weight) in zip(residents, self.request.adapters, strict=bool(residents))
        )
        first = self.slots[0].slot if self.slots else NEVER
        self.chunk_order = first, self.slots, self.arrival, self.index

    @property
    def is_starving(self) -> bool:
        """Whether the sequence was preempted `MAX_REPEAT_PREEMPTIONS` times without a new token in between.

        Two sequences could otherwise preempt each other forever. A starving sequence is admitted only with all pages
        that it needs up to its next token, and it is preempted last. Among several starving sequences, the first to
        arrive is never preempted. So at least one sequence makes progress.
        """
        return self.num_repeat_preemptions >= MAX_REPEAT_PREEMPTIONS

    @property
    def is_background(self) -> bool:
        return self.tenant.is_background

    @property
    def awaits_grammar(self) -> bool:
        """Whether the sequence waits until its grammar is compiled."""
        return self.matcher is None and self.request.sampling.structured_output is not None

    @property
    def can_draft(self) -> bool:
        """Whether tokens of the sequence may be drafted, see `Drafting`."""
        sampling = self.request.sampling
        return sampling.prompt_lookup and not (
            self.search is not None
            or self.matcher is not None
            or sampling.structured_output is not None
            or sampling.has_penalties
        )

    def resume(self, emitted: EmittedTokens) -> "list[Sequence]":
        """Creates a sequence for each unfinished choice. It continues after the tokens that a lost engine has reported.

        The state is the same as after a preemption. So positions, penalties and limits count all tokens of the answer.
        """
        self.num_cached = emitted.num_cached
        self.usage.generated_tokens = emitted.num_tokens
        choices = []
        for index, token_ids in enumerate(emitted.choices):
            if token_ids is not None:
                choices.append(choice := self.fork(index))
                for token_id in token_ids:
                    choice.append(token_id)
        return choices

    def start_matcher(self, matcher: Matcher) -> None:
        """Sets the matcher of the compiled grammar, and passes it the tokens of a resumed answer."""
        self.matcher = matcher
        for token_id in self.token_ids[self.num_prompt :]:
            matcher.accept(token_id)

    def append(self, token_id: int) -> None:
        self.extend((token_id,))

    def extend(self, token_ids: tuple[int, ...]) -> None:
        """Appends generated tokens. The matcher does not accept stop tokens, because they end the sequence."""
        self.token_ids += token_ids
        self.num_failed_steps = 0
        if self.matcher is not None:
            for token_id in token_ids:
                if token_id not in self.stop_ids:
                    self.matcher.accept(token_id)

    def drop_unreported(self) -> None:
        """Drops what a failed step has left for the client: log-probabilities and pooled hidden states."""
        self.num_scored -= len(self.scores)
        if self.scores and not self.num_scored:
            self.scores, self.num_scored = [None], 1
        else:
            self.scores = []
        self.pooled = PooledPrompt.of(self.request)

    def record_preemption(self) -> None:
        self.num_preemptions += 1
        self.times.num_preemptions += 1
        self.num_repeat_preemptions = (
            self.num_repeat_preemptions + 1 if len(self.token_ids) == self.len_at_preemption else 1
        )
        self.len_at_preemption = len(self.token_ids)

    @property
    def num_uncomputed(self) -> int:
        """Number of tokens whose KV is not computed. At most the last of them is pending."""
        return len(self.token_ids) + self.num_pending - self.num_computed

    @property
    def awaits_result(self) -> bool:
        """Whether the next token can't be planned before the pending one is known.

        A grammar, a token filter and a beam search need the token's id. A sequence of `max_tokens` tokens ends with it.
        """
        if not self.num_pending:
            return False
        needs_id = self.matcher is not None or self.search is not None
        return needs_id or self.num_generated + self.num_pending >= self.max_tokens

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def has_overrun(self) -> bool:
        """Whether the recurrent state has passed the next token to compute, or will have once it is swapped in."""
        num_computed = self.num_computed if self.swapped is None else self.swapped.num_computed
        return bool(self.blocks.num_state_pages and num_computed and num_computed != self.num_state_tokens)

    @property
    def has_proposed(self) -> bool:
        """Whether the sequence is a beam that has proposed and waits for the other beams."""
        return self.search is not None and self.search.has_proposed(self.index)

    @property
    def max_kv_tokens(self) -> int:
        """Maximum number of tokens with KV. The KV of the last generated token is never computed."""
        return self.num_prompt + self.max_tokens - 1
