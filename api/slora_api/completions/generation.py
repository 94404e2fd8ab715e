"""What all requests for answers and embeddings share: the engine, its limits, and the accounts of its use."""

from dataclasses import dataclass, field

from slora.client.client import EngineClient
from slora.core.engine_state import EngineInfo
from slora.text.tokenizer import Tokenizer
from slora_api.completions.readiness import Readiness
from slora_api.core.errors import Starting
from slora_api.metrics.metrics import Metrics
from slora_api.quotas.request_limiter import RequestLimiter
from slora_api.usage.usage_recorder import UsageRecorder


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
