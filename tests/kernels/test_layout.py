"""The layout of adapters knows which of them change K or V."""

from dataclasses import replace

import pytest

from slora_kernels.layout import (
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


@pytest.mark.parametrize("name", ["self_attn.qkv_proj", "attn.c_attn", "mlp.fc1", "self_attn.kv_b_proj"])
def test_a_linear_of_an_unknown_name_counts_as_changing_k_and_v(name: str) -> None:
    shape = replace(SHAPE, linears=(LinearShape(name, 64, 64),), groups=((0,),))
    assert changes_kv(shape, LAST + name)
    assert not changes_kv(shape, "lm_head")


def test_a_shared_expert_of_the_last_layer_changes_no_k_and_no_v() -> None:
    shape = mix_experts(SHAPE, {1, 2}, 5, 24, 32)
    experts = ("gate", "experts.gate_up_proj", "experts.down_proj")
    for path in ("shared_expert.up_proj", "shared_expert.down_proj", "shared_expert_gate", *experts):
        assert not changes_kv(shape, f"{LAST}mlp.{path}")
        assert changes_kv(shape, f"model.layers.1.mlp.{path}")
