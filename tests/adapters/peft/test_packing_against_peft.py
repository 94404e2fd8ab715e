import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slora_adapters.peft.adapter import AdapterLimits
from slora_adapters.peft.packing import pack
from slora_adapters.peft.peft_directory import read_adapter
from tests.adapters.peft_models import SHAPE, base_model, deltas_by_peft, make_adapter
from tests.adapters.unpacking import unpack
from tests.support.covering import soaked
from tests.support.peft_adapters import EMBEDDING_KINDS

CASES = {
    "defaults": {},
    "odd_rank": {"r": 5, "lora_alpha": 7},
    "rank_one": {"r": 1, "lora_alpha": 3, "target_modules": ["down_proj"]},
    "rslora": {"r": 7, "lora_alpha": 16, "use_rslora": True},
    "attention_only": {"r": 3, "target_modules": ["q_proj", "v_proj"]},
    "one_layer": {"target_modules": ["k_proj", "up_proj"], "layers_to_transform": 1},
    "two_layers": {
        "target_modules": ["o_proj", "gate_proj"],
        "layers_to_transform": [0, 2],
        "layers_pattern": "layers",
    },
    "full_name_passes_the_layer_filter": {
        "target_modules": ["model.layers.0.mlp.up_proj", "q_proj"],
        "layers_to_transform": [2],
    },
    "regex": {"target_modules": r"model\.layers\.[02]\.(self_attn\.[qk]_proj|mlp\.down_proj)"},
    "regex_with_lookahead": {"target_modules": r"^(?!.*layers\.1\.).*\.(?:q|o|up)_proj$"},
    "excluded_by_name": {"exclude_modules": ["k_proj", "layers.1.mlp.up_proj"]},
    "excluded_by_regex": {"exclude_modules": r".*layers\.[01]\.mlp.*"},
    "rank_pattern": {"r": 4, "lora_alpha": 9, "rank_pattern": {"q_proj": 9, r"layers\.1\..*(v|up)_proj": 2}},
    "anchored_pattern": {"rank_pattern": {"^model.layers.2.self_attn.v_proj": 11, "v_proj": 3}},
    "alpha_pattern": {
        "r": 6,
        "use_rslora": True,
        "alpha_pattern": {"mlp.down_proj": 5, r"layers\.(0|2)\.self_attn\.\w+": 13},
        "rank_pattern": {"o_proj": 10},
    },
    "first_pattern_wins": {"alpha_pattern": {r"layers\.0.*": 4, "q_proj": 64}},
    "negative_alpha": {"lora_alpha": -4},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "mica": {"init_lora_weights": "mica"},
    **EMBEDDING_KINDS,
    "embedding_by_its_full_name": {"target_modules": ["model.embed_tokens"], "layers_to_transform": [0]},
    "excluded_head": {"target_modules": ["lm_head", "k_proj"], "exclude_modules": ["lm_head"]},
    "mica_on_the_embedding": {"target_modules": ["embed_tokens"], "init_lora_weights": "mica", "r": 4},
}


# Of cases that are read in the same way, all but one are for soak only.
MOSTLY_QUICK = soaked(
    CASES,
    *(
        "rslora",
        "two_layers",
        "full_name_passes_the_layer_filter",
        "regex_with_lookahead",
        "excluded_by_name",
    ),
    *(
        "excluded_by_regex",
        "anchored_pattern",
        "alpha_pattern",
        "first_pattern_wins",
        "mica_on_the_embedding",
    ),
    *EMBEDDING_KINDS,
)


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("case", MOSTLY_QUICK)
def test_packed_rows_reproduce_the_deltas_of_peft(tmp_path: Path, family: str, case: str) -> None:
    make_adapter(tmp_path, family=family, seed=len(case), **CASES[case])
    _compare_with_peft(tmp_path, family)


def test_the_order_of_patterns_in_the_file_decides(tmp_path: Path) -> None:
    make_adapter(tmp_path, alpha_pattern={r"layers\.1.*": 4, "q_proj": 64, "self_attn.q_proj": 100})
    path = tmp_path / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    for _ in range(2):
        path.write_text(json.dumps(config), encoding="utf-8")
        _compare_with_peft(tmp_path, "llama")
        config["alpha_pattern"] = dict(reversed(config["alpha_pattern"].items()))


def _compare_with_peft(directory: Path, family: str) -> None:
    (directory / "base").mkdir(exist_ok=True)
    base_model(family).save_pretrained(directory / "base")
    adapter = read_adapter(directory, SHAPE, AdapterLimits(base_directory=directory / "base"))
    packed = pack(adapter, SHAPE, "float32")
    deltas = deltas_by_peft(directory, family)
    assert set(adapter.pairs) == set(deltas)
    for module_id, delta in deltas.items():
        a, b = (torch.tensor(factor) for factor in unpack(packed, SHAPE, "float32", module_id))
        assert torch.equal(b.contiguous() @ a * packed.scales[module_id].item(), delta), module_id
    assert ((packed.scales != 0).sum()) == len(deltas)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("served", ["float16", "bfloat16", "float32"])
def test_weights_of_each_dtype_are_served_as_torch_would_round_them(
    tmp_path: Path, dtype: torch.dtype, served: str
) -> None:
    model = make_adapter(tmp_path, r=3, dtype=dtype)
    shape = replace(SHAPE, element_bytes=4 if served == "float32" else 2)
    packed = pack(read_adapter(tmp_path, shape, AdapterLimits(served_dtype=served)), shape, served)
    state = {name.replace(".default", ""): value for name, value in model.state_dict().items()}
    name = "base_model.model.model.layers.1.mlp.gate_proj.lora_{}.weight"
    for factor, ours in zip("AB", unpack(packed, shape, served, shape.module_id(1, 4)), strict=True):
        theirs = state[name.format(factor)].to(getattr(torch, served)).contiguous()
        bits = torch.int32 if served == "float32" else torch.int16
        assert theirs.view(bits).tolist() == ours.copy().view("i4" if served == "float32" else "i2").tolist()
