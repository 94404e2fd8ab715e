"""The facts about a model that engine, API and loader need, for our decoder and for transformers models alike.

For a model that our decoder does not support, `slora.models.model_structure` derives the facts with torch. A process
that has not imported torch runs that module in a subprocess. This module does not import torch itself.
"""

import importlib
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from slora.core.engine_config import QUANTIZED_BITS, KVFootprint
from slora.core.errors import ConfigError
from slora.models.config_fields import read_config
from slora.models.families import FAMILIES, read_model_config
from slora.models.model_config import ModelConfig
from slora_adapters.peft.hub_reference import GGUF_LINK, HubReference
from slora_kernels.layout import ModelShape
from slora_kernels.partition import Partition, refuse_uneven_width

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Exit code of the program slora.models.model_structure when it refused the model and printed the reason on standard
# output.
REFUSED_EXIT_CODE = 3


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A tensor of a recurrent layer that one token passes on to the next token of its sequence."""

    module: str  # The layer's module that computes it.
    kind: str  # `conv`: the last inputs of a convolution. `recurrent`: the state of a recurrence.
    index: int  # The number of this tensor among those of the same module and kind.
    shape: tuple[int, ...]
    is_float32: bool  # False: it has the model's dtype.
    # Whether a call for several tokens continues from it. Otherwise such a call serves only the beginning of sequences.
    is_continued: bool = True

    def num_bytes(self, dtype: str) -> int:
        return math.prod(self.shape) * ELEMENT_BYTES["float32" if self.is_float32 else dtype]


@dataclass(frozen=True, slots=True)
class Selection:
    """Attention reads the tokens that an indexer selects, see `slora.models.token_selection`."""

    num_tokens: int  # Of a sequence with no more tokens, all are selected.
    fields: str  # The names of the fields of config.json that say so.


# The states of a sequence are one byte string. Each tensor begins at a multiple of this.
_STATE_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The facts about one model."""

    family: str
    max_positions: int  # Number of tokens for which the model has positions.
    window_of_layer: tuple[
        int | None, ...
    ]  # Tokens that a token sees, itself included. None: all earlier tokens.
    rope_switch: (
        int | None
    )  # The longest sequence that uses longrope's short factors. None if nothing switches.
    dtype: str  # The checkpoint's own dtype.
    eos_token_ids: tuple[int, ...]
    sizes: ModelShape  # With elements of 4 bytes.
    attention_paths: tuple[str, ...] = ()  # The attention modules of a transformers model, in order.
    states: tuple[StateTensor, ...] = ()  # The states of a transformers model's recurrent layers.
    # The layers of a transformers model in which a token sees only its own chunk, of `attention_chunk_size` tokens. As
    # `attention_paths`, the numbers count the layers with attention.
    chunked_layers: tuple[int, ...] = ()
    # The attention modules that compute with the index of a token in the batch, see `TokenCounter`.
    counting_paths: tuple[str, ...] = ()
    num_parameters: int = 0  # Numbers in all weights of a transformers model.
    # Of the indexers of a transformers model. `max_positions` is at most its number of tokens.
    selection: Selection | None = None
    decoder: ModelConfig | None = None  # None if transformers computes the model.

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
                "chunked_layers": tuple(fields["chunked_layers"]),
                "counting_paths": tuple(fields["counting_paths"]),
                "states": tuple(
                    StateTensor(**{**state, "shape": tuple(state["shape"])}) for state in fields["states"]
                ),
                "sizes": ModelShape.from_plain(fields["sizes"]),
                "selection": fields["selection"] and Selection(**fields["selection"]),
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

    @property
    def continues_states(self) -> bool:
        """Whether recurrent layers compute several tokens from a state in one call, see `StateTensor`."""
        return all(state.is_continued for state in self.states)

    def lay_out_states(self, dtype: str) -> list[tuple[int, int]]:
        """The first byte of each of `states` in a sequence's byte string, and the byte after its last. Both are
        multiples of `_STATE_ALIGNMENT`.
        """
        spans, end = [], 0
        for state in self.states:
            start, end = end, end - (-state.num_bytes(dtype) // _STATE_ALIGNMENT) * _STATE_ALIGNMENT
            spans.append((start, end))
        return spans

    def footprint(self, block_tokens: int, dtype: str, full_page_bytes: int) -> KVFootprint:
        """The pages that a sequence needs when the model runs in `dtype`."""
        state_bytes = max((end for _, end in self.lay_out_states(dtype)), default=0)
        return KVFootprint(block_tokens, self.window, -(-state_bytes // full_page_bytes))

    def shape(self, dtype: str) -> ModelShape:
        """The sizes that decide the layout of pages and adapters when the model runs in `dtype`."""
        return replace(self.sizes, element_bytes=ELEMENT_BYTES[dtype])

    def partition(self, dtype: str, num_ranks: int) -> Partition:
        """Divides the model among tensor-parallel ranks. Raises ConfigError if that is not possible."""
        try:
            if self.decoder is not None and self.decoder.experts is not None:
                experts = self.decoder.experts
                refuse_uneven_width("experts", experts.width_field, experts.width, num_ranks)
            return Partition(self.shape(dtype), num_ranks)
        except ValueError as error:
            raise ConfigError(f"tensor_parallel_size is {num_ranks}: {error}") from error

    def describe_limit(self) -> str | None:
        """Says why sequences are shorter than the model's positions. None if they are not."""
        if self.selection is None or self.selection.num_tokens > self.max_positions:
            return None
        return (
            f"this model ({self.family}) is served up to {self.max_positions} tokens ({self.selection.fields}): of "
            "longer sequences, its indexers would select a part, which this server does not compute"
        )

    def check_length(self, max_model_len: int | None) -> None:
        """Raises ConfigError if the requested length of a sequence exceeds that of the model."""
        if max_model_len is not None and max_model_len > self.max_positions:
            ends = f"this model's positions end at {self.max_positions} (max_position_embeddings)"
            raise ConfigError(
                f"max_model_len is {max_model_len}, but {self.describe_limit() or ends}; give at most that"
            )

    def check_quantization(self, requested: str) -> None:
        """Raises ConfigError if the weights can't be rounded as requested, whatever the device is."""
        if requested == "auto":
            return
        if requested not in QUANTIZED_BITS:
            *names, last = "auto", *QUANTIZED_BITS
            raise ConfigError(f"quantization is {requested!r}; it must be {', '.join(names)} or {last}")
        if self.decoder is None:
            raise ConfigError(
                f"quantization is {requested}, but transformers' classes compute this model ({self.family}), and "
                "models computed by them are served only without quantization; set quantization to auto"
            )
        stored = self.decoder.quantization
        if stored is not None and stored.block is None and requested != stored.form:
            raise ConfigError(
                f"quantization is {requested}, but this checkpoint is stored as {stored.form}, and rounding twice "
                "loses more precision than either; set quantization to auto, or use the unquantized checkpoint"
            )

    def find_weight_form(self, requested: str) -> str | None:
        """Returns how the engine holds the weights of the linears, such as int8 or nf4. None: as numbers of the model's
        dtype. requested: a value that `check_quantization` accepts.
        """
        stored = None if self.decoder is None else self.decoder.quantization
        if stored is None or stored.block is not None:
            return None if requested == "auto" else requested
        codes = stored.codes
        return codes.format if codes is not None and codes.format in ("nf4", "fp4") else stored.form

    def resolve_dtype(self, requested: str) -> str:
        """Resolves `auto` to the checkpoint's own dtype. Raises ConfigError for a dtype that can't be served."""
        dtype = self.dtype if requested == "auto" else requested
        if dtype not in ELEMENT_BYTES:
            raise ConfigError(f"dtype is {dtype!r}; it must be one of {', '.join(ELEMENT_BYTES)}")
        return dtype


MODEL_IMPLS = ("auto", "slora", "transformers")
# Building modules without data takes seconds, and so does importing torch. A busy machine needs much longer.
_SUBPROCESS_TIMEOUT_S = 300
# Classes of transformers whose head does not write text.
_OTHER_HEAD = re.compile(
    r".*For(SequenceClassification|TokenClassification|QuestionAnswering|MultipleChoice)"
)


def find_model(model: Path, model_impl: str = "auto", *, tell: Callable[[str], Any] | None = None) -> Path:
    """Returns the directory of a base model. A model of the Hugging Face hub is downloaded first, unless the cache of
    the hub's client has it; see `HubReference.of_model`. For a GGUF file, see `slora.models.gguf_model`.

    tell: called with a text for people before a download begins. None: only the files beside the weights are needed.
    Raises ConfigError.
    """
    if (model / "config.json").is_file():
        return model
    gguf_model = importlib.import_module("slora.models.gguf_model")
    if (path := gguf_model.find_gguf_file(model)) is not None:
        return cast(Path, gguf_model.prepare_gguf_model(path))
    reference = None if model.is_dir() else HubReference.of_model(model)
    if reference is None:
        return model
    # The hub's client takes a quarter of a second to import.
    hub_model = importlib.import_module("slora.models.hub_model")
    try:
        if reference.is_gguf:
            return cast(Path, gguf_model.prepare_gguf_model(hub_model.download_gguf(reference, tell)))
        found = hub_model.HubModel.find(reference, model_impl)
        if tell is not None:
            found.download_weights(tell)
    except ConfigError as error:
        raise ConfigError(f"{error} (there is no directory {model} either)") from error
    return cast(Path, found.directory)


def read_model_spec(directory: Path, model_impl: str = "auto") -> ModelSpec:
    """Reads the model in `directory`. Raises ConfigError naming the file and field, or what can't be served.

    model_impl: `slora` for our decoder, `transformers` for transformers' classes. `auto` uses our decoder for the
    families that it supports, and transformers for all others.
    """
    if model_impl not in MODEL_IMPLS:
        raise ConfigError(f"model_impl is {model_impl!r}; it must be one of {', '.join(MODEL_IMPLS)}")
    config = read_config(directory)
    _refuse_other_heads(directory, config)
    if model_impl == "transformers" and (directory / GGUF_LINK).exists():
        raise ConfigError(
            "model_impl is transformers, but only slora's decoder reads GGUF files; set it to auto"
        )
    if model_impl == "slora" or (model_impl == "auto" and str(config.get("model_type")) in FAMILIES):
        return ModelSpec.from_config(read_model_config(directory))
    # A process that has imported torch reads the spec itself. Other processes must not import torch.
    if "torch" not in sys.modules:
        return _read_spec_in_subprocess(directory)
    module = importlib.import_module("slora.models.model_structure")
    return cast(ModelSpec, module.read_transformers_spec(directory))


def _refuse_other_heads(directory: Path, config: Mapping[str, Any]) -> None:
    names = config.get("architectures")
    for name in names if isinstance(names, list) else ():
        if isinstance(name, str) and _OTHER_HEAD.fullmatch(name):
            raise ConfigError(
                f"{directory / 'config.json'}: architectures is [{name[:128]!r}], a model with a head for "
                "classification, which is not served; use the model for text that it was trained from (...ForCausalLM)"
            )


def _read_spec_in_subprocess(directory: Path) -> ModelSpec:
    command = [sys.executable, "-P", "-m", "slora.models.model_structure", str(directory)]
    try:
        answer = subprocess.run(
            command,
            capture_output=True,
            timeout=_SUBPROCESS_TIMEOUT_S,
            check=False,
            encoding="utf-8",
            errors="replace",
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"{directory}: reading the model's module tree took more than {_SUBPROCESS_TIMEOUT_S} s"
        ) from error
    if answer.returncode != 0:
        if answer.returncode == REFUSED_EXIT_CODE and answer.stdout.strip():
            raise ConfigError(answer.stdout.strip())
        last_line = (answer.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise ConfigError(
            f"{directory}: the program that reads the model's module tree ended with {answer.returncode}: {last_line}"
        )
    return ModelSpec.from_plain(json.loads(answer.stdout))
