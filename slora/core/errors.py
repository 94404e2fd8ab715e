"""The errors that callers of the engine see. The whole tree, including `slora_adapters`:

SloraError                    (slora_adapters) root of all errors that this project raises for its users
├── AdapterError              (slora_adapters) an adapter, a store or the registry failed
├── ConfigError               the model directory or a setting cannot be served; the engine does not start
├── RequestRefused            the request is invalid; names the field; nothing was computed
│   └── ContextTooLong        prompt plus answer exceed what the model or the pool can hold
├── AdapterFetchFailed        the adapter could not be fetched to the host; the request ends
├── RequestFailed             computing this request fails, for example with NaN logits; other requests continue
├── StepFailed                a step that held the request failed for another reason; retry the request
├── DeadlineMissed            the first token can't come before the request's deadline
├── DeviceFailed              the device no longer computes; the engine ends
├── EngineUnavailable         the engine is down, starting or full; retry the request
├── UsageJournalFull          the usage of a request could not be recorded, so no request is accepted; retry later
└── NotComparable             transformers or peft can't load what this engine serves
"""

from collections.abc import Mapping
from typing import Any

from slora_adapters.errors import SloraError as SloraError


class ConfigError(SloraError):
    """A model directory or a setting that this engine cannot serve."""


class RequestRefused(SloraError):
    """The request can never be served as it is. `param` names the invalid field."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class ContextTooLong(RequestRefused):
    """Prompt plus answer exceed the model's context or the whole pool."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message, param, "context_length_exceeded")

    @staticmethod
    def of(num_tokens: int, problem: str, param: str, setting: str = "max_model_len") -> "ContextTooLong":
        """Returns the error with the limit. problem: what is too long, and the remedy."""
        return ContextTooLong(f"{describe_context(num_tokens, setting)} {problem}", param)


def describe_context(num_tokens: int, setting: str = "max_model_len") -> str:
    """Returns the limit in OpenAI's words. Clients look for these words, and then ask a model with a longer context."""
    return f"This model's maximum context length is {num_tokens} tokens ({setting})."


class AdapterFetchFailed(SloraError):
    """The adapter could not be fetched to the host. code: not_found, unavailable or corrupt."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


class RequestFailed(SloraError):
    """Computing this request fails even when it is alone. A retry would fail again; other requests continue."""


class StepFailed(SloraError):
    """The engine failed on steps that held this request, but the request was not the cause. It can be retried."""


class DeadlineMissed(SloraError):
    """The first token can't come before the request's deadline. The request can be retried later."""


class DeviceFailed(SloraError):
    """The device no longer computes, for example after a sticky CUDA error or the loss of a rank.

    The process must be restarted.
    """


class EngineUnavailable(SloraError):
    """The engine is down, starting or shutting down. The request can be retried."""


class UsageJournalFull(SloraError):
    """The usage of a request cannot be recorded. `reason` names no path, because clients see the message."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"the server accepts no request now, because it cannot record usage: its usage journal is full "
            f"({reason}); send the request again later"
        )


class NotComparable(SloraError):
    """transformers or peft, the reference of `slora adapter verify`, can't load a model or adapter that this engine
    serves.
    """


# The errors of a single request, which the engine reports to the API.
_OF_REQUESTS: dict[str, type[SloraError]] = {
    kind.__name__: kind
    for kind in (
        AdapterFetchFailed,
        ContextTooLong,
        DeadlineMissed,
        RequestFailed,
        RequestRefused,
        StepFailed,
    )
}


def restore_error(name: str, text: str, attributes: Mapping[str, Any]) -> Exception:
    """Returns an error as the engine has raised it. The arguments are the form of an error in a frame."""
    kind = _OF_REQUESTS.get(name, RequestFailed)
    error = kind.__new__(kind, text)
    vars(error).update(attributes)
    return error
