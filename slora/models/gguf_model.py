"""A GGUF file as a model directory: config.json, the tokenizer and the chat templates from its metadata, and a link to
the file, from which the weights are read.

The directory is in the user's cache, so every process and command reads a GGUF model like any other. Its name contains
a digest of the file's header. A field of the architecture or of the tokenizer that slora does not know is refused,
because it may change the model's answers; llama.cpp's own names are in docs/gguf.md of ggml.

This module does not import torch.
"""

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from slora.core.errors import ConfigError
from slora.models.gguf_tokenizer import write_tokenizer
from slora.models.weights.gguf_file import GgufFile, read_gguf
from slora.models.weights.gguf_tensors import ROPE_FACTORS, locate_gguf_tensors
from slora_adapters.peft.extras import GENERATION_NAME
from slora_adapters.peft.hub_reference import GGUF_LINK

# Changes when the directory of a given file would have other content.
_VERSION = 1
# Fields of an architecture -> fields of config.json. `head_dim` and rope are read separately.
_SAME = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
# Fields that say nothing about the numbers of a model.
_IGNORED = ("vocab_size", "rope.scaling.finetuned", "tensor_data_layout")
_REQUIRED = (
    "context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count",
    "attention.layer_norm_rms_epsilon",
)  # fmt: skip
# Llama 3.1 and later: the same for all models.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_EMBEDDING = "model.embed_tokens.weight"
# Gemma's largest models, by architecture and number of layers, divide scores by another number than the others do.
_SCALED_BY_WIDTH = {("gemma2", 46), ("gemma3", 62)}


def prepare_gguf_model(path: Path) -> Path:
    """Returns the model directory for a GGUF file. It is written unless it is there. Raises ConfigError.

    A generation_config.json beside the file is part of the model.
    """
    path = Path(os.path.abspath(path))
    file = read_gguf(path)
    with path.open("rb") as opened:
        digest = hashlib.sha256(f"{_VERSION} {path} {path.stat().st_size}".encode())
        digest.update(opened.read(file.header_bytes))
    defaults = path.with_name(GENERATION_NAME)
    generation = defaults.read_bytes() if defaults.is_file() else b""
    digest.update(generation)
    directory = _cache() / digest.hexdigest()[:32] / path.stem
    if not directory.is_dir():
        _write(file, directory, generation)
    return directory


def find_gguf_file(model: Path) -> Path | None:
    """Returns `model` if it is a GGUF file, or the only GGUF file in a directory without config.json. None if it is
    neither. Raises ConfigError if there are several, or if an absolute path names a file that is not there.
    """
    if model.suffix == ".gguf" and (model.is_file() or model.is_absolute()):
        if not model.is_file():
            raise ConfigError(f"there is no file {model}")
        return model
    if not model.is_dir() or (model / "config.json").exists():
        return None
    found = sorted(path for path in model.glob("*.gguf") if not path.name.startswith("mmproj"))
    if len(found) > 1:
        names = ", ".join(path.name for path in found[:8])
        raise ConfigError(
            f"{model} has {len(found)} GGUF files ({names}); choose one, as in --model {found[0]}"
        )
    return found[0] if found else None


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slora" / "gguf"


def _write(file: GgufFile, directory: Path, generation: bytes) -> None:
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        written = Path(tempfile.mkdtemp(prefix=".new-", dir=directory.parent))
        try:
            config = read_gguf_config(file)
            config |= write_tokenizer(file, written, config["vocab_size"])
            (written / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
            if generation:
                (written / GENERATION_NAME).write_bytes(generation)
            (written / GGUF_LINK).symlink_to(file.path)
            written.rename(directory)
        except (ConfigError, OSError):
            raise
        except Exception as error:
            # A field has another type than it should, or the tokenizers library refuses it.
            raise file.refusal(f"its metadata can't be read: {type(error).__name__}: {error}") from error
        finally:
            shutil.rmtree(written, ignore_errors=True)
    except OSError as error:
        if directory.is_dir():  # Another process was faster.
            return
        raise ConfigError(
            f"the configuration of {file.path} can't be written to {directory.parent} ({error.strerror or error}); set "
            "XDG_CACHE_HOME to a directory that this user may write to"
        ) from error


def read_gguf_config(file: GgufFile) -> dict[str, Any]:
    """Returns the content of config.json, without the special tokens. Raises ConfigError."""
    kind = file.fields.get("general.type", "model")
    if kind != "model":
        raise file.refusal(f"general.type is {kind!r}; only models are served as base models")
    if file.fields.get("split.count", 1) not in (0, 1):
        raise file.refusal("it is one part of several; join them with llama-gguf-split --merge")
    architecture = file.architecture
    if architecture not in _ARCHITECTURES:
        raise file.refusal(
            f"general.architecture is {architecture!r}; of GGUF files, this version serves "
            f"{', '.join(_ARCHITECTURES)}; use the model's safetensors checkpoint"
        )
    fields = _Fields(file)
    for name in _REQUIRED:
        if name not in fields:
            raise file.refusal(f"{architecture}.{name} is missing")
    config: dict[str, Any] = {
        "dtype": _stored_dtype(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    config |= {theirs: fields.take(own) for own, theirs in _SAME.items() if own in fields}
    heads = config["num_attention_heads"]
    config.setdefault("num_key_value_heads", heads)
    config["head_dim"] = head_dim = fields.take("attention.key_length", config["hidden_size"] // heads)
    fields.require("attention.value_length", head_dim)
    fields.require("attention.causal", True)
    _ARCHITECTURES[architecture](file, fields, config)
    fields.refuse_unread()
    # A tensor that is not known is refused here, rather than when the engine starts.
    shapes = {place.name: place.shape for place in locate_gguf_tensors(file)}
    if _EMBEDDING not in shapes:
        raise file.refusal("it has no token_embd.weight, so it is not a model for text")
    return {**config, "vocab_size": shapes[_EMBEDDING][0]}


class _Fields:
    """The fields of the file's architecture, without its name. Each is read once."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._prefix = f"{file.architecture}."
        self._left = {
            name.removeprefix(self._prefix): value
            for name, value in file.fields.items()
            if name.startswith(self._prefix)
        }
        for name in _IGNORED:
            self._left.pop(name, None)

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, default: Any = None) -> Any:
        value = self._left.pop(name, default)
        if isinstance(value, list):
            raise self._file.refusal(f"{self._prefix}{name} differs between layers, which is not served")
        # The shortest number that is the same in float32, which is what config.json of the original has.
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def take_pattern(self, default: int, num_layers: int) -> list[bool]:
        """Which layers have a window. A number means: all but every layer of that number."""
        value = self._left.pop("attention.sliding_window_pattern", default)
        if isinstance(value, list):
            return [bool(item) for item in value]
        return [bool((layer + 1) % value) for layer in range(num_layers)]

    def require(self, name: str, value: object) -> None:
        """Refuses another value than this one, unless the field is absent."""
        found = self.take(name, value)
        if found != value:
            raise self._file.refusal(f"{self._prefix}{name} is {found!r}; only {value!r} is served")

    def refuse_unread(self) -> None:
        for name, value in self._left.items():
            raise self._file.refusal(
                f"{self._prefix}{name} is {value!r:.100}; slora does not know this field, which may change the model's "
                "output: use the model's safetensors checkpoint"
            )


def _stored_dtype(file: GgufFile) -> str:
    """The dtype that serves the file's numbers: bfloat16 unless all matrices have another one."""
    types = {tensor.type_name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    found = types.pop() if len(types) == 1 else ""
    return {"F32": "float32", "F16": "float16"}.get(found, "bfloat16")


def _read_rope(file: GgufFile, fields: _Fields, config: dict[str, Any], *, partial: bool = False) -> None:
    config["rope_theta"] = fields.take("rope.freq_base", 10000.0)
    rotated = fields.take("rope.dimension_count", config["head_dim"])
    if partial:
        config["partial_rotary_factor"] = rotated / config["head_dim"]
    elif rotated != config["head_dim"]:
        raise file.refusal(
            f"rope.dimension_count is {rotated}, but a head has {config['head_dim']} dimensions"
        )
    kind = fields.take("rope.scaling.type", "none")
    factor = fields.take("rope.scaling.factor", fields.take("rope.scale_linear", 1.0))
    length = fields.take("rope.scaling.original_context_length", config["max_position_embeddings"])
    if kind == "linear" or (kind == "none" and factor not in (0.0, 1.0)):
        config["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        config["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": length,
            "beta_fast": fields.take("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": fields.take("rope.scaling.yarn_beta_slow", 1.0),
        }
    elif kind not in ("none", "longrope"):
        raise file.refusal(f"rope.scaling.type is {kind!r}; served are none, linear, yarn and longrope")
    long, short = (_read_vector(file, name) for name in ROPE_FACTORS[1:])
    if long is not None and short is not None:
        if "rope_scaling" in config:
            raise file.refusal(f"it has {ROPE_FACTORS[1]} beside another scaling of rope")
        config["original_max_position_embeddings"] = length
        config["rope_scaling"] = {"rope_type": "longrope", "long_factor": long, "short_factor": short}
        if (attention := fields.take("rope.scaling.attn_factor")) is not None:
            config["rope_scaling"]["attention_factor"] = attention
    elif kind == "longrope" or long is not None or short is not None:
        raise file.refusal(
            f"rope.scaling.type is {kind}, but {ROPE_FACTORS[1]} or {ROPE_FACTORS[2]} is missing"
        )
    else:
        fields.require("rope.scaling.attn_factor", 1.0)
    factors = _read_vector(file, ROPE_FACTORS[0])
    if factors is not None and set(factors) != {1.0}:
        if "rope_scaling" in config:
            raise file.refusal(f"it has {ROPE_FACTORS[0]} beside another scaling of rope")
        config["rope_scaling"] = _find_llama3(file, factors, config)


def _find_llama3(file: GgufFile, factors: list[float], config: Mapping[str, Any]) -> dict[str, Any]:
    """The file has the factors of all wavelengths. Returns the fields from which Llama 3 computes them."""
    factor, low, high, length = max(factors), *_LLAMA3.values()
    expected = []
    for index in range(len(factors)):
        turns = length / (2 * math.pi * config["rope_theta"] ** (index / len(factors)))
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        expected.append(1 / ((1 - share) / factor + share))
    if len(factors) * 2 != config["head_dim"] or not np.allclose(factors, expected, rtol=1e-4):
        raise file.refusal(f"{ROPE_FACTORS[0]} has other factors than those of Llama 3, which are served")
    return {"rope_type": "llama3", "factor": float(f"{factor:.6g}"), **_LLAMA3}


def _read_vector(file: GgufFile, name: str) -> list[float] | None:
    tensor = file.tensors.get(name)
    if tensor is None:
        return None
    if tensor.type_name != "F32" or len(tensor.shape) != 1:
        raise file.refusal(f"{name} is {tensor.type_name} {list(tensor.shape)}; it must be a vector of F32")
    with file.path.open("rb") as opened:
        opened.seek(tensor.offset)
        numbers = np.frombuffer(opened.read(4 * tensor.shape[0]), "<f4")
    return [float(str(number)) for number in numbers]


def _read_llama(file: GgufFile, fields: _Fields, config: dict[str, Any]) -> None:
    """Llama, Mistral, Mixtral and the many models of their architectures."""
    _read_rope(file, fields, config)
    experts = fields.take("expert_count", 0)
    if experts:
        config |= {"model_type": "mixtral", "num_local_experts": experts}
    else:
        config |= {"model_type": "llama", "attention_bias": "blk.0.attn_q.bias" in file.tensors}
        config.pop("num_experts_per_tok", None)


def _read_qwen(model_type: str) -> Callable[[GgufFile, _Fields, dict[str, Any]], None]:
    def read(file: GgufFile, fields: _Fields, config: dict[str, Any]) -> None:
        _read_rope(file, fields, config)
        config["model_type"] = model_type
        if model_type.endswith("_moe"):
            config["num_experts"] = fields.take("expert_count")
            # llama.cpp divides by the sum of the chosen experts' weights in Qwen 3 only.
            config["norm_topk_prob"] = model_type == "qwen3_moe"

    return read


def _read_phi3(file: GgufFile, fields: _Fields, config: dict[str, Any]) -> None:
    _read_rope(file, fields, config, partial=True)
    if "sliding_window" not in config:
        raise file.refusal(
            "phi3.attention.sliding_window is missing; convert the model with a newer llama.cpp"
        )
    config["model_type"] = "phi3"
    config["sliding_window"] = config["sliding_window"] or None


def _read_gemma(model_type: str, pattern: int) -> Callable[[GgufFile, _Fields, dict[str, Any]], None]:
    def read(file: GgufFile, fields: _Fields, config: dict[str, Any]) -> None:
        _read_rope(file, fields, config)
        slides = fields.take_pattern(pattern, config["num_hidden_layers"])
        config["layer_types"] = ["sliding_attention" if slide else "full_attention" for slide in slides]
        config["model_type"] = model_type
        by_width = (file.architecture, config["num_hidden_layers"]) in _SCALED_BY_WIDTH
        width = config["hidden_size"] // config["num_attention_heads"] if by_width else config["head_dim"]
        config["query_pre_attn_scalar"] = width
        if model_type == "gemma3_text":
            config["rope_local_base_freq"] = fields.take("rope.freq_base_swa", 10000.0)

    return read


_ARCHITECTURES: Mapping[str, Callable[[GgufFile, _Fields, dict[str, Any]], None]] = {
    "llama": _read_llama,
    "qwen2": _read_qwen("qwen2"),
    "qwen3": _read_qwen("qwen3"),
    "qwen2moe": _read_qwen("qwen2_moe"),
    "qwen3moe": _read_qwen("qwen3_moe"),
    "phi3": _read_phi3,
    "gemma2": _read_gemma("gemma2", 2),
    "gemma3": _read_gemma("gemma3_text", 6),
}
