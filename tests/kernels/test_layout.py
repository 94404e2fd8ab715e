"""The layout of adapters knows which of them change K or V."""

import json
from dataclasses import asdict, replace

import pytest

from slora_kernels.layout import (
    EXPERT_PATHS,
    ROUTER_PATH,
    LinearShape,
    ModelShape,
    lay_out_adapter,
    llama_shape,
    mix_experts,
)

SHAPE = llama_shape(
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    hidden_size=64,
    intermediate_size=128,
    vocab_size=99,
    element_bytes=4,
)
LAST = "model.layers.2."


def changes_kv(shape: ModelShape, *modules: str) -> bool:
    return lay_out_adapter(shape, [int(module.path in modules) for module in shape.modules]).changes_kv


def test_only_modules_after_the_last_k_and_v_change_none_of_them() -> None:
    without = {module.path for module in SHAPE.modules if not changes_kv(SHAPE, module.path)}
    linears = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    assert without == {"lm_head", *(LAST + name for name in linears)}
    assert not changes_kv(SHAPE, *without)
    assert all(
        changes_kv(SHAPE, *without, module.path) for module in SHAPE.modules if module.path not in without
    )


def test_every_linear_may_change_k_and_v_if_layers_have_attention_several_times() -> None:
    shape = replace(SHAPE, num_layers_without_kv=-1)
    assert {module.path for module in shape.modules if not changes_kv(shape, module.path)} == {"lm_head"}


def test_the_groups_of_an_adapter_end_with_the_last_one_that_any_layer_changes() -> None:
    shape = mix_experts(SHAPE, {0, 2}, 5, 24, None)

    def num_groups(*modules: str) -> int:
        return lay_out_adapter(shape, [int(module.path in modules) for module in shape.modules]).num_groups

    assert num_groups("lm_head", "model.embed_tokens") == 0
    assert num_groups(LAST + "self_attn.v_proj") == 1
    assert num_groups(LAST + "self_attn.v_proj", "model.layers.0.self_attn.o_proj") == 2
    assert num_groups("model.layers.1.mlp.up_proj", LAST + "self_attn.q_proj") == 3
    assert num_groups("model.layers.1.mlp.down_proj") == 4
    assert num_groups("model.layers.0.mlp.gate") == 5
    assert num_groups("model.layers.0.mlp.experts.gate_up_proj") == 6
    assert num_groups("model.layers.0.mlp.experts.down_proj") == 7


@pytest.mark.parametrize("name", ["self_attn.qkv_proj", "attn.c_attn", "mlp.fc1", "self_attn.kv_b_proj"])
def test_a_linear_of_an_unknown_name_counts_as_changing_k_and_v(name: str) -> None:
    shape = replace(SHAPE, linears=(LinearShape(name, 64, 64),), groups=((0,),))
    assert changes_kv(shape, LAST + name)
    assert not changes_kv(shape, "lm_head")


def test_layers_with_experts_lack_the_linears_of_an_mlp() -> None:
    shape = mix_experts(SHAPE, {0, 2}, 5, 24, None)
    paths = [module.path.removeprefix("model.layers.") for module in shape.modules]
    attention = [f"self_attn.{name}_proj" for name in "qkvo"]
    mlps = [["mlp.gate", *EXPERT_PATHS], ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]]
    assert paths == [
        *(f"{layer}.{path}" for layer in range(3) for path in attention + mlps[layer == 1]),
        "model.embed_tokens",
        "lm_head",
    ]
    assert [shape.modules[site.first_module].path for site in shape.layer_sites(2)] == [
        "model.layers.2.self_attn.q_proj",
        "model.layers.2.self_attn.o_proj",
        "model.layers.2.mlp.gate",
        "model.layers.2.mlp.experts.gate_up_proj",
        "model.layers.2.mlp.experts.down_proj",
    ]
    assert shape.modules[shape.module_id(1, 6)].path == "model.layers.1.mlp.down_proj"
    assert [site.group for site in shape.sites] == list(range(shape.num_sites))
    assert ModelShape.from_plain(json.loads(json.dumps(asdict(shape)))) == shape


def test_a_model_with_experts_in_all_layers_has_no_linears_of_an_mlp() -> None:
    shape = mix_experts(SHAPE, {0, 1, 2}, 5, 24, None)
    assert [linear.path for linear in shape.linears] == [
        *(f"self_attn.{name}_proj" for name in "qkvo"),
        ROUTER_PATH,
        *EXPERT_PATHS,
    ]


def test_each_expert_has_rows_of_its_own() -> None:
    """Rows of 64 and 24 float32 take one segment each, rows of 2 * 24 one, too."""
    shape = mix_experts(SHAPE, {0, 1, 2}, 5, 24, None)
    gate_up, down = (module_id(shape, f"model.layers.0.{path}") for path in EXPERT_PATHS)
    ranks = [{gate_up: 3, down: 2}.get(module, 0) for module in range(shape.num_modules)]
    layout = lay_out_adapter(shape, ranks)
    assert layout.modules[gate_up].tolist() == [3, 0, 5 * 3]
    assert layout.modules[down].tolist() == [2, 0, 2 * 5 * 3 + 5 * 2]
    assert layout.num_segments == 2 * 5 * (3 + 2)
    assert layout.targets.max_group_rank == 3


def module_id(shape: ModelShape, path: str) -> int:
    return next(module_id for module_id, module in enumerate(shape.modules) if module.path == path)


def test_a_shared_expert_of_the_last_layer_changes_no_k_and_no_v() -> None:
    shape = mix_experts(SHAPE, {1, 2}, 5, 24, 32)
    experts = ("gate", "experts.gate_up_proj", "experts.down_proj")
    for path in ("shared_expert.up_proj", "shared_expert.down_proj", "shared_expert_gate", *experts):
        assert not changes_kv(shape, f"{LAST}mlp.{path}")
        assert changes_kv(shape, f"model.layers.1.mlp.{path}")
