"""The model that answers a request: the base model, alone or with adapters of the key's tenant."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator

from slora.core.request import MAX_ADAPTER_WEIGHT, WeightedAdapter, compose_adapters
from slora.text.generation_defaults import Classifier, GenerationDefaults
from slora_adapters.peft.extras import AddedToken
from slora_api.core.errors import BadRequest
from slora_api.http.field_types import Name, RequestModel, make_refusal


def _check_weight(weight: float) -> float:
    if not abs(weight) <= MAX_ADAPTER_WEIGHT:  # Not `>`, because NaN must be refused.
        raise make_refusal(
            "it is {weight}, and must be a number from -{limit} to {limit}",
            weight=weight,
            limit=f"{MAX_ADAPTER_WEIGHT:g}",
        )
    return weight


class AdapterWeight(RequestModel):
    """One adapter of a weighted sum. weight: multiplies the adapter; 1 adds it as trained, -1 subtracts it."""

    name: Name
    weight: Annotated[float, AfterValidator(_check_weight)] = 1.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The result of looking up a request's model for an API key.

    asked_for: the model name in the request, which the answer repeats.
    adapters: as `compose_adapters` returns them; empty for the base model alone.
    labels: `name@version` of each adapter.
    classifier: the head of the adapter, if it classifies texts.
    chat_templates: the distinct chat templates of the adapters; None stands for the base model's template.
    added_rows: number of the adapter's tokens behind those of the base model. The engine refuses sums with such a
        part.
    tokens_of_parts: the distinct added tokens of the adapters' tokenizers; none stands for the base's tokenizer.
    """

    asked_for: str
    adapters: tuple[WeightedAdapter, ...]
    labels: tuple[str, ...]
    chat_templates: frozenset[str | None]
    defaults: GenerationDefaults
    classifier: Classifier | None = None
    tokens_of_parts: frozenset[tuple[AddedToken, ...]] = frozenset([()])
    added_rows: int = 0

    @property
    def chat_template(self) -> str | None:
        """The chat template to use; None selects the base model's. Raises BadRequest if the adapters disagree."""
        if len(self.chat_templates) > 1:
            raise BadRequest(
                f"The adapters {', '.join(self.labels)} have different chat templates, so their sum has none. Render "
                "the messages yourself and send them to /v1/completions.",
                "adapters",
            )
        (template,) = self.chat_templates
        return template

    @property
    def added_tokens(self) -> tuple[AddedToken, ...]:
        """The added tokens of the adapters' tokenizer. Raises BadRequest if the adapters disagree."""
        if len(self.tokens_of_parts) > 1:
            raise BadRequest(
                f"The tokenizers of the adapters {', '.join(self.labels)} have different added tokens, so their sum "
                "has no tokenizer. Name adapters whose tokenizers have the same added tokens.",
                "adapters",
            )
        (tokens,) = self.tokens_of_parts
        return tokens

    @property
    def headers(self) -> dict[str, str]:
        """Response headers that identify the adapter versions that answered, even if their aliases move later."""
        if not self.adapters:
            return {}
        digests = "+".join(version.digest for version, _ in self.adapters)
        return {"x-slora-adapter": "+".join(self.labels), "x-slora-adapter-digest": digests}

    def name_adapters(self, text: str) -> str:
        """Returns a message of the engine with the labels of this request's adapters in place of their digests. A
        digest may be shortened to 12 digits.
        """
        for (version, _), label in zip(self.adapters, self.labels, strict=True):
            text = text.replace(version.digest, label).replace(version.digest[:12], label)
        return text


def add_up_models(
    asked_for: str, parts: Sequence[ServedModel], weights: Sequence[float], base: GenerationDefaults
) -> ServedModel:
    """Returns the model that combines the adapters of `parts` with the given weights. Each part has one adapter. base:
    the base model's defaults.

    If all parts have the same defaults, the result has these defaults. Otherwise, the result has the base model's
    defaults.
    """
    named = {part.adapters[0].version: part.labels[0] for part in parts}
    adapters = compose_adapters(
        WeightedAdapter(part.adapters[0].version, weight) for part, weight in zip(parts, weights, strict=True)
    )
    is_unanimous = all(part.defaults == parts[0].defaults for part in parts)
    return ServedModel(
        asked_for,
        adapters,
        tuple(named[version] for version, _ in adapters),
        frozenset().union(*(part.chat_templates for part in parts)),
        parts[0].defaults if is_unanimous else base,
        tokens_of_parts=frozenset().union(*(part.tokens_of_parts for part in parts)),
    )
