"""What crosses from a caller to the engine and back. Plain values: no tensor, no socket."""

from dataclasses import dataclass
from enum import StrEnum

from slora.sampling_params import SamplingParams
from slora_adapters.version import AdapterVersion


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt to continue. `tenant` is who is charged; `adapter` None means the bare base model."""

    request_id: str
    tenant: str
    prompt_token_ids: list[int]
    adapter: AdapterVersion | None
    sampling: SamplingParams


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
    """The next tokens of choice `index` of a request. A stop token is included, then finish_reason is STOP."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    index: int = 0


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step did for one choice of a request: a delta, or the error that ended all of the request."""

    request_id: str
    delta: TokenDelta | None = None
    error: Exception | None = None
