"""A request inside the engine: its tokens, how far they are computed, and what it holds.

Invariants:
    tokens    [0, num_prompt) came with the request; [num_prompt, len) were generated
    computed  [0, num_computed) have their KV in `blocks`; num_computed < len(token_ids) until it finishes
    a running sequence with an adapter holds one use of `resident`; a waiting one holds nothing
"""

import itertools

from slora.block_table import BlockTable
from slora.request import EngineRequest
from slora.residency import Resident

_arrivals = itertools.count()


class Sequence:
    """`max_tokens` is the request's, or what context and pool leave where it named none."""

    __slots__ = (
        "arrival",
        "blocks",
        "done",
        "max_tokens",
        "num_computed",
        "num_prompt",
        "request",
        "resident",
        "seed",
        "stop_ids",
        "token_ids",
    )

    def __init__(
        self, request: EngineRequest, max_tokens: int, stop_ids: frozenset[int], seed: int, block_tokens: int
    ) -> None:
        self.arrival = next(_arrivals)
        self.request = request
        self.max_tokens = max_tokens
        self.stop_ids = stop_ids
        self.seed = seed
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt = len(self.token_ids)
        self.num_computed = 0
        self.blocks = BlockTable(block_tokens)
        self.resident: Resident | None = None
        self.done = False

    def __lt__(self, other: "Sequence") -> bool:
        return self.arrival < other.arrival

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_tokens_at_most(self) -> int:
        """Tokens whose KV it can ever hold: the last generated token is never computed."""
        return self.num_prompt + self.max_tokens - 1
