"""The values that callers and the engine exchange. Plain values without tensors or sockets."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from slora.core.errors import ConfigError, RequestRefused, restore_error
from slora.core.sampling_params import SamplingParams
from slora_adapters.version import AdapterVersion


@dataclass(frozen=True, slots=True)
class TenantShare:
    """The service, pages and priority that one tenant is entitled to.

    Worked example: min_share 0.1 in a pool of 500 pages is a floor of 50. When the tenant owns 80 pages, other tenants
    may evict up to 30 of its cached pages.
    """

    # Service relative to other tenants; a tenant of weight 2 gets twice as many tokens as one of weight 1.
    weight: float = 1.0
    # Fraction of the pool's pages that other tenants cannot evict once this tenant owns them (its floor).
    min_share: float = 0.0
    # Largest fraction of the pool's pages that the tenant may own, cached pages included (its ceiling).
    max_share: float = 1.0
    priority: int = 0  # Its priority class; classes with lower numbers are served first.

    def __post_init__(self) -> None:
        """Checks the fields. Raises ConfigError with the field, its value and the limit."""
        if not 0 < self.weight < math.inf:
            raise ConfigError(f"a tenant's weight is {self.weight!r}; it must be above 0 and finite")
        for name, share in (("min_share", self.min_share), ("max_share", self.max_share)):
            if not 0 <= share <= 1:
                raise ConfigError(
                    f"a tenant's {name} is {share!r}; it must be from 0 to 1, a fraction of the pool"
                )
        if self.min_share > self.max_share:
            raise ConfigError(
                f"a tenant's min_share is {self.min_share!r}, more than its max_share "
                f"{self.max_share!r}; lower min_share or raise max_share"
            )


DEFAULT_SHARE = TenantShare()


class PoolingKind(StrEnum):
    """Which hidden states of the last layer, after its norm, make the embedding.

    LAST: the state of the last token, which attends to all other tokens. MEAN: the mean over all tokens of the prompt.
    CLASSIFY: the logits that the adapter's head for classification gives for the state of the last token. There is one
        for each label, and nothing is normalized.
    """

    LAST = "last"
    MEAN = "mean"
    CLASSIFY = "classify"


@dataclass(frozen=True, slots=True)
class Pooling:
    """How the hidden states of a prompt become its embedding. Options that vLLM also has work as in vLLM. Raises
    RequestRefused, which names the field, for a value out of range.

    `slora.core.request_check` checks what depends on the model.
    """

    kind: PoolingKind = PoolingKind.LAST
    dimensions: int | None = None  # Number of components to keep. None keeps all `hidden_size` components.
    # Whether the shortened vector is divided by its L2 norm. A vector of zeros stays as it is.
    normalize: bool = True

    def __post_init__(self) -> None:
        if self.kind not in list(PoolingKind):
            raise RequestRefused(
                f"pooling is {self.kind!r:.80}; it must be last, mean or classify", "pooling"
            )
        object.__setattr__(self, "kind", PoolingKind(self.kind))
        if self.dimensions is not None and self.dimensions < 1:
            raise RequestRefused(f"dimensions is {self.dimensions}; it must be at least 1", "dimensions")


# Bounds of the fields of EngineRequest, which `slora.core.request_check` checks.
# Larger adapter weights only make the outputs overflow. An adapter's own scale has the same limit.
MAX_ADAPTER_WEIGHT = 10_000.0
MAX_PRIORITY = 1_000
# The highest possible value of `EngineConfig.max_composed_adapters`.
MAX_COMPOSED_ADAPTERS = 16
MAX_DEADLINE_S = 86_400.0

# The sampling parameters of a request that computes an embedding. It samples no token.
NOT_SAMPLED = SamplingParams(max_tokens=1)


class WeightedAdapter(NamedTuple):
    """One adapter of a request. weight: factor on the adapter's scale; 1 is the adapter as trained."""

    version: AdapterVersion
    weight: float = 1.0


def compose_adapters(adapters: Iterable[WeightedAdapter]) -> tuple[WeightedAdapter, ...]:
    """Returns the canonical form of a combination of adapters: sorted, each version once, no adapter of weight 0.

    If a version occurs several times, its weights are added. Sums of rounded numbers depend on their order, and the
    prefix cache compares whole tuples. So equal combinations must have equal tuples.
    """
    weights: dict[AdapterVersion, float] = {}
    for version, weight in adapters:
        weights[version] = weights.get(version, 0.0) + weight
    kept = [WeightedAdapter(version, weight) for version, weight in weights.items() if weight]
    return tuple(sorted(kept, key=lambda adapter: (adapter.version.digest, adapter.version.tenant)))


def single_adapter(version: AdapterVersion | None, weight: float = 1.0) -> tuple[WeightedAdapter, ...]:
    """The adapters of a request that uses one adapter. None means the base model."""
    return () if version is None else compose_adapters([WeightedAdapter(version, weight)])


class EmittedTokens(NamedTuple):
    """The tokens of a request that another engine has reported before it was lost."""

    # The tokens of each choice; None for a choice that has ended.
    choices: tuple[tuple[int, ...] | None, ...]
    num_tokens: int  # Number of tokens of all choices, including those that have ended.
    num_cached: int = 0  # Prompt tokens that the lost engine found in its prefix cache.


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt to continue, or to embed."""

    request_id: str
    tenant: str  # The tenant that is charged.
    prompt_token_ids: list[int]
    # As `compose_adapters` returns them; empty for the base model. The outputs of several adapters are added one
    # after the other, in this order. Most adapters change the KV of every token, so cached KV is keyed by them and
    # their weights.
    adapters: tuple[WeightedAdapter, ...]
    sampling: SamplingParams
    share: TenantShare = DEFAULT_SHARE  # The tenant's current share, as the operator has set it.
    priority: int = 0  # Order among the tenant's own requests; lower numbers are served first.
    # Maximum seconds from arrival to the first token; None: no deadline. The request ends as soon as it can't meet
    # the deadline. The first token of a beam search comes at the end of the search.
    deadline_s: float | None = None
    # The account that is billed within the tenant. The engine only copies it to usage records. Empty: none is billed.
    account: str = ""
    # The request gets only the tokens of a step that interactive requests leave, and is preempted first.
    is_background: bool = False
    # How the prompt is embedded. `sampling` is then `NOT_SAMPLED`. None: the prompt is continued.
    pooling: Pooling | None = None
    # The tokens after which the answers continue; None: the answers begin. The usage of the request includes these
    # tokens and the whole prompt, as if this engine had computed them. The tenant is not charged for them.
    emitted: EmittedTokens | None = None

    @property
    def open_choices(self) -> set[int]:
        """The indices of the choices that the engine still has to compute."""
        if self.emitted is None:
            return set(range(self.sampling.num_choices))
        return {index for index, tokens in enumerate(self.emitted.choices) if tokens is not None}

    @property
    def versions(self) -> tuple[AdapterVersion, ...]:
        return tuple(version for version, _ in self.adapters)

    @property
    def adapter_digests(self) -> str | None:
        """The digests as usage records have them: joined by `+`; None for the base model."""
        return "+".join(version.digest for version, _ in self.adapters) or None


@dataclass(frozen=True, slots=True)
class RequestUsage:
    """The usage of one request, with all of its choices and beams."""

    # The prompt tokens that were computed or found in the prefix cache. If a request ends before its prompt is
    # computed, this is less than the length of the prompt.
    prompt_tokens: int = 0
    cached_tokens: int = 0  # Prompt tokens found in the prefix cache.
    # Sampled tokens, including those of choices and beams that are not part of the answer.
    generated_tokens: int = 0
    # Bytes of adapter loads that this request caused. A load that the fair scheduler does not charge to the tenant is
    # not counted.
    adapter_bytes: int = 0
    # Number of pages held, integrated over time. A page that several sequences hold is divided among them, and so are
    # the pages of an adapter among the sequences that run on it. It is a multiple of 2**-20, so that sums are exact.
    page_seconds: float = 0.0

    def __add__(self, other: "RequestUsage") -> "RequestUsage":
        return RequestUsage(
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.generated_tokens + other.generated_tokens,
            self.adapter_bytes + other.adapter_bytes,
            self.page_seconds + other.page_seconds,
        )


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """When one request passed the stages of the engine, in seconds of `time.monotonic()`, which on Linux is one clock
    for all processes of a host. A stage that the request did not reach is None.
    """

    arrived_at: float
    # Time that the request waited for its adapters to be on the host, before its first admission.
    fetch_s: float
    # Whether the request waited for an adapter to be fetched to the host or to be loaded into the pool.
    is_cold: bool
    admitted_at: float | None  # When the request joined the batch.
    # Start of the step that computed the request's first tokens, with all of its adapters loaded.
    computed_at: float | None
    # When the first token was sampled. Always None for an embedding and for a beam search.
    first_token_at: float | None
    ended_at: float
    num_preemptions: int = 0  # Number of preemptions of the request's sequences.

    @property
    def queue_s(self) -> float:
        """Time until the request was admitted or ended, less the time spent on fetching its adapters to the host."""
        admitted_at = self.ended_at if self.admitted_at is None else self.admitted_at
        return max(0.0, admitted_at - self.arrived_at - self.fetch_s)

    @property
    def load_s(self) -> float:
        """Time that the request spent in the batch until its adapters were loaded into the pool."""
        if self.admitted_at is None:
            return 0.0
        return (self.ended_at if self.computed_at is None else self.computed_at) - self.admitted_at


class EndedRequest(NamedTuple):
    """The usage and the timing of a request that has ended. timing: None for a request that was refused."""

    request_id: str
    usage: RequestUsage
    timing: RequestTiming | None = None


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probabilities at one position."""

    # Log-probability of the chosen token, from the model's logits before penalties, biases and temperature.
    logprob: float
    # (token id, logprob) of the most probable tokens, best first. With `logprob_token_ids`: of the chosen token, and
    # then of these tokens in the order of the request.
    top: tuple[tuple[int, float], ...]

    @staticmethod
    def list_best(token_id: int, logprob: float, best: Iterable[tuple[int, float]]) -> "TokenLogprobs":
        """Lists the most probable tokens, best first. Among tokens of equal probability, the chosen one comes first.

        best: the (token id, log-probability) of the most probable tokens, in an order that is arbitrary among equals.
        """
        pairs = list(best)
        at = next((place for place, (_, value) in enumerate(pairs) if value == logprob), None)
        if at is None or pairs[at][0] == token_id:
            return TokenLogprobs(logprob, tuple(pairs))
        others = [pair for pair in pairs if pair[0] != token_id]
        return TokenLogprobs(logprob, (*others[:at], (token_id, logprob), *others[at:])[: len(pairs)])


# TokenDelta and StepOutput are not frozen: a step creates hundreds of them, and frozen ones take three times as long.
@dataclass(slots=True)
class TokenDelta:
    """The next tokens of choice `index` of a request. If they include a stop token, finish_reason is STOP."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    index: int = 0
    # Log-probabilities of the next prompt tokens; None for the very first token. They come in deltas without
    # token_ids, all of them before the answer.
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    # Prompt tokens found in the prefix cache; set with the first token of choice 0, or with the embedding.
    num_cached: int = 0
    # The embedding of the prompt as float32 in the byte order of the machine. It comes in a delta of its own without
    # token_ids, whose finish_reason is STOP.
    embedding: bytes | None = None


@dataclass(slots=True)
class StepOutput:
    """The result of one step for one choice of a request: a delta, or the error that ended the whole request."""

    request_id: str
    delta: TokenDelta | None = None
    error: Exception | None = None

    def to_row(self, request_id: str) -> list[Any]:
        """Encodes the output for a frame, in fewer bytes and less time than any dataclass is encoded. A step sends
        hundreds of rows. request_id: the id in the row, as the receiver knows the request.
        """
        delta = self.delta
        if delta is None:
            return [request_id, self.error]
        return [
            request_id,
            None,
            delta.token_ids,
            delta.finish_reason,
            delta.logprobs and [(entry.logprob, entry.top) for entry in delta.logprobs],
            delta.index,
            delta.prompt_logprobs
            and [entry and (entry.logprob, entry.top) for entry in delta.prompt_logprobs],
            delta.num_cached,
            delta.embedding,
        ]

    @staticmethod
    def from_row(row: list[Any]) -> "StepOutput":
        if row[1] is not None:
            return StepOutput(row[0], None, restore_error(*row[1]))
        request_id, _, token_ids, reason, logprobs, index, prompt_logprobs, num_cached, embedding = row
        delta = TokenDelta(
            tuple(token_ids),
            None if reason is None else FinishReason(reason),
            None if logprobs is None else tuple([_read_logprobs(entry) for entry in logprobs]),
            index,
            tuple([entry and _read_logprobs(entry) for entry in prompt_logprobs]) if prompt_logprobs else (),
            num_cached,
            embedding,
        )
        return StepOutput(request_id, delta)


def _read_logprobs(row: list[Any]) -> TokenLogprobs:
    logprob, top = row
    return TokenLogprobs(logprob, tuple([(token, value) for token, value in top]))
