"""Adapters of models whose modules have other names than Llama's. Only the base's shape defines the names."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    GPTBigCodeConfig,
    GPTNeoXConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from slora.models.model_structure import read_transformers_spec
from slora_adapters.limits import AdapterLimits
from slora_adapters.peft.packing import pack
from slora_adapters.peft.peft_directory import read_adapter
from slora_kernels.layout import ModelShape
from tests.adapters.unpacking import unpack
from tests.support.peft_adapters import make_adapter, quiet_peft

CONFIGS: dict[str, PreTrainedConfig] = {
    "opt": OPTConfig(
        vocab_size=50,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
    ),
    "gpt_neox": GPTNeoXConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
    ),
    "gpt_bigcode": GPTBigCodeConfig(
        vocab_size=50,
        n_embd=32,
        n_inner=48,
        n_layer=2,
        n_head=2,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
    ),
}
CASES: dict[str, dict[str, object]] = {
    "opt all linear": {"r": 3},
    "opt one layer": {"target_modules": ["k_proj", "fc2"], "layers_to_transform": 1},
    "opt by pattern": {"target_modules": r".*\.layers\.0\..*(out_proj|fc1)", "r": 2},
    "opt embedding": {"target_modules": ["embed_tokens", "fc1"], "rank_pattern": {"decoder.embed_tokens": 5}},
    "gpt_neox all linear": {"r": 2},
    "gpt_neox one layer": {
        "target_modules": ["query_key_value"],
        "layers_to_transform": 0,
        "layers_pattern": "layers",
    },
    "gpt_neox embedding and head": {"target_modules": ["embed_in", "lm_head", "dense"], "r": 4},
    "gpt_bigcode one layer": {
        "target_modules": ["c_fc", "c_attn"],
        "layers_to_transform": 1,
        "layers_pattern": "h",
    },
    "gpt_bigcode head in full": {"target_modules": ["lm_head", "mlp.c_proj"], "layers_to_transform": [0]},
    "gpt_bigcode embedding": {"target_modules": ["transformer.wte", "c_attn"], "alpha_pattern": {"wte": 3}},
}


@dataclass(frozen=True, slots=True)
class Base:
    directory: Path
    shape: ModelShape

    def load(self) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(self.directory)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Base]:
    def write(name: str) -> Base:
        directory = tmp_path_factory.mktemp(name)
        AutoModelForCausalLM.from_config(CONFIGS[name]).save_pretrained(directory)
        return Base(directory, read_transformers_spec(directory).sizes)

    return cache(write)


@pytest.mark.parametrize("case", CASES)
def test_packed_rows_reproduce_the_deltas_of_peft(
    tmp_path: Path, bases: Callable[[str], Base], case: str
) -> None:
    base = bases(case.split()[0])
    make_adapter(tmp_path, base.load(), seed=len(case), **CASES[case])
    adapter = read_adapter(tmp_path, base.shape, AdapterLimits(base_directory=base.directory))
    packed = pack(adapter, base.shape, "float32")
    deltas = deltas_by_peft(tmp_path, base)
    assert {pair.path for pair in adapter.pairs.values()} == set(deltas)
    for module_id, pair in adapter.pairs.items():
        a, b = (torch.tensor(factor) for factor in unpack(packed, base.shape, "float32", module_id))
        assert torch.equal(b.contiguous() @ a * packed.scales[module_id].item(), deltas[pair.path]), pair.path


def deltas_by_peft(directory: Path, base: Base) -> dict[str, torch.Tensor]:
    with quiet_peft():
        model = PeftModel.from_pretrained(base.load(), directory)
    found = {}
    for name, layer in model.named_modules():
        path = name.removeprefix("base_model.model.")
        if hasattr(layer, "get_delta_weight"):
            delta = layer.get_delta_weight("default")
            found[path] = delta.T if path == base.shape.embedding_path else delta
    return found
