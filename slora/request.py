"""What crosses from a caller to the engine and back. Plain values: no tensor, no socket."""

from dataclasses import dataclass
from enum import StrEnum

from slora.errors import RequestRefused
from slora.sampling_params import SamplingParams
from slora_adapters.version import AdapterVersion

# As far as an adapter's own scale may go; beyond it outputs only overflow.
MAX_ADAPTER_WEIGHT = 10_000.0


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt to continue. `tenant` is who is charged; `adapter` None means the bare base model.

    adapter_weight: a factor on the adapter's scale: 0 is the base, 1 the adapter as it was trained. It changes the KV
    of every token, so whatever is kept of a sequence must be kept by adapter and weight.
    Raises RequestRefused for a weight that is no number or too large.
    """

    request_id: str
    tenant: str
    prompt_token_ids: list[int]
    adapter: AdapterVersion | None
    sampling: SamplingParams
    adapter_weight: float = 1.0

    def __post_init__(self) -> None:
        if not abs(self.adapter_weight) <= MAX_ADAPTER_WEIGHT:  # so that NaN is refused, too
            raise RequestRefused(
                f"adapter_weight is {self.adapter_weight}; it must be a number of at most {MAX_ADAPTER_WEIGHT:g}, "
                "positive or negative",
                "adapter_weight",
            )


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """logprob: of the chosen token, from the untouched distribution. top: (token id, logprob), most likely first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """The next tokens of choice `index` of a request. A stop token is included, then finish_reason is STOP.

    prompt_logprobs: of the next tokens of the prompt, the very first one's None, in deltas without tokens; all of them
    come before the answer.
    """

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    index: int = 0
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step did for one choice of a request: a delta, or the error that ended all of the request."""

    request_id: str
    delta: TokenDelta | None = None
    error: Exception | None = None
