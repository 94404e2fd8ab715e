from dataclasses import replace

import pytest

from slora_kernels.layout import LinearShape, llama_shape, mix_experts
from slora_kernels.partition import Partition

# 8 heads of 4 columns, 2 KV heads, MLPs of 24 columns, 10 tokens.
SHAPE = llama_shape(2, 16, 8, 2, 4, 24, 10, 4)
# As `slora.models.model_structure` describes linears of transformers' classes.
OTHER = replace(
    SHAPE,
    linears=(
        LinearShape("attention.query_key_value", 16, 48, division="gathered"),
        LinearShape("attention.scale", 16, 3, division="gathered"),
        LinearShape("router", 16, 4, role="router", division="whole"),
        LinearShape("mlp.first", 16, 48, division="halves"),
        LinearShape("mlp.last", 24, 16, division="columns"),
        LinearShape("experts.up_proj", 16, 8, num_experts=6, role="experts", division="rows"),
    ),
    groups=((0,), (1,), (2,), (3,), (4,), (5,)),
)


@pytest.mark.parametrize(
    ("shape", "size", "message"),
    [
        (SHAPE, 3, "8 attention heads, which can't be divided among 3 ranks"),
        (llama_shape(1, 16, 12, 4, 4, 24, 10, 4), 6, "4 KV heads; choose a number of ranks that divides it"),
        (llama_shape(1, 16, 8, 2, 4, 20, 10, 4), 8, "20 columns .intermediate_size., which can't be divided"),
        (mix_experts(SHAPE, {1}, 6, 32, 20), 8, "20 columns .shared_expert_intermediate_size., which can't be divided"),
        (OTHER, 16, "8 attention heads"),
        (llama_shape(1, 16, 1, 1, 16, 24, 10, 4), 2, "1 attention heads"),
        (replace(OTHER, num_heads=5, num_kv_heads=1), 5, "mlp.first has 24 outputs, which can't be divided among 5"),
    ],
)  # fmt: skip
def test_a_size_that_does_not_divide_the_model_is_refused(shape: object, size: int, message: str) -> None:
    assert isinstance(shape, type(SHAPE))
    with pytest.raises(ValueError, match=message):
        Partition(shape, size)
