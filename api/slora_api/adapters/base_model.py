"""The base model as the API describes it."""

from dataclasses import dataclass

from slora.text.generation_defaults import GenerationDefaults
from slora_api.adapters.base_identity import BaseIdentity

# A request with this model name uses the default adapter of its API key.
DEFAULT_MODEL = "default"


@dataclass(frozen=True, slots=True)
class BaseModelInfo:
    """The base model, which all tenants share. created_at: Unix time at which this server started."""

    name: str
    identity: BaseIdentity
    defaults: GenerationDefaults
    created_at: int
