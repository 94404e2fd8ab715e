"""The facts about a model that engine, API and loader need, for our decoder and for transformers models alike.

This module does not import torch, because the API and loader processes read it too. For a model that our decoder does
not support, a separate program with torch (`slora.models.model_tree`) finds the facts once.
"""

import importlib
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from slora.errors import ConfigError
from slora.models.config_fields import read_json_object
from slora.models.model_config import ModelConfig
from slora.models.model_family import FAMILIES
from slora_kernels.layout import ModelShape

__all__ = ["ELEMENT_BYTES", "MODEL_IMPLS", "REFUSED", "ModelSpec", "read_model_spec"]

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MODEL_IMPLS = ("auto", "slora", "transformers")
# Building modules without data takes seconds, and so does importing torch. A busy machine needs much longer.
_TREE_TIMEOUT_S = 300
# Exit code of slora.models.model_tree when it refused the model and printed the reason on standard output.
REFUSED = 3


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
        """The most tokens that a token sees in any layer, itself included. None if a layer has no window."""
        windows = [window for window in self.window_of_layer if window is not None]
        return max(windows) if windows and len(windows) == len(self.window_of_layer) else None

    def shape(self, dtype: str) -> ModelShape:
        """The sizes that decide the layout of pages and adapters when the model runs in `dtype`."""
        return replace(self.sizes, element_bytes=ELEMENT_BYTES[dtype])

    def resolve_dtype(self, requested: str) -> str:
        """Resolves `auto` to the checkpoint's own dtype. Raises ConfigError for a dtype that can't be served."""
        dtype = self.dtype if requested == "auto" else requested
        if dtype not in ELEMENT_BYTES:
            raise ConfigError(f"dtype is {dtype!r}; it must be one of {', '.join(ELEMENT_BYTES)}")
        return dtype


def read_model_spec(directory: Path, model_impl: str = "auto") -> ModelSpec:
    """Reads the model in `directory`. Raises ConfigError naming the file and field, or what can't be served.

    model_impl: `slora` for our decoder, `transformers` for transformers' classes. `auto` uses our decoder for the
    families that it supports, and transformers for all others.
    """
    if model_impl not in MODEL_IMPLS:
        raise ConfigError(f"model_impl is {model_impl!r}; it must be one of {', '.join(MODEL_IMPLS)}")
    if model_impl == "slora" or (model_impl == "auto" and _model_type(directory) in FAMILIES):
        return ModelSpec.from_config(ModelConfig.from_directory(directory))
    # A process that has imported torch finds the tree itself. Other processes must not import torch.
    return _find_tree(directory) if "torch" in sys.modules else _ask_tree(directory)


def _model_type(directory: Path) -> str | None:
    path = directory / "config.json"
    try:
        value = read_json_object(path).get("model_type")
    except OSError as error:
        raise ConfigError(f"no model at {directory}: {path} can't be read ({error.strerror})") from error
    return value if isinstance(value, str) else None


def _find_tree(directory: Path) -> ModelSpec:
    return cast(ModelSpec, importlib.import_module("slora.models.model_tree").read_spec(directory))


def _ask_tree(directory: Path) -> ModelSpec:
    command = [sys.executable, "-P", "-m", "slora.models.model_tree", str(directory)]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_TREE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"{directory}: reading the model's module tree took more than {_TREE_TIMEOUT_S} s"
        ) from error
    if answer.returncode != 0:
        if answer.returncode == REFUSED and answer.stdout.strip():
            raise ConfigError(answer.stdout.strip())
        last_line = (answer.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise ConfigError(
            f"{directory}: the program that reads the model's module tree ended with {answer.returncode}: {last_line}"
        )
    return ModelSpec.from_plain(json.loads(answer.stdout))
