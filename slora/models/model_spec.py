"""The facts about a model that engine, API and loader need, for our decoder and for transformers models alike.

This module does not import torch, because the API and loader processes also import it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from slora.core.errors import ConfigError
from slora.models.model_config import ModelConfig
from slora_kernels.layout import ModelShape
from slora_kernels.partition import Partition, refuse_uneven_width

__all__ = ["ELEMENT_BYTES", "REFUSED_EXIT_CODE", "ModelSpec"]

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Exit code of the program slora.models.model_structure when it refused the model and printed the reason on standard
# output.
REFUSED_EXIT_CODE = 3


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The facts about one model.

    max_positions: number of tokens for which the model has positions.
    window_of_layer: how many tokens a token of the layer sees, itself included; None: all earlier tokens.
    rope_switch: the longest sequence, in tokens, that uses longrope's short factors. None if nothing switches.
    dtype: the checkpoint's own dtype. sizes: the model's sizes, with elements of 4 bytes.
    decoder: the config of our own decoder. None if transformers computes the model.
    attention_paths: the attention modules of a transformers model, one per layer.
    """

    family: str
    max_positions: int
    window_of_layer: tuple[int | None, ...]
    rope_switch: int | None
    dtype: str
    eos_token_ids: tuple[int, ...]
    sizes: ModelShape
    attention_paths: tuple[str, ...] = ()
    decoder: ModelConfig | None = None

    @staticmethod
    def from_config(config: ModelConfig) -> "ModelSpec":
        return ModelSpec(
            family=config.family,
            max_positions=config.max_positions,
            window_of_layer=config.window_of_layer,
            rope_switch=config.rope_switch,
            dtype=config.dtype,
            eos_token_ids=config.eos_token_ids,
            sizes=config.shape(ELEMENT_BYTES["float32"]),
            decoder=config,
        )

    @staticmethod
    def from_plain(fields: Mapping[str, Any]) -> "ModelSpec":
        """Builds a spec from the JSON form of `dataclasses.asdict`, for a model without `decoder`."""
        return ModelSpec(
            **{
                **fields,
                "window_of_layer": tuple(fields["window_of_layer"]),
                "eos_token_ids": tuple(fields["eos_token_ids"]),
                "attention_paths": tuple(fields["attention_paths"]),
                "sizes": ModelShape.from_plain(fields["sizes"]),
            }
        )

    @property
    def vocab_size(self) -> int:
        return self.sizes.vocab_size

    @property
    def window(self) -> int | None:
        """Maximum number of tokens that a token sees in any layer, itself included. None if a layer has no window."""
        windows = [window for window in self.window_of_layer if window is not None]
        return max(windows) if windows and len(windows) == len(self.window_of_layer) else None

    def shape(self, dtype: str) -> ModelShape:
        """The sizes that decide the layout of pages and adapters when the model runs in `dtype`."""
        return replace(self.sizes, element_bytes=ELEMENT_BYTES[dtype])

    def partition(self, dtype: str, num_ranks: int) -> Partition:
        """Divides the model among tensor-parallel ranks. Raises ConfigError if that is not possible."""
        if num_ranks > 1 and self.decoder is None:
            raise ConfigError(
                f"tensor_parallel_size is {num_ranks}, but transformers' classes compute this model ({self.family}), "
                "and models computed by them can't be divided; set tensor_parallel_size to 1"
            )
        try:
            if self.decoder is not None and self.decoder.experts is not None:
                experts = self.decoder.experts
                refuse_uneven_width("experts", experts.facts.width_field, experts.width, num_ranks)
            return Partition(self.shape(dtype), num_ranks)
        except ValueError as error:
            raise ConfigError(f"tensor_parallel_size is {num_ranks}: {error}") from error

    def resolve_dtype(self, requested: str) -> str:
        """Resolves `auto` to the checkpoint's own dtype. Raises ConfigError for a dtype that can't be served."""
        dtype = self.dtype if requested == "auto" else requested
        if dtype not in ELEMENT_BYTES:
            raise ConfigError(f"dtype is {dtype!r}; it must be one of {', '.join(ELEMENT_BYTES)}")
        return dtype
