"""What crosses from a caller to the engine and back. Plain values: no tensor, no socket."""

from dataclasses import dataclass
from enum import StrEnum

from slora.errors import RequestRefused
from slora.sampling_params import SamplingParams
from slora.tenant_share import DEFAULT_SHARE, TenantShare
from slora_adapters.version import AdapterVersion

# As far as an adapter's own scale may go; beyond it outputs only overflow.
MAX_ADAPTER_WEIGHT = 10_000.0
MAX_PRIORITY = 1_000
MAX_DEADLINE_S = 86_400.0


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt to continue. `tenant` is who is charged; `adapter` None means the bare base model.

    share: what the operator grants the tenant, as of now. priority: among the tenant's own requests; lower is sooner.
    deadline_s: from arrival to the first token; it ends as soon as that can't be kept. None: it waits.

    adapter_weight: a factor on the adapter's scale: 0 is the base, 1 the adapter as it was trained. It changes the KV
    of every token, so whatever is kept of a sequence must be kept by adapter and weight.
    Raises RequestRefused, naming the field, for a value out of range.
    """

    request_id: str
    tenant: str
    prompt_token_ids: list[int]
    adapter: AdapterVersion | None
    sampling: SamplingParams
    adapter_weight: float = 1.0
    share: TenantShare = DEFAULT_SHARE
    priority: int = 0
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        if not abs(self.adapter_weight) <= MAX_ADAPTER_WEIGHT:  # so that NaN is refused, too
            raise RequestRefused(
                f"adapter_weight is {self.adapter_weight}; it must be a number of at most {MAX_ADAPTER_WEIGHT:g}, "
                "positive or negative",
                "adapter_weight",
            )
        if not _is_priority(self.priority):
            raise RequestRefused(
                f"priority is {self.priority!r}; it must be a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}, "
                "lower for sooner",
                "priority",
            )
        if self.deadline_s is not None and not 0 < self.deadline_s <= MAX_DEADLINE_S:
            raise RequestRefused(
                f"deadline_s is {self.deadline_s}; it must be above 0 and at most {MAX_DEADLINE_S:g} seconds",
                "deadline_s",
            )


def _is_priority(value: object) -> bool:
    """True is an int in Python, but no priority."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MAX_PRIORITY


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """logprob: of the chosen token, from the untouched distribution. top: (token id, logprob), most likely first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


# Not frozen, nor is StepOutput: a step makes hundreds of them, and frozen ones take three times as long to fill.
@dataclass(slots=True)
class TokenDelta:
    """The next tokens of choice `index` of a request. A stop token is included, then finish_reason is STOP.

    prompt_logprobs: of the next tokens of the prompt, the very first one's None, in deltas without tokens; all of them
    come before the answer. num_cached: tokens of the prompt whose KV was found, told with the first token of choice 0.
    """

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    index: int = 0
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    num_cached: int = 0


@dataclass(slots=True)
class StepOutput:
    """What one step did for one choice of a request: a delta, or the error that ended all of the request."""

    request_id: str
    delta: TokenDelta | None = None
    error: Exception | None = None
