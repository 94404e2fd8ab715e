"""One choice of a request inside the engine: its tokens, how far they are computed, and what it holds.

A request of several choices is one sequence until its prompt is computed; then it forks. So does one of beams, which
fork again and again: each is one of the beams of the `search` that they share, under its own number.

Invariants:
    tokens    [0, num_prompt) came with the request; [num_prompt, len) were generated
    computed  [0, num_computed) have their KV in `blocks`; num_computed < len(token_ids) until it finishes, save for a
              beam that has proposed what comes next: it runs, and waits for the others
    a running sequence with an adapter holds one use of `resident`; a waiting one holds nothing of the pool
    a running sequence has `row` of the sampling table to itself
    named     blocks [0, num_named) of its KV were offered to the prefix cache, under `block_keys`
    charged   prompt tokens [0, num_charged) were charged to its tenant, or found computed
    swapped   a waiting sequence may have its KV in pages of the host, instead of computing it again
    scored    tokens [0, num_scored) of the prompt, where prompt_logprobs were asked for; `scores`: what is not told yet
"""

import itertools
from typing import NamedTuple

from slora.pool.block_table import BlockTable
from slora.pool.residency import Resident
from slora.pool.tenant import Tenant
from slora.request import EngineRequest, TokenLogprobs
from slora.sampling_params import choice_seed
from slora.scheduler.beam_search import BeamSearch

_arrivals = itertools.count()
# Who gave way so often without a token of its own in between goes first.
_MOST_SETBACKS = 3


class SwappedBlocks(NamedTuple):
    """The KV of tokens [0, num_computed) on the host: pages of the blocks from num_freed on, in order."""

    host_pages: list[int]
    num_freed: int
    num_computed: int


class Sequence:
    """`max_tokens` is the request's, or what context and pool leave where it named none.

    index: which choice of the request it is, or which beam. num_choices: how many it becomes when its prompt is
    computed; 1 after that, and for those that came out of it. chunk_limit: the most tokens that may be computed of it
    at a time, for its pages to fit the pool. is_long: its KV is rotated with the long factors of a model that has two
    sets (longrope). num_cached: tokens of the prompt that were found computed when it first started. furthest: its
    tokens when it gave way last; num_setbacks: how often it did with no more of them than before. num_broken_steps:
    steps that could not bring its adapter or its KV to the pool.
    """

    __slots__ = (
        "arrival",
        "block_keys",
        "blocks",
        "chunk_limit",
        "done",
        "furthest",
        "index",
        "is_long",
        "is_running",
        "max_tokens",
        "num_broken_steps",
        "num_cached",
        "num_charged",
        "num_choices",
        "num_computed",
        "num_named",
        "num_preemptions",
        "num_prompt",
        "num_scored",
        "num_setbacks",
        "request",
        "resident",
        "row",
        "scores",
        "search",
        "seed",
        "stop_ids",
        "swapped",
        "tenant",
        "token_ids",
    )

    def __init__(
        self,
        request: EngineRequest,
        tenant: Tenant,
        max_tokens: int,
        stop_ids: frozenset[int],
        seed: int,
        block_tokens: int,
    ) -> None:
        self.arrival = next(_arrivals)
        self.index = 0
        self.num_choices = request.sampling.width
        self.request = request
        self.tenant = tenant
        self.max_tokens = max_tokens
        self.stop_ids = stop_ids
        self.seed = seed
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt = len(self.token_ids)
        self.num_computed = 0
        self.num_cached = 0
        self.num_charged = 0
        self.num_preemptions = self.num_setbacks = self.furthest = 0
        self.num_broken_steps = 0
        self.blocks = BlockTable(block_tokens)
        self.block_keys: list[bytes] = []
        self.num_named = 0
        self.swapped: SwappedBlocks | None = None
        self.resident: Resident | None = None
        self.search = BeamSearch(request.sampling, stop_ids) if request.sampling.use_beam_search else None
        self.row = 0
        self.is_running = False
        self.chunk_limit = len(self.token_ids)
        self.is_long = False
        wanted = request.sampling.prompt_logprobs is not None
        # Nothing comes before the first token that could tell how likely it is.
        self.scores: list[TokenLogprobs | None] = [None] if wanted else []
        self.num_scored = 1 if wanted else self.num_prompt
        self.done = False

    def __lt__(self, other: "Sequence") -> bool:
        return (self.arrival, self.index) < (other.arrival, other.index)

    def fork(self, index: int) -> "Sequence":
        """Choice or beam `index` of the same request, in the same place of the queue; it holds nothing yet."""
        block_tokens = self.blocks.block_tokens
        seed = choice_seed(self.seed, index)
        choice = Sequence(self.request, self.tenant, self.max_tokens, self.stop_ids, seed, block_tokens)
        choice.arrival, choice.index, choice.num_choices = self.arrival, index, 1
        choice.token_ids, choice.search = self.token_ids.copy(), self.search
        choice.num_charged, choice.num_cached = self.num_prompt, self.num_cached
        choice.chunk_limit, choice.is_long = self.chunk_limit, self.is_long
        choice.scores, choice.num_scored = [], self.num_prompt
        return choice

    @property
    def is_overdue(self) -> bool:
        """Whether it gave way so often without a token in between that it might do so for good: two sequences can each
        be started at the other's cost. From then on it starts with all pages that it needs up to its next token, and
        gives way last; among its like who came first does not give way at all. So somebody comes to a token."""
        return self.num_setbacks >= _MOST_SETBACKS

    def note_preemption(self) -> None:
        self.num_preemptions += 1
        self.num_setbacks = self.num_setbacks + 1 if len(self.token_ids) == self.furthest else 1
        self.furthest = len(self.token_ids)

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def has_proposed(self) -> bool:
        """Whether it is a beam that waits for the others."""
        return self.search is not None and self.search.has_proposed(self.index)

    @property
    def num_tokens_at_most(self) -> int:
        """Tokens whose KV it can ever hold: the last generated token is never computed."""
        return self.num_prompt + self.max_tokens - 1
