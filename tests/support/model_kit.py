"""A tiny base model, one adapter of each kind for it, and an oracle that loads all of them at its first use."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from slora.models.model_spec import ModelSpec, read_model_spec
from slora_kernels.kv_format import KVFormat
from tests.support.oracle import Oracle
from tests.support.peft_adapters import (
    EXPERT_KINDS,
    FUSED_KINDS,
    KINDS,
    LATENT_KINDS,
    RECURRENT_KINDS,
    WHOLE_KINDS,
    make_adapter,
)
from tests.support.tiny_models import LATENT_MODELS, OTHER_MODELS, RECURRENT_MODELS, make_model, write_model

# A and B with this standard deviation make weight deltas about as large as the base weights.
_ADAPTER_STD = 0.15

_SEVEN: dict[str, object] = {
    "r": 5,
    "lora_alpha": 7,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}


@dataclass(frozen=True)
class ModelKit:
    directory: Path
    adapters: dict[str, Path]
    # The models in memory that PEFT wrote as `adapters`. Loading them would take longer than most tests.
    trained: Mapping[str, PeftModel] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def oracle(self) -> Oracle:
        return Oracle(self.directory, self.adapters, trained=self.trained)

    @cached_property
    def spec(self) -> ModelSpec:
        """Reading it again would run a model of transformers' classes again, which takes longer than its tests."""
        return read_model_spec(self.directory)

    def read_model(self) -> PreTrainedModel:
        """A copy of the base model, on which another adapter may be trained."""
        return AutoModelForCausalLM.from_pretrained(self.directory)

    def path(self, adapter: str | None) -> Path | None:
        return self.adapters[adapter] if adapter is not None else None

    def pool_bytes(
        self,
        num_pages: int,
        *,
        dtype: str = "float32",
        block_tokens: int = 16,
        kv_format: KVFormat = KVFormat.MODEL,
    ) -> int:
        shape = self.spec.shape(dtype)
        return num_pages * shape.num_kv_layers * shape.layer_page_bytes(block_tokens, kv_format)


# Returns the kit of a model by name.
Kits = Callable[[str], ModelKit]


def spoil_token(kit: ModelKit, directory: Path, token: int, value: float) -> ModelKit:
    """The same kit with a number of the token's embedding that is not finite."""
    shutil.copytree(kit.directory, directory)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][token, 0] = value
    save_file(tensors, path, metadata={"format": "pt"})
    return replace(kit, directory=directory, trained={})


def kinds_for(model: str) -> Mapping[str, dict[str, object]]:
    """One adapter of each kind, as fields of LoraConfig, with the names of the model's own linears."""
    if model in ("mixtral", "qwen3_moe", "qwen3_moe_mixed"):
        return EXPERT_KINDS
    # A token passes through all linears of attention, but not through those of all experts.
    if model == "phimoe":
        return {"r8_on_q_and_v": KINDS["r8_on_q_and_v"]}
    # The latter pages hold whole keys and values.
    if model in (*LATENT_MODELS, "hy_v4", "mistral_large4"):
        return LATENT_KINDS
    # One linear outside the layers is not adapted, which "all-linear" would name.
    if model == "gemma4_text":
        return {"r8_on_q_and_v": KINDS["r8_on_q_and_v"], "odd_rank": _SEVEN}
    if model in ("gpt_oss", "llama4_text"):
        return {kind: EXPERT_KINDS[kind] for kind in ("r8_on_q_and_v", "r16_on_attention")}
    if model in (
        "falcon_h1",
        "nemotron_h",
        "mamba2",
    ):  # peft refuses to adapt the output of their recurrent layers.
        return {
            **RECURRENT_KINDS,
            "r3_on_recurrent_layers": {"r": 3, "lora_alpha": 7, "target_modules": ["in_proj"]},
        }
    if model == "glm5_next":
        own = {
            "target_modules": r".*\.language_model\..*\.self_attn\.(\w+_proj|forget_gate\.\w+|kv_a_proj_with_mqa)"
        }
        return {"r4_on_all": {"r": 4, "lora_alpha": 6, **own}, "odd_rank": {"r": 5, "lora_alpha": 7, **own}}
    if model in RECURRENT_MODELS:
        return RECURRENT_KINDS
    if model in OTHER_MODELS:
        return WHOLE_KINDS
    return FUSED_KINDS if model.startswith("phi3") else KINDS


def _leave_out_layers(lora: dict[str, Any], num_layers: Any) -> dict[str, Any]:
    """The fields of LoraConfig for a model that has only the first `num_layers` layers, unless it is None."""
    layers = lora.get("layers_to_transform")
    if layers is None or num_layers is None:
        return lora
    return {**lora, "layers_to_transform": [layer for layer in layers if layer < num_layers]}


def make_kit(
    root: Path, model: str, kinds: Mapping[str, dict[str, object]] | None = None, **changes: object
) -> ModelKit:
    """kinds: None stands for one adapter of each kind. changes: fields of the model's config."""
    write_model(root / "base", model, **changes)
    adapters, trained = {}, {}
    for seed, (kind, lora) in enumerate((kinds_for(model) if kinds is None else kinds).items()):
        adapters[kind] = root / kind
        # peft warns unless it is told which linears are stored transposed.
        transposed = {"fan_in_fan_out": True} if model == "gpt2" else {}
        base = make_model(model, **changes)
        fields = _leave_out_layers(lora, changes.get("num_hidden_layers"))
        made = make_adapter(root / kind, base, seed=seed, std=_ADAPTER_STD, **transposed, **fields)
        # For a model with experts, PEFT changes the patterns in an adapter's config when it loads it.
        if not any(hasattr(module, "experts") for module in base.modules()):
            trained[kind] = made
    return ModelKit(root / "base", adapters, trained)
