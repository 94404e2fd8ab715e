from dataclasses import replace

import pytest

from slora_kernels.layout import LinearShape, ModelShape, fuse_groups, llama_shape, mix_experts
from slora_kernels.partition import ModulePart, Partition

# 8 heads of 4 columns, 2 KV heads, MLPs of 24 columns, 10 tokens.
SHAPE = llama_shape(2, 16, 8, 2, 4, 24, 10, 4)
FUSED = fuse_groups(SHAPE, "self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")

SHARED = mix_experts(SHAPE, {1}, 6, 32, 16)
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
    "shape", [SHAPE, FUSED, SHARED, OTHER], ids=["linears", "fused", "experts", "transformers"]
)
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_the_parts_of_all_ranks_cover_each_module_and_have_the_widths_of_the_rank_shape(
    shape: ModelShape, size: int
) -> None:
    partition = Partition(shape, size)
    whole, part_shape = partition.shape, partition.rank_shape
    for module_id, (module, of_rank) in enumerate(zip(whole.modules, part_shape.modules, strict=True)):
        parts = [partition.part(module_id, rank) for rank in range(size)]
        inputs = {column for part in parts for column in part.inputs}
        outputs = {row for part in parts for rows in part.outputs for row in rows}
        assert inputs == set(range(module.in_width)) and outputs == set(range(module.out_width))
        # The last part of the vocabulary may be shorter, because the rest of it is padding.
        assert (len(parts[0].inputs), sum(map(len, parts[0].outputs))) == (
            of_rank.in_width,
            of_rank.out_width,
        )
        if module_id < whole.embedding_module:
            assert len({(len(part.inputs), sum(map(len, part.outputs))) for part in parts}) == 1


def test_ranks_share_kv_heads_where_there_are_fewer_of_them() -> None:
    partition = Partition(SHAPE, 4)
    keys = [partition.part(1, rank).outputs for rank in range(4)]
    assert keys == [(range(4),), (range(4),), (range(4, 8),), (range(4, 8),)]
    assert partition.rank_shape.num_kv_heads == 1


def test_a_fused_linear_is_cut_in_each_of_its_parts() -> None:
    part = Partition(FUSED, 2).part(0, 1)
    assert part == ModulePart(range(16), (range(16, 32), range(36, 40), range(44, 48)))


def test_linears_of_other_names_are_divided_as_they_are_described() -> None:
    partition = Partition(OTHER, 4)
    parts = [partition.part(module_id, 3) for module_id in range(6)]
    assert parts == [
        ModulePart(range(16), (range(36, 48),)),
        ModulePart(range(16), (range(3),)),  # It does not divide.
        ModulePart(range(16), (range(4),)),
        ModulePart(range(16), (range(18, 24), range(42, 48))),
        ModulePart(range(18, 24), (range(16),)),
        ModulePart(range(16), (range(6, 8),)),
    ]


def test_all_ranks_compute_the_single_head_of_a_class_of_transformers() -> None:
    partition = Partition(replace(OTHER, num_heads=1, num_kv_heads=1), 2)
    assert [partition.heads(rank) for rank in range(2)] == [partition.kv_heads(1)] * 2 == [range(1)] * 2


def test_a_vocabulary_that_does_not_divide_is_padded() -> None:
    partition = Partition(SHAPE, 4)
    assert [partition.tokens(rank) for rank in range(4)] == [range(3), range(3, 6), range(6, 9), range(9, 10)]
    assert partition.rank_shape.vocab_size == 3


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
