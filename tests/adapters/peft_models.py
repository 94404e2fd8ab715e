"""Tiny random base models, and adapters made by PEFT itself. PEFT is the oracle of these tests."""

from functools import cache
from pathlib import Path

import torch
from peft import PeftModel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from slora_adapters.peft.adapter import ModuleId
from slora_kernels.layout import llama_shape
from tests.support import peft_adapters

# Widths that are no multiple of a segment, grouped-query attention, and a head size that is not hidden size / heads.
VOCAB_SIZE = 64
INTERMEDIATE_SIZE = 72
SHAPE = llama_shape(
    num_layers=3,
    hidden_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=20,
    intermediate_size=INTERMEDIATE_SIZE,
    vocab_size=VOCAB_SIZE,
    element_bytes=4,
)
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": SHAPE.hidden_size,
    "intermediate_size": INTERMEDIATE_SIZE,
    "num_hidden_layers": SHAPE.num_layers,
    "num_attention_heads": SHAPE.num_heads,
    "num_key_value_heads": SHAPE.num_kv_heads,
    "head_dim": SHAPE.head_dim,
}


@cache
def base_config(family: str) -> LlamaConfig | Qwen2Config:
    return {"llama": LlamaConfig, "qwen2": Qwen2Config}[family](**_SIZES)


def base_model(family: str = "llama") -> PreTrainedModel:
    """A new model with the same weights at each call, because PEFT modifies the model that it is given."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return {"llama": LlamaForCausalLM, "qwen2": Qwen2ForCausalLM}[family](base_config(family))


def deltas_by_peft(directory: Path, family: str = "llama") -> dict[ModuleId, torch.Tensor]:
    """The delta that PEFT adds to each module's weight when it loads the adapter in `directory`."""
    with peft_adapters.quiet_peft():
        model = PeftModel.from_pretrained(base_model(family), directory)
    found = {}
    for module_id, module in enumerate(SHAPE.modules):
        layer = model.get_submodule("base_model.model." + module.path)
        if hasattr(layer, "lora_A"):
            delta = layer.get_delta_weight("default")
            found[module_id] = delta.T if module_id == SHAPE.embedding_module else delta
    return found


def make_adapter(
    directory: Path,
    *,
    family: str = "llama",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **lora: object,
) -> PeftModel:
    """Makes and saves an adapter with random A and B on a new base. lora: fields of LoraConfig."""
    return peft_adapters.make_adapter(directory, base_model(family), seed=seed, dtype=dtype, **lora)
