"""Computes the answers to prompts: admits the request, sends it to the engine, and records metrics."""

from dataclasses import dataclass, field

from slora.client.client import EngineClient
from slora.core.engine_state import EngineInfo
from slora.text.tokenizer import Tokenizer
from slora_api.core.errors import Starting
from slora_api.metrics.metrics import Metrics
from slora_api.quotas.request_limiter import RequestLimiter
from slora_api.usage.usage_recorder import UsageRecorder


@dataclass(slots=True)
class Readiness:
    """The current reasons why this server cannot answer, by name.

    stalls: child process -> a sentence for the client, for each child that makes no progress. While a child is listed,
    new requests are refused, unless the child is an engine and another engine is not listed.
    engines: the names of the engine processes.
    unfinished: part of the startup -> a sentence, for each part that is not finished, such as the demo's adapters.
    Requests are still accepted.
    """

    stalls: dict[str, str] = field(default_factory=dict)
    unfinished: dict[str, str] = field(default_factory=dict)
    engines: frozenset[str] = frozenset()

    @property
    def stall(self) -> str | None:
        can_compute = bool(self.engines - self.stalls.keys())
        return next(
            (reason for name, reason in self.stalls.items() if not (can_compute and name in self.engines)),
            None,
        )

    @property
    def missing(self) -> str | None:
        return self.stall or next(iter(self.unfinished.values()), None)


@dataclass(frozen=True, slots=True)
class Generator:
    """The engine of this process and what is needed to use it."""

    client: EngineClient
    tokenizer: Tokenizer
    limiter: RequestLimiter
    metrics: Metrics
    usage: UsageRecorder
    readiness: Readiness = field(default_factory=Readiness)

    def engine_info(self) -> EngineInfo:
        """Returns the limits of the engine. Raises Starting while the engine is not connected or a child process is
        stalled.
        """
        if not self.client.ready:
            raise Starting("The engine is starting; try again shortly.")
        if self.readiness.stall is not None:
            raise Starting(f"The server cannot answer now: {self.readiness.stall}. Try again shortly.")
        return self.client.info

    def find_max_model_len(self) -> int | None:
        """Returns the context of the model; None while no engine is connected."""
        return self.client.info.max_model_len if self.client.ready else None

    def missing(self) -> str | None:
        """The reason why this server cannot answer now; None if it can."""
        if self.limiter.stopping:
            return "the server is shutting down"
        return self.readiness.missing if self.client.ready else "the engine or its loader is not connected"
