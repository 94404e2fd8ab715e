"""The plan of one step, and the tokens that the step sampled.

The plan has no tensors: the runner turns it into a batch.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from slora.core.cost_model import StepWork, count_pairs
from slora.core.request import StepOutput, TokenLogprobs
from slora.memory.residency import AdapterLoad
from slora.scheduler.beam_search import Proposal
from slora.scheduler.sequence import AdapterSlot, Sequence


class Chunk(NamedTuple):
    """Tokens `[start, start + num_tokens)` of a sequence, computed in this step.

    A chunk of one token may be planned before the token's id is known (`Sequence.num_pending`).

    A NamedTuple, because a step creates hundreds of chunks, and creating a frozen dataclass takes three times as long.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    # Whether the chunk reaches the last token of a sequence that is continued, so that a new token is sampled.
    samples: bool
    slots: tuple[AdapterSlot, ...]  # Where the adapters are at planning time; empty for the base model.
    # Further choices of the request that start here; each samples its own token from the same row of logits.
    forks: tuple[Sequence, ...] = ()
    # Guesses of the tokens after the sequence's last token. They are the last tokens of the chunk, and a token is
    # sampled after the sequence's last token and after each draft. A chunk with drafts has no forks.
    drafts: tuple[int, ...] = ()

    @staticmethod
    def decode_rows(sequences: list[Sequence]) -> "list[Chunk]":
        """The chunks that compute the next token of each sequence."""
        # A third of the time of calling Chunk.
        new = tuple.__new__
        return [new(Chunk, (each, each.num_computed, 1, True, each.slots, (), ())) for each in sequences]

    @property
    def is_decode_row(self) -> bool:
        """Whether the chunk, without drafts, computes only the last token of an answer."""
        return self.num_tokens == 1 and self.start >= self.sequence.num_prompt

    @property
    def completes_embedding(self) -> bool:
        """Whether the chunk reaches the last token of a prompt to embed."""
        return self.sequence.pooled is not None and self.start + self.num_tokens == self.sequence.num_prompt

    @property
    def sampled_sequences(self) -> tuple[Sequence, ...]:
        """The sequences that a token is sampled for, in order. With drafts, the sequence is repeated for each token."""
        if not self.samples:
            return ()
        if self.drafts:
            return (self.sequence,) * self.num_tokens
        return (self.sequence, *self.forks) if self.forks else (self.sequence,)

    @property
    def token_ids(self) -> list[int]:
        known = self.sequence.token_ids[self.start : self.start + self.num_tokens - len(self.drafts)]
        return [*known, *self.drafts] if self.drafts else known

    def split(self) -> "list[Chunk]":
        """Splits a chunk with drafts into chunks of one token: the sequence's last token, and then each draft."""
        rows = [self._replace(num_tokens=1, drafts=())]
        for number, token_id in enumerate(self.drafts, start=1):
            rows.append(self._replace(start=self.start + number, num_tokens=1, drafts=(token_id,)))
        return rows


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The work of one step: the chunks that it computes and the bytes that it copies."""

    # Sorted by slots and weights, so that tokens with the same adapters and weights are contiguous.
    chunks: list[Chunk] = field(default_factory=list)
    loads: list[AdapterLoad] = field(default_factory=list)  # Adapter slices to copy from the host.
    # (page, host page). These copies run first, because this step may write new content to the pages.
    swaps_out: list[tuple[int, int]] = field(default_factory=list)
    # (source page, target page). These copies run second, because this step may write new content to the sources.
    copies: list[tuple[int, int]] = field(default_factory=list)
    swaps_in: list[tuple[int, int]] = field(default_factory=list)  # (host page, page).
    # Sequences that were given a row of the sampling table in this step.
    rows_to_write: list[Sequence] = field(default_factory=list)
    # Outputs of requests that ended before they could run, for example because their adapter could not be fetched.
    ended: list[StepOutput] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum([chunk.num_tokens for chunk in self.chunks])

    def measure_work(self, full_page_bytes: int) -> StepWork:
        """Returns the step's work, as the cost model counts it. A chunk of one token after the prompt is a decode row,
        and so is each token of a chunk with drafts.
        """
        prefill_tokens = decode_rows = context_tokens = prefill_context = 0
        for sequence, start, num_tokens, _, _, _, drafts in self.chunks:
            if drafts:
                decode_rows += num_tokens
                context_tokens += num_tokens * (start + 1) + sum(range(num_tokens))
            elif num_tokens == 1 and start >= sequence.num_prompt:
                decode_rows += 1
                context_tokens += start + 1
            else:
                prefill_tokens += num_tokens
                prefill_context += count_pairs(num_tokens, start)
        return StepWork(
            prefill_tokens,
            decode_rows,
            context_tokens,
            swapped_pages=len(self.swaps_out) + len(self.swaps_in),
            loaded_bytes=sum(load.num_pages for load in self.loads) * full_page_bytes,
            prefill_context=prefill_context,
        )

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        """Plans the next `num_tokens` tokens of the sequence. Forks are added when the plan is complete."""
        start = sequence.num_computed
        samples = num_tokens == sequence.num_uncomputed and sequence.pooled is None
        self.chunks.append(Chunk(sequence, start, num_tokens, samples, sequence.slots))

    def drop_finished(self) -> None:
        """Removes the sequences that have ended since the plan was made."""
        self.chunks[:] = [chunk for chunk in self.chunks if not chunk.sequence.is_finished]
        self.rows_to_write[:] = [sequence for sequence in self.rows_to_write if not sequence.is_finished]

    def remove(self, sequence: Sequence) -> bool:
        """Removes a preempted sequence from the plan.

        Returns whether the sequence's pages hold all KV that it has computed. The pages lack some of this KV if the
        plan was to copy or swap content into one of them.
        """
        self.chunks[:] = [chunk for chunk in self.chunks if chunk.sequence is not sequence]
        self.rows_to_write[:] = [other for other in self.rows_to_write if other is not sequence]
        own, count = set(sequence.blocks.held_pages), len(self.copies) + len(self.swaps_in)
        for pairs in (self.copies, self.swaps_in):
            pairs[:] = [pair for pair in pairs if pair[1] not in own]
        return len(self.copies) + len(self.swaps_in) == count


class SampledToken(NamedTuple):
    """The token sampled for one entry of a chunk's `sampled_sequences`."""

    token_id: int | None  # None if the logits were not finite.
    logprobs: TokenLogprobs | None = None
    proposal: Proposal | None = None  # The continuations that a beam proposes; None for other sequences.
    # The step's time for masks ran out before this sequence, so there is no token. The next step computes the
    # sequence's last token again.
    is_deferred: bool = False
