"""What the scheduler decided for one step, and what came of it. No tensors: the runner turns a plan into a batch."""

from dataclasses import dataclass, field

from slora.request import StepOutput, TokenLogprobs
from slora.residency import Resident
from slora.sequence import Sequence
from slora_adapters.packing import PackedAdapter


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """Copy `packed` into the resident's pages and write its slot's tables, before the step runs."""

    resident: Resident
    packed: PackedAdapter


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `[start, start + num_tokens)` of a sequence are computed in this step.

    samples: the chunk reaches the sequence's last token, so a new one is drawn.
    forks: further choices of the request, which begin here: each draws a token of its own from the same row.
    slot, generation: where its adapter was when the plan was made; None for the bare base.
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

    copies: (source page, target page), before anything else of the step is written: a source may be somebody else's
    page by then.
    started: sequences that were given a row of the sampling table in this step.
    """

    chunks: list[Chunk] = field(default_factory=list)
    loads: list[AdapterLoad] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    started: list[Sequence] = field(default_factory=list)
    # Requests that ended before they could run (their adapter could not be fetched, say).
    ended: list[StepOutput] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token drawn for one of a chunk's `draws`; None where the logits were not finite."""

    token_id: int | None
    logprobs: TokenLogprobs | None = None
