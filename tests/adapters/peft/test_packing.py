import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slora_adapters.errors import AdapterInvalid
from slora_adapters.peft.adapter import Adapter, AdapterExtras, AdapterTensors, LoraPair, ModuleId, Vocabulary
from slora_adapters.peft.packing import PackedAdapter, Packer, PackingPlan, TensorPiece, pack, pack_into
from slora_adapters.peft.peft_config import PeftConfig
from slora_adapters.peft.tensor_file import StoredTensor, convert
from slora_kernels.layout import ModelShape, lay_out_adapter, llama_shape
from slora_kernels.partition import Partition
from tests.adapters.unpacking import unpack

CONFIG = PeftConfig(
    rank=1, alpha=1.0, use_rslora=False, rank_patterns=(), alpha_patterns=(), target_modules="all-linear",
    exclude_modules=(), layers_to_transform=None, layers_pattern=(),
)  # fmt: skip

shapes = st.builds(
    llama_shape,
    num_layers=st.integers(1, 3),
    hidden_size=st.integers(1, 150),
    num_heads=st.sampled_from([2, 4]),
    num_kv_heads=st.sampled_from([1, 2]),
    head_dim=st.integers(1, 40),
    intermediate_size=st.integers(1, 150),
    vocab_size=st.integers(1, 150),
    element_bytes=st.just(4),
)


def _adapter(shape: ModelShape, ranks: dict[ModuleId, int], seed: int = 0) -> Adapter:
    random = np.random.default_rng(seed)
    pairs = {}
    for module_id, rank in ranks.items():
        module = shape.modules[module_id]
        a = random.standard_normal((rank, module.in_width), np.float32)
        b = random.standard_normal((module.out_width, rank), np.float32)
        pairs[module_id] = LoraPair(
            module.path,
            StoredTensor(f"{module_id}.a", "F32", a),
            StoredTensor(f"{module_id}.b", "F32", b),
            1 + module_id,
        )
    return Adapter(CONFIG, AdapterTensors(pairs, {}, Vocabulary()), "0" * 64, AdapterExtras())


@given(st.data(), shapes)
def test_unpacking_returns_every_row_for_any_shape_and_ranks(data: st.DataObject, shape: ModelShape) -> None:
    modules = st.integers(0, shape.num_modules - 1)
    ranks = data.draw(st.dictionaries(modules, st.integers(1, 9), min_size=1))
    adapter = _adapter(shape, ranks)
    layout = lay_out_adapter(shape, adapter.ranks(shape))
    dirty = np.full(layout.num_bytes, 0xA5, np.uint8)
    packed = pack_into(adapter, Partition(shape, 1), "float32", layout, dirty)
    rows = 0
    for module_id, pair in adapter.pairs.items():
        a, b = unpack(packed, shape, "float32", module_id)
        assert np.array_equal(a, pair.a.values)
        assert np.array_equal(b, pair.b.values)
        assert packed.scales[module_id] == 1 + module_id
        widths = (shape.modules[module_id].in_width, shape.modules[module_id].out_width)
        rows += sum(pair.rank * shape.row_segments(width) for width in widths)
    assert rows == layout.num_segments, "the buffer is exactly its rows, so nothing old can stay in it"
    assert np.count_nonzero(packed.scales) == len(ranks)


@pytest.mark.parametrize("num_rows", [1, 37, 700, 1100])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wide_b_is_packed_in_pieces_of_any_number_of_rows(num_rows: int, dtype: str) -> None:
    shape = llama_shape(1, 1100, 2, 1, 40, 24, vocab_size=9, element_bytes=4 if dtype == "float32" else 2)
    adapter = _adapter(shape, {6: 70}, seed=num_rows)
    layout = lay_out_adapter(shape, adapter.ranks(shape))
    buffer = np.full(layout.num_bytes, 0xA5, np.uint8)
    plan = PackingPlan(adapter.tensors, Partition(shape, 1), dtype, layout)
    packer = Packer(plan, buffer)
    pair = adapter.pairs[6]
    for tensor in (pair.a, pair.b):
        for first in range(0, len(tensor.values), num_rows):
            values = tensor.values[first : first + num_rows]
            packer.write(plan.plan_pieces([TensorPiece(tensor, first, len(values), 0)]), values.reshape(-1))
    a, b = unpack(PackedAdapter(layout, packer.scales, buffer), shape, dtype, 6)
    assert np.array_equal(a, convert(pair.a.values, "F32", dtype))
    assert np.array_equal(b, convert(pair.b.values, "F32", dtype)) and b.shape == (1100, 70)


def test_packing_refuses_weights_that_overflow_in_the_served_dtype() -> None:
    shape = llama_shape(1, 8, 2, 1, 4, 8, vocab_size=9, element_bytes=2)
    adapter = _adapter(shape, {0: 2})
    adapter.pairs[0].a.values[1, 3] = 65520.0
    with pytest.raises(AdapterInvalid, match="overflows in float16"):
        pack(adapter, shape, "float16")
    assert pack(adapter, shape, "bfloat16").buffer.any()


def test_packing_for_another_element_size_raises() -> None:
    shape = llama_shape(1, 8, 2, 1, 4, 8, vocab_size=9, element_bytes=4)
    with pytest.raises(ValueError, match="takes 2 bytes, but the model shape has 4"):
        pack(_adapter(shape, {0: 2}), shape, "bfloat16")
