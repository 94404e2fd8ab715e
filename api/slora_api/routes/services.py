"""What routes work with, made once by the composition root, and how a route asks for it."""

from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from slora_adapters.disk_reserve import DiskReserve
from slora_api.adapters.aliases import Aliases
from slora_api.adapters.change_follower import ChangeFollower
from slora_api.adapters.local_adapters import LocalAdapters
from slora_api.adapters.model_catalog import ModelCatalog
from slora_api.adapters.pinning import Pinning
from slora_api.adapters.uploads import Uploads
from slora_api.fair_slots import FairSlots
from slora_api.generation.chat_templates import ChatTemplates
from slora_api.generation.generation import Generator
from slora_api.generation.prompt_encoder import PromptEncoder
from slora_api.request_bounds import RequestBounds
from slora_api.settings import Settings
from slora_api.tenants.tenancy import Tenancy

__all__ = ["Services", "Wired"]

# Long answers that are written side by side. Each adds up to 1 ms to a turn of the event loop.
_WRITING_SLOTS = 3
# Answers of one tenant that wait for a slot. Admission bounds those that are computed at a lower number.
_MAX_WRITING = 4096


@dataclass(frozen=True, slots=True)
class Services:
    """One server's parts."""

    settings: Settings
    reserve: DiskReserve
    tenancy: Tenancy
    catalog: ModelCatalog
    aliases: Aliases
    pinning: Pinning
    follower: ChangeFollower
    uploads: Uploads
    local_adapters: LocalAdapters
    templates: ChatTemplates
    generator: Generator
    encoder: PromptEncoder
    writing: FairSlots = field(
        default_factory=lambda: FairSlots(_WRITING_SLOTS, _MAX_WRITING, "answers to be written")
    )

    def bounds(self) -> RequestBounds:
        """What requests may ask for. Raises Starting while there is no engine."""
        longest = self.encoder.tokenizer.longest_token_chars
        return RequestBounds.of(self.settings, self.generator.engine_info(), longest)


def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


Wired = Annotated[Services, Depends(_services)]
