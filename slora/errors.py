"""What can go wrong for those who call the engine. The whole tree, with the layers below:

SloraError                    (slora_adapters) root of everything that this project raises for its users
├── AdapterError              (slora_adapters) an adapter, a store or the registry
├── ConfigError               the model directory or a setting cannot be served; the engine does not start
├── RequestRefused            the request is at fault: names the field; nothing was computed
│   └── ContextTooLong        prompt plus answer exceed what the model or the pool can hold
├── AdapterFetchFailed        the adapter could not be brought to the host; the request is over
├── RequestFailed             the engine broke on this request (logits not finite, say); others go on
│   └── DeadlineMissed        its first token can't come in the time that it allowed; nothing was computed
├── EngineUnavailable         the engine is gone, starting, or full; try again
└── NotComparable             transformers or peft can't load what this engine serves
"""

from slora_adapters.errors import SloraError

__all__ = [
    "AdapterFetchFailed",
    "ConfigError",
    "ContextTooLong",
    "DeadlineMissed",
    "EngineUnavailable",
    "NotComparable",
    "RequestFailed",
    "RequestRefused",
    "SloraError",
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
    """The engine broke on this request; it keeps serving others."""


class DeadlineMissed(RequestFailed):
    """The first token can't come within the time that the request allowed for it; it may be sent again later."""


class EngineUnavailable(SloraError):
    """The engine is not there: it died, is starting or is shutting down. The request may be sent again."""


class NotComparable(SloraError):
    """The judge of `slora adapter verify` can't load a model or adapter that this engine serves."""
