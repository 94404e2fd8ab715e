"""The floor is counted from the launchers themselves; here for models small enough to count by hand."""

import pytest

from bench.dry_step import MetaModel, StepShape
from bench.kernels import MODELS, GpuRates, floor_row

LAYERS, HIDDEN, INTERMEDIATE, HEAD_DIM, HEADS, KV_HEADS, VOCAB = 3, 256, 512, 32, 8, 4, 1000
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM
SMALL = MODELS["llama-8b"] | {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": INTERMEDIATE,
    "vocab_size": VOCAB,
}


@pytest.fixture(scope="module")
def model() -> MetaModel:
    return MetaModel(SMALL)


def test_the_base_is_counted_as_by_hand(model: MetaModel) -> None:
    count = model.count(StepShape(batch=4, adapters=0, context=20))
    layer = HIDDEN * (QKV + HEADS * HEAD_DIM + 3 * INTERMEDIATE)
    weights = LAYERS * layer + VOCAB * HIDDEN
    assert count.weight_bytes == 2 * weights and count.base_flops == 2 * 4 * weights
    assert count.kv_bytes == 4 * 21 * 2 * LAYERS * KV_HEADS * HEAD_DIM * 2
    assert count.lora_launches == count.adapter_bytes == count.shrunk_bytes == count.lora_flops == 0
    # A layer: 4 matmuls, 2 norms, rotary, attention of one stretch, activation; around them embedding, the first norm,
    # the rows that sample, the head, its widening and the greatest of each row.
    assert count.launches == 9 * LAYERS + 7


def test_adapters_are_read_once_each_and_multiply_their_own_rows(model: MetaModel) -> None:
    one, four = (model.count(StepShape(4, adapters, context=20, rank=8)) for adapters in (1, 4))
    widths_in = 3 * HIDDEN + HEADS * HEAD_DIM + 2 * HIDDEN + INTERMEDIATE
    widths_out = QKV + HIDDEN + 2 * INTERMEDIATE + HIDDEN
    assert one.adapter_bytes == LAYERS * 8 * 2 * (widths_in + widths_out)
    assert four.adapter_bytes == 4 * one.adapter_bytes
    assert four.lora_flops == one.lora_flops == 4 * one.adapter_bytes
    assert four.base_flops == one.base_flops and four.launches == one.launches


@pytest.mark.parametrize("tokens", (1, 40))
@pytest.mark.parametrize("adapters", (1, 3))
def test_no_layer_makes_more_than_eight_launches_for_lora(
    model: MetaModel, adapters: int, tokens: int
) -> None:
    count = model.count(StepShape(3, adapters, tokens=tokens))
    assert 0 < count.lora_launches_by_layer <= 8


def test_a_floor_is_bytes_over_bandwidth_until_products_take_longer(model: MetaModel) -> None:
    step = StepShape(4, 4, context=20)
    by_bytes = floor_row(model, step, GpuRates(bytes_per_s=1e9, flops=1e30))
    count = model.count(step)
    base_bytes = count.weight_bytes + count.kv_bytes
    assert by_bytes["base ms"] == pytest.approx(base_bytes / 1e6)
    assert by_bytes["with LoRA ms"] == pytest.approx((base_bytes + count.adapter_bytes) / 1e6)
    by_products = floor_row(model, step, GpuRates(bytes_per_s=1e30, flops=1e9))
    assert by_products["keeps %"] == pytest.approx(
        100 * count.base_flops / (count.base_flops + count.lora_flops)
    )
