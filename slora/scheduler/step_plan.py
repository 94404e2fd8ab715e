"""What the scheduler decided for one step, and what came of it. No tensors: the runner turns a plan into a batch."""

from dataclasses import dataclass, field
from typing import NamedTuple

from slora.cost_model import StepWork
from slora.pool.residency import Resident
from slora.request import StepOutput, TokenLogprobs
from slora.scheduler.beam_search import Proposal
from slora.scheduler.sequence import Sequence
from slora_adapters.peft.packing import PackedAdapter


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """Copy a slice of `packed` into the resident's pages [first_page, first_page + num_pages), before the step runs;
    with the last one, write its slot's tables."""

    resident: Resident
    packed: PackedAdapter
    first_page: int
    num_pages: int

    @property
    def is_last(self) -> bool:
        return self.first_page + self.num_pages == len(self.resident.pages)


class Chunk(NamedTuple):
    """Tokens `[start, start + num_tokens)` of a sequence are computed in this step.

    samples: the chunk reaches the sequence's last token, so a new one is drawn.
    forks: further choices of the request, which begin here: each draws a token of its own from the same row.
    slot, generation: where its adapter was when the plan was made; None for the bare base.

    A tuple, because a step makes hundreds of them and a frozen dataclass takes three times as long to fill.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool
    slot: int | None
    generation: int | None
    forks: tuple[Sequence, ...] = ()

    @property
    def draws(self) -> tuple[Sequence, ...]:
        """Whom a token is drawn for, in order."""
        return (self.sequence, *self.forks) if self.samples else ()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Chunks are ordered by slot and weight, so that tokens with the same adapter and weight lie side by side.

    swaps_out: (page, page of the host), before anything is written: the pages are somebody else's in this step.
    copies: (source page, target page), before anything but these is written: a source may be somebody else's, too.
    swaps_in: (page of the host, page).
    started: sequences that were given a row of the sampling table in this step.
    """

    chunks: list[Chunk] = field(default_factory=list)
    loads: list[AdapterLoad] = field(default_factory=list)
    swaps_out: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    swaps_in: list[tuple[int, int]] = field(default_factory=list)
    started: list[Sequence] = field(default_factory=list)
    # Requests that ended before they could run (their adapter could not be fetched, say).
    ended: list[StepOutput] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    def measure_work(self, full_page_bytes: int) -> StepWork:
        """As the cost model counts it. A row decodes if it computes one token behind its prompt."""
        prefill_tokens = decode_rows = context_tokens = 0
        for chunk in self.chunks:
            if chunk.num_tokens == 1 and chunk.start >= chunk.sequence.num_prompt:
                decode_rows += 1
                context_tokens += chunk.start + 1
            else:
                prefill_tokens += chunk.num_tokens
        return StepWork(
            prefill_tokens,
            decode_rows,
            context_tokens,
            swapped_pages=len(self.swaps_out) + len(self.swaps_in),
            loaded_bytes=sum(load.num_pages for load in self.loads) * full_page_bytes,
        )

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        """The next `num_tokens` of it are computed."""
        resident, start = sequence.resident, sequence.num_computed
        samples = start + num_tokens == len(sequence.token_ids)
        forks: tuple[Sequence, ...] = ()
        if samples and sequence.num_choices > 1 and sequence.search is None:
            forks = tuple(sequence.fork(index) for index in range(1, sequence.num_choices))
        slot, generation = (None, None) if resident is None else (resident.slot, resident.generation)
        self.chunks.append(Chunk(sequence, start, num_tokens, samples, slot, generation, forks))

    def withdraw(self, sequence: Sequence) -> bool:
        """It gives way after it was planned. Returns whether its pages hold all that it has computed: those that this
        step was to fill do not, and never will."""
        self.chunks[:] = [chunk for chunk in self.chunks if chunk.sequence is not sequence]
        self.started[:] = [one for one in self.started if one is not sequence]
        own, count = set(sequence.blocks.held), len(self.copies) + len(self.swaps_in)
        for pairs in (self.copies, self.swaps_in):
            pairs[:] = [pair for pair in pairs if pair[1] not in own]
        return len(self.copies) + len(self.swaps_in) == count


class Sampled(NamedTuple):
    """The token drawn for one of a chunk's `draws`; None where the logits were not finite. proposal: a beam's."""

    token_id: int | None
    logprobs: TokenLogprobs | None = None
    proposal: Proposal | None = None
