"""What the routes that compute answers use."""

from dataclasses import dataclass

from slora.text.tokenizer import Tokenizer
from slora_api.adapters.model_catalog import ModelCatalog
from slora_api.completions.generation import Generator
from slora_api.completions.prompt_encoder import PromptEncoder
from slora_api.core.fair_slots import FairSlots
from slora_api.core.foundation import Foundation
from slora_api.core.settings import Settings
from slora_api.http.request_bounds import RequestBounds
from slora_api.quotas.quota_meter import QuotaMeter
from slora_api.sandbox.chat_templates import ChatTemplates
from slora_api.sandbox.grammar_checks import GrammarChecks


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

    def bounds(self) -> RequestBounds:
        """Returns the bounds of a request. Raises Starting while there is no engine."""
        longest = self.encoder.tokenizer.longest_token_chars
        return RequestBounds.of(self.settings, self.generator.engine_info(), longest)


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
