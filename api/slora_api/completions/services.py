"""What the routes that compute answers use, and the objects behind it."""

from dataclasses import dataclass, field

from slora.client.client import EngineClient
from slora.core.engine_state import EngineInfo
from slora.text.tokenizer import Tokenizer
from slora_api.adapters.model_catalog import ModelCatalog
from slora_api.completions.prompt_encoder import PromptEncoder
from slora_api.core.errors import Starting
from slora_api.core.fair_slots import FairSlots
from slora_api.core.foundation import Foundation
from slora_api.core.settings import Settings
from slora_api.http.permit_pool import RequestLimiter
from slora_api.http.request_bounds import RequestBounds
from slora_api.metrics.metrics import Metrics
from slora_api.quotas.quota_meter import QuotaMeter
from slora_api.sandbox.chat_templates import ChatTemplates
from slora_api.sandbox.grammar_checks import GrammarChecks
from slora_api.usage.usage_recorder import UsageRecorder


@dataclass(slots=True)
class Obstacles:
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
    obstacles: Obstacles = field(default_factory=Obstacles)

    def engine_info(self) -> EngineInfo:
        """Returns the limits of the engine. Raises Starting while the engine is not connected or a child process is
        stalled.
        """
        if not self.client.ready:
            raise Starting(
                "No engine is ready: it is starting, or is being started again. Try again shortly."
            )
        if self.obstacles.stall is not None:
            raise Starting(f"The server cannot answer now: {self.obstacles.stall}. Try again shortly.")
        return self.client.info

    def find_max_model_len(self) -> int | None:
        """Returns the context of the model; None while no engine is connected."""
        return self.client.info.max_model_len if self.client.ready else None

    def missing(self) -> str | None:
        """The reason why this server cannot answer now; None if it can."""
        if self.limiter.stopping:
            return "the server is shutting down"
        return self.obstacles.missing if self.client.ready else "the engine or its loader is not connected"


@dataclass(frozen=True, slots=True)
class AnswerServices:
    settings: Settings
    catalog: ModelCatalog
    cpu_slots: FairSlots
    templates: ChatTemplates
    grammars: GrammarChecks
    generator: Generator
    encoder: PromptEncoder
    quotas: QuotaMeter

    def bounds(self, info: EngineInfo, encoder: PromptEncoder | None = None) -> RequestBounds:
        """Returns the bounds of a request. encoder: that of an adapter with added tokens."""
        longest = (encoder or self.encoder).tokenizer.longest_token_chars
        return RequestBounds.of(self.settings, info, longest)


def open_templates(foundation: Foundation, tokenizer: Tokenizer, slots: FairSlots) -> ChatTemplates:
    """slots: see `cpu_slots`."""
    templates = ChatTemplates(tokenizer, slots, num_processes=foundation.settings.api_workers)
    foundation.stack.push_async_callback(templates.close)
    return templates


def build_answers(
    foundation: Foundation,
    catalog: ModelCatalog,
    slots: FairSlots,
    templates: ChatTemplates,
    generator: Generator,
    quotas: QuotaMeter,
) -> AnswerServices:
    settings = foundation.settings
    grammars = GrammarChecks(slots, num_processes=settings.api_workers)
    foundation.stack.push_async_callback(grammars.close)
    encoder = PromptEncoder(generator.tokenizer, slots)
    return AnswerServices(settings, catalog, slots, templates, grammars, generator, encoder, quotas)
