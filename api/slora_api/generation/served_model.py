"""The model that answers a request: the base model, or one version of an adapter of the key's tenant."""

from dataclasses import dataclass

from slora.text.generation_defaults import GenerationDefaults
from slora_adapters.version import AdapterVersion

__all__ = ["ServedModel"]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The result of looking up a model name for an API key.

    asked_for: the model name in the request, repeated in the answer.
    adapter: the adapter version; None for the base model alone.
    label: `name@version` of the adapter.
    chat_template: the adapter's own chat template; None selects the base model's.
    """

    asked_for: str
    adapter: AdapterVersion | None
    label: str | None
    chat_template: str | None
    defaults: GenerationDefaults

    @property
    def headers(self) -> dict[str, str]:
        """Response headers that identify the adapter version that answered, even if its alias moves later."""
        if self.adapter is None or self.label is None:
            return {}
        return {"x-slora-adapter": self.label, "x-slora-adapter-digest": self.adapter.digest}
