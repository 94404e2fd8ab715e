"""Prompt lookup: drafts the next tokens of a sequence from its own text, so that one step can yield several of them.

If the last tokens of a sequence occurred earlier in its prompt or its answer, the tokens that followed there are its
draft. The step computes the draft along with the last token, and samples a token after each of them. A drafted token is
accepted if it is the token that was sampled in its place. The first rejected token and all drafted tokens after it are
discarded.

The output is the same as without drafts. A sampled token depends only on the logits, the request's seed and the
position, and the logits depend only on the earlier tokens. So up to the first rejected token, every position is sampled
from its own distribution, with its own random number. No drafted token ever replaces a sampled one, so the distribution
is unchanged at any temperature.

The kernels compute each drafted token as a decode row, with the block table of its sequence. All rows of a step write
their KV before attention reads it. So the results are bit-identical to those of separate steps. KV of rejected tokens
is overwritten before any token attends to it, and is never offered to the prefix cache.

Drafts save time where additional rows make a step only a little longer. This is mostly the case in small batches.
Drafts only use what a step has left: tokens of its budget, rows of the batch, and free pages. No sequence is preempted
and nothing is evicted for a draft.

Beams, structured output, and requests with penalties, `allowed_token_ids` or `bad_words` get no drafts. Their sampling
depends on the earlier tokens in ways that a step does not compute for several positions at once.
Background sequences get drafts only in steps without interactive sequences.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import takewhile

from slora.core.cost_model import CostModel
from slora.core.engine_config import SchedulerConfig
from slora.memory.unified_paging import UnifiedPaging
from slora.scheduler.charges import charge_rejected
from slora.scheduler.draft_state import AcceptanceHistory, DraftState, copy_from, start_rates
from slora.scheduler.sequence import Sequence
from slora.scheduler.step_plan import Chunk, SampledToken, StepPlan

# A token is drafted only if it is expected to save this many times its cost, because both estimates are rough.
_MIN_GAIN = 1.25
# Drafts may lengthen a step by this factor for a sequence that gains nothing from them.
_MAX_DELAY = 1.25
# Maximum number of tokens that all sequences together add to their indexes in one step. Adding this many takes the host
# about one millisecond.
_INDEXED_PER_STEP = 1024


@dataclass(slots=True, eq=False)
class _Candidate:
    """A decode row that may get a draft."""

    number: int  # The place of its chunk in the plan.
    rank: int
    position: int  # The index from which the drafted tokens are copied.
    rate: float  # The estimated probability that a token is accepted if all drafted tokens before it were accepted.
    most: int  # Maximum number of tokens to draft.
    row_s: float  # Seconds of one drafted row.
    is_probe: bool
    num_tokens: int = 0
    expected: float = 1.0  # Number of tokens that the sequence is expected to gain in this step.


class Drafting:
    """Adds drafts to the decode rows of a plan, and decides which sampled tokens are kept.

    num_drafts, num_draft_tokens, num_accepted_tokens: totals since the engine started.
    """

    def __init__(self, config: SchedulerConfig, paging: UnifiedPaging, costs: CostModel) -> None:
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self._config = config
        self._paging = paging
        self._costs = costs
        self._history = AcceptanceHistory()

    @property
    def num_rejected_tokens(self) -> int:
        return self.num_draft_tokens - self.num_accepted_tokens

    def add_drafts(self, plan: StepPlan) -> None:
        """Adds drafts to the plan where they are expected to save more time than they cost."""
        if not self._config.prompt_lookup_tokens:
            return
        work, costs = plan.measure_work(self._config.full_page_bytes), self._costs
        num_rows = sum(len(chunk.sampled_sequences) for chunk in plan.chunks)
        num_free = min(
            self._config.max_num_batched_tokens - plan.num_tokens, self._config.max_num_seqs - num_rows
        )
        if not (work.decode_rows and num_rows) or num_free <= 0:
            return
        # Copies are not counted, because they do not occur in the steps that drafts save.
        step_s = costs.step_seconds(work._replace(swapped_pages=0, loaded_bytes=0))
        # The time that one more sampled token is worth.
        token_s = step_s / num_rows
        # Return if drafting would cost more than it saves even if every draft were accepted.
        if token_s <= _MIN_GAIN * costs.decode_s:
            return
        candidates = self._find_candidates(plan, token_s)
        if candidates:
            has_others = len(candidates) < num_rows or work.prefill_tokens > 0
            _choose_lengths(candidates, num_free, step_s, token_s, has_others=has_others)
            for candidate in candidates:
                if candidate.num_tokens:
                    self._add(plan, candidate)

    def keep_sampled(self, chunk: Chunk, sampled: Items[SampledToken]) -> list[SampledToken]:
        """Returns the sampled tokens that decoding without drafts would also have sampled; at least the first.

        sampled: one token for each token of the chunk. Counts and charges the rejected tokens.
        """
        sequence, kept = chunk.sequence, [sampled[0]]
        for drafted, following in zip(chunk.drafts, sampled[1:], strict=True):
            if kept[-1].token_id != drafted or following.token_id is None:
                break
            kept.append(following)
        num_drafted, num_accepted = len(chunk.drafts), len(kept) - 1
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        charge_rejected(sequence, num_drafted - num_accepted)
        state = sequence.draft_state
        assert state is not None, "a sequence with a draft has a state"
        state.count(num_accepted, num_drafted)
        return kept

    def _find_candidates(self, plan: StepPlan, token_s: float) -> list[_Candidate]:
        found, num_left = [], _INDEXED_PER_STEP
        has_interactive = any(not chunk.sequence.is_background for chunk in plan.chunks)
        for number, chunk in enumerate(plan.chunks):
            sequence = chunk.sequence
            if not (
                chunk.samples and chunk.num_tokens == 1 and sequence.num_generated and sequence.can_draft
            ):
                continue
            # Background work may lengthen a step with interactive requests only a little.
            if sequence.is_background and has_interactive:
                continue
            row_s = self._costs.row_s(chunk.start + 2)
            most = self._most_tokens(sequence)
            if most <= 0 or token_s <= _MIN_GAIN * row_s:
                continue
            state = sequence.draft_state
            if state is None:
                history = self._history.find(sequence.tenant.name, sequence.request.versions)
                state = sequence.draft_state = DraftState(start_rates(history), history)
            num_left -= state.index.extend(sequence.token_ids, num_left)
            match = state.index.find(sequence.token_ids)
            if match is None:
                continue
            rank, position = match
            rate = state.rates[rank].value
            pays = rate * token_s > _MIN_GAIN * row_s
            if pays or state.is_probe_due():
                most = most if pays else 1
                found.append(_Candidate(number, rank, position, rate, most, row_s, is_probe=not pays))
        return found

    def _most_tokens(self, sequence: Sequence) -> int:
        """Returns the maximum number of tokens to draft. The last token of an answer is never drafted."""
        num_tokens = len(sequence.token_ids)
        most = min(
            self._config.prompt_lookup_tokens,
            sequence.max_tokens - sequence.num_generated - 1,
            sequence.max_chunk_tokens - 1,
        )
        if self._config.rope_switch is not None and not sequence.uses_long_rope:
            most = min(most, self._config.rope_switch - num_tokens)
        blocks = sequence.blocks
        if most > 0 and not self._has_room(sequence, num_tokens + most):
            most = min(most, blocks.num_pages * blocks.block_tokens - num_tokens)
        return most

    def _has_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether the sequence can hold `num_tokens` tokens without an eviction and within its tenant's ceiling."""
        missing = sequence.blocks.pages_missing(num_tokens)
        is_over = sequence.tenant.pages_over_ceiling(missing) > 0
        return not missing or (missing <= self._paging.pool.num_free and not is_over)

    def _add(self, plan: StepPlan, candidate: _Candidate) -> None:
        chunk = plan.chunks[candidate.number]
        sequence, state = chunk.sequence, chunk.sequence.draft_state
        assert state is not None, "a candidate has a state"
        drafts = copy_from(sequence.token_ids, candidate.position, candidate.num_tokens)
        # No token follows a stop token, so a stop token is not drafted.
        drafts = list(takewhile(lambda token: token not in sequence.stop_ids, drafts))
        num_tokens = len(sequence.token_ids) + len(drafts)
        if not drafts or not self._has_room(sequence, num_tokens):  # Another draft may have taken the pages.
            return
        missing = sequence.blocks.pages_missing(num_tokens)
        sequence.blocks.allocate(missing, sequence.tenant, self._paging.kv)
        state.start(candidate.rank)
        plan.chunks[candidate.number] = chunk._replace(num_tokens=1 + len(drafts), drafts=tuple(drafts))


def _choose_lengths(
    candidates: list[_Candidate], num_free: int, step_s: float, token_s: float, *, has_others: bool
) -> None:
    """Sets the number of tokens to draft for each candidate.

    In each round, every draft grows by one token, as long as that token is expected to save more time than it costs.
    The time of the step is limited to `_MAX_DELAY` times its time without drafts. If the step computes nothing but the
    candidates, the limit is multiplied by the smallest number of tokens that a candidate is expected to gain.

    num_free: maximum number of drafted tokens, for all candidates together.
    step_s: seconds of the step without drafts.
    token_s: seconds that one more token is worth.
    has_others: whether the step also computes chunks without drafts, which a longer step only delays.
    """
    growing, allowed_s, seconds = candidates, _MAX_DELAY * step_s, step_s
    while growing:
        paying = []
        for candidate in growing:
            gain = candidate.rate ** (candidate.num_tokens + 1)
            pays = candidate.is_probe or gain * token_s > _MIN_GAIN * candidate.row_s
            if candidate.num_tokens < candidate.most and pays:
                paying.append(candidate)
                candidate.expected += gain
        if not has_others:
            allowed_s = _MAX_DELAY * step_s * min(candidate.expected for candidate in candidates)
        for candidate in paying:
            seconds += candidate.row_s
            if not num_free or seconds > allowed_s:
                return
            num_free -= 1
            candidate.num_tokens += 1
        growing = paying
