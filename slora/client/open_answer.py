"""What the API process knows of a request in progress: everything that it needs to continue it on another engine.

sent ---- the engine reports the usage ----> settled
  |  ^
  |  +--------- sent again ----------+
  +---- engine lost, or it drains ---+---- given up ----> settled (the usage is unknown)
"""

import time
from dataclasses import dataclass, field, replace

from slora.core.request import EmittedTokens, EngineRequest, TokenDelta

__all__ = ["OpenAnswer"]

# The engine refuses deadlines that are not above 0. This deadline has passed when the engine looks at it.
_PASSED_S = 1e-6


@dataclass(slots=True, eq=False)
class OpenAnswer:
    """A request and the tokens of its answer that have arrived.

    owner: the name of the engine that has it and will report its usage; None if no engine has it.
    is_settled: whether the usage has been reported.
    is_closed: whether no more tokens are wanted.
    refusal: why it must not be sent again.
    num_runs: how often it was sent.
    has_begun: whether the owner has begun to compute it. Before, the request waits in the owner's queue.
    num_losses: number of engines that died after they had begun to compute it, since the last new token.
    choices: the tokens of each choice; None for a choice that has ended.
    num_scored: prompt log-probabilities that have arrived. num_to_skip: those that a new run will repeat.
    """

    request: EngineRequest
    owner: str | None = None
    is_settled: bool = False
    is_closed: bool = False
    refusal: Exception | None = None
    num_runs: int = 0
    has_begun: bool = False
    num_losses: int = 0
    choices: list[list[int] | None] = field(default_factory=list)
    num_tokens: int = 0
    num_cached: int = 0
    num_scored: int = 0
    num_to_skip: int = 0
    arrived_at: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.choices = [[] for _ in range(self.request.sampling.num_choices)]

    @property
    def is_complete(self) -> bool:
        return all(tokens is None for tokens in self.choices)

    def begin_run(self, owner: str) -> EngineRequest:
        """Returns the request that computes the rest of the answer. owner: the engine to which it is sent.

        Without tokens, the request is repeated as a whole. So are beam searches and embeddings. `take` then drops what
        has arrived before.
        """
        request, sampling = self.request, self.request.sampling
        self.owner, self.has_begun = owner, False
        self.num_runs += 1
        if self.num_runs == 1:
            return request
        self.num_to_skip = self.num_scored
        if self.num_tokens == 0 or sampling.use_beam_search or request.pooling is not None:
            if request.deadline_s is None:
                return request
            left_s = request.deadline_s - (time.monotonic() - self.arrived_at)
            return replace(request, deadline_s=max(_PASSED_S, left_s))
        choices = tuple(None if tokens is None else tuple(tokens) for tokens in self.choices)
        emitted = EmittedTokens(choices, self.num_tokens, self.num_cached)
        return replace(request, emitted=emitted, deadline_s=None)

    def take(self, deltas: list[TokenDelta]) -> list[TokenDelta]:
        """Adds the deltas to the answer. Returns those that have not arrived before."""
        if self.num_runs > 1:
            deltas = [kept for delta in deltas if (kept := self._drop_repeated(delta)) is not None]
        for delta in deltas:
            self.num_scored += len(delta.prompt_logprobs)
            self.num_cached = self.num_cached or delta.num_cached
            tokens = self.choices[delta.index]
            if tokens is not None:
                tokens.extend(delta.token_ids)
                self.num_tokens += len(delta.token_ids)
                self.num_losses = 0
                if delta.finish_reason is not None:
                    self.choices[delta.index] = None
        return deltas

    def end_choice(self, index: int) -> None:
        if index < len(self.choices):
            self.choices[index] = None

    def _drop_repeated(self, delta: TokenDelta) -> TokenDelta | None:
        if self.choices[delta.index] is None:
            return None
        if delta.prompt_logprobs and self.num_to_skip:
            skipped = min(self.num_to_skip, len(delta.prompt_logprobs))
            self.num_to_skip -= skipped
            delta = replace(delta, prompt_logprobs=delta.prompt_logprobs[skipped:])
            if not (delta.prompt_logprobs or delta.token_ids):
                return None
        return delta
