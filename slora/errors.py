"""The errors that callers of the engine see. The whole tree, with the layers below:

SloraError                    (slora_adapters) root of everything that this project raises for its users
├── AdapterError              (slora_adapters) an adapter, a store or the registry
├── ConfigError               the model directory or a setting cannot be served; the engine does not start
├── RequestRefused            the request is at fault: names the field; nothing was computed
│   └── ContextTooLong        prompt plus answer exceed what the model or the pool can hold
├── AdapterFetchFailed        the adapter could not be brought to the host; the request is over
├── RequestFailed             this request breaks the computing (its logits are not finite, say); others go on
├── StepFailed                the engine broke on a step that held the request, which is not at fault; try again
├── DeadlineMissed            its first token can't come in the time that it allowed; nothing was computed
├── DeviceFailed              the device computes nothing any more; the engine ends
├── EngineUnavailable         the engine is gone, starting, or full; try again
└── NotComparable             transformers or peft can't load what this engine serves
"""

from slora_adapters.errors import SloraError

__all__ = [
    "AdapterFetchFailed",
    "ConfigError",
    "ContextTooLong",
    "DeadlineMissed",
    "DeviceFailed",
    "EngineUnavailable",
    "NotComparable",
    "RequestFailed",
    "RequestRefused",
    "SloraError",
    "StepFailed",
]


class ConfigError(SloraError):
    """A model directory or a setting that this engine cannot serve."""


class RequestRefused(SloraError):
    """The request asks for something that can never be done; `param` names the field."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class ContextTooLong(RequestRefused):
    """Prompt plus answer exceed the context or the whole pool."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message, param, "context_length_exceeded")


class AdapterFetchFailed(SloraError):
    """The adapter could not be brought to the host. code: not_found, unavailable or corrupt."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


class RequestFailed(SloraError):
    """Computing this request breaks, even alone. The same request would break again; other requests go on."""


class StepFailed(SloraError):
    """The engine broke on steps that held this request, and not because of it. The request may be sent again."""


class DeadlineMissed(SloraError):
    """The first token can't come within the time that the request allowed; the request may be sent again later."""


class DeviceFailed(SloraError):
    """The device computes nothing any more (a sticky CUDA error, a lost rank). Only a new process can help."""


class EngineUnavailable(SloraError):
    """The engine is not there: it died, is starting or is shutting down. The request may be sent again."""


class NotComparable(SloraError):
    """The judge of `slora adapter verify` can't load a model or adapter that this engine serves."""
