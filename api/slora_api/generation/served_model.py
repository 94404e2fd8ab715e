"""What a `model` name stands for once it is known who asks: base model or one version of one adapter."""

from dataclasses import dataclass

from slora.text.generation_defaults import GenerationDefaults
from slora_adapters.version import AdapterVersion

__all__ = ["ServedModel"]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """asked_for: the name in the request, echoed in the answer. adapter None: the bare base model.

    label: `name@version` of the adapter. chat_template: the adapter's own; None takes the base model's.
    """

    asked_for: str
    adapter: AdapterVersion | None
    label: str | None
    chat_template: str | None
    defaults: GenerationDefaults

    @property
    def headers(self) -> dict[str, str]:
        """Says which weights answered, so that a client can prove it, whatever its alias points at by then."""
        if self.adapter is None or self.label is None:
            return {}
        return {"x-slora-adapter": self.label, "x-slora-adapter-digest": self.adapter.digest}
