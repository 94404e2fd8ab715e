"""What the API process knows of a request in progress: everything that it needs to continue it on another engine."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from slora.core.request import EmittedTokens, EngineRequest, RequestTiming, RequestUsage, TokenDelta

# The engine refuses deadlines that are not above 0. This deadline has passed when the engine looks at it.
_PASSED_S = 1e-6


@dataclass(slots=True, eq=False)
class Settlement:
    """Settles the usage of one request once, whichever engines compute it. It listens to the engines.

    sent ---- the engine reports the usage ----> settled
      |  ^
      |  +--------- sent again ----------+
      +---- engine lost, or it drains ---+---- given up ----> settled (the usage is unknown)
    """

    # Called once, with the usage of the whole answer; None if it is unknown.
    report: Callable[[RequestUsage | None, RequestTiming | None], None]
    # Called once, when the usage is settled and no more tokens are wanted.
    forget: Callable[[], None]
    owner: str | None = None  # The engine that has the request and will report its usage.
    has_begun: bool = False  # Whether the owner computes it. Before, the request waits in the owner's queue.
    num_losses: int = 0  # Engines that died after they had begun to compute it, since the last new token.
    is_closed: bool = False  # Whether no more tokens are wanted.
    is_settled: bool = False

    def begin_run(self, engine: str) -> None:
        self.owner, self.has_begun = engine, False

    def hear_begin(self, engine: str) -> None:
        if engine == self.owner:
            self.has_begun = True

    def hear_usage(
        self,
        engine: str,
        usage: RequestUsage | None,
        timing: RequestTiming | None,
        *,
        is_lost: bool,
        is_complete: bool,
    ) -> bool:
        """Hears the usage of one run. Returns False if the usage of another run is reported instead.

        usage: None if the engine was lost or has released the request. timing: None also if the engine never had the
            request, or refused it.
        is_lost: whether the engine died. is_complete: whether all tokens have arrived.
        """
        if engine != self.owner:
            return False
        self.owner = None
        if self.is_settled:
            return False
        self.num_losses += self.has_begun and is_lost
        if timing is not None:
            self._settle(usage, timing)
        elif self.is_closed or is_complete:
            self._settle(None, None)
        return True

    def close(self) -> None:
        """Called when no more tokens are wanted. An engine that still has the request reports its usage later."""
        self.is_closed = True
        if self.is_settled:
            self.forget()
        elif self.owner is None:
            self._settle(None, None)

    def _settle(self, usage: RequestUsage | None, timing: RequestTiming | None) -> None:
        self.is_settled = True
        if self.is_closed:
            self.forget()
        self.report(usage, timing)


@dataclass(slots=True, eq=False)
class OpenAnswer:
    """A request and the tokens of its answer that have arrived."""

    request: EngineRequest
    settlement: Settlement
    refusal: Exception | None = None  # Why it must not be sent again.
    num_runs: int = 0  # How often it was sent.
    choices: list[list[int] | None] = field(default_factory=list)  # The tokens of each; None after its end.
    num_tokens: int = 0
    num_cached: int = 0
    num_scored: int = 0  # Prompt log-probabilities that have arrived.
    num_to_skip: int = 0  # Those of them that a new run will repeat.
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
        self.settlement.begin_run(owner)
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
                self.settlement.num_losses = 0
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
