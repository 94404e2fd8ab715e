"""Bytes and operations of a model, computed from its config.json without its weights."""

from collections.abc import Iterator
from dataclasses import dataclass

from slora.core.engine_config import QUANTIZED_BITS, EngineConfig
from slora.models.model_config import ExpertConfig, ModelConfig
from slora.models.model_spec import ELEMENT_BYTES, ModelSpec
from slora_kernels.layout import ROUTER_PATH, ModelShape
from slora_kernels.partition import Partition

_FLOAT_BYTES = 4
_GATES = (f".{ROUTER_PATH}", ".mlp.shared_expert_gate")
# The tables of bitsandbytes. Their numbers are multiplied in three parts of 16 bits (`gpu/coded_linear.py`).
_TABLES_OF_PARTS, _NUM_PARTS = ("nf4", "fp4"), 3
# Bytes per logit during sampling: one copy in the model's dtype, some in float32, and a sorted one with indices.
_SAMPLING_BYTES = 24


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Bytes and operations of a model, or of the part that one tensor-parallel rank computes."""

    weight_bytes: int  # Size of all weights and tables on the device.
    step_bytes: int  # The part of them that each step reads. A step of many tokens uses all experts.
    # Operations in the layers for one token, without attention. Numbers that a GPU multiplies in parts count as often.
    token_flop: float
    head_flop: float  # Operations for one row of logits.
    is_quantized: bool
    # The sums and gathers of a step among tensor-parallel ranks, and the bytes that a rank sends for one token.
    num_exchanges: int = 0
    sent_bytes: float = 0.0


def measure_model(spec: ModelSpec, config: EngineConfig) -> ModelSize:
    """Computes a model's size from config.json.

    With tensor parallelism, the result is the size of one rank's part. Raises ConfigError if the model can't be
    divided.
    """
    dtype = spec.resolve_dtype(config.dtype)
    element = ELEMENT_BYTES[dtype]
    partition, model = spec.partition(dtype, config.tensor_parallel_size), spec.decoder
    shape = partition.rank_shape
    head = shape.vocab_size * shape.hidden_size
    widths = list(_list_exchanges(partition, spec)) if partition.size > 1 else []
    # In a ring, each rank sends what it gathers once, and what it sums twice.
    exchanges = len(widths), sum(widths) * element * (partition.size - 1) / partition.size
    if model is None:
        undivided = _count_numbers(partition.shape) - _count_numbers(shape)
        numbers = spec.num_parameters - undivided
        return ModelSize(
            numbers * element,
            (numbers - head) * element,
            2.0 * max(0, numbers - 2 * head),
            2.0 * head,
            False,
            *exchanges,
        )
    linears = [module for module in shape.modules[:-2] if module.num_experts == 1]
    experts = _count_experts(model, config.tensor_parallel_size)
    plain = [linear for linear in linears if _is_plain(linear.path, model)]
    plain_numbers = sum(linear.in_width * linear.out_width for linear in plain)
    numbers = shape.num_weights - plain_numbers + experts.numbers
    rows = (
        sum(linear.out_width for linear in linears) - sum(linear.out_width for linear in plain) + experts.rows
    )
    is_quantized = config.quantization != "auto" or model.quantization is not None
    layers = _measure_quantized(model, config, numbers, rows) if is_quantized else numbers * element
    layers += plain_numbers * element
    codes = model.quantization.codes if model.quantization is not None else None
    is_in_parts = codes is not None and codes.format in _TABLES_OF_PARTS and element < _FLOAT_BYTES
    matrices = head * element * (1 if model.tie_word_embeddings else 2)
    return ModelSize(
        weight_bytes=layers
        + matrices
        + _measure_vectors(model, shape, config.tensor_parallel_size, element)
        + _measure_rotary(model, config),
        step_bytes=layers + head * element,
        token_flop=2.0
        * (
            (shape.num_weights - plain_numbers) * (_NUM_PARTS if is_in_parts else 1)
            + plain_numbers
            + experts.numbers_of_token
        ),
        head_flop=2.0 * head,
        is_quantized=is_quantized,
        num_exchanges=exchanges[0],
        sent_bytes=exchanges[1],
    )


def _list_exchanges(partition: Partition, spec: ModelSpec) -> Iterator[int]:
    """Yields for each sum or gather of a step how many numbers of a token a rank receives: those of a sum twice."""
    whole, part = partition.shape, partition.rank_shape
    yield 2 * whole.hidden_size
    if spec.decoder is not None:
        yield from [2 * whole.hidden_size] * (2 * whole.num_layers)
        return
    yield from [whole.num_heads * whole.head_dim] * len(spec.attention_paths)
    for module, own in zip(whole.modules[:-2], part.modules[:-2], strict=True):
        if own.in_width < module.in_width:
            yield 2 * module.out_width
        elif module.division == "gathered" and own.out_width < module.out_width:
            yield module.out_width


def _count_numbers(shape: ModelShape) -> int:
    """The numbers of all weights and biases of a shape's modules."""
    *linears, embedding, head = shape.modules
    counted = [*linears, embedding] if shape.ties_head else [*linears, embedding, head]
    return sum(
        module.num_experts * module.in_width * module.out_width + module.has_bias * module.out_width
        for module in counted
    )


def _is_plain(path: str, model: ModelConfig) -> bool:
    """Whether a linear stays in the dtype of the model: routers, the gates of shared experts, and what the checkpoint
    did not quantize.
    """
    kept = model.quantization.kept if model.quantization is not None else ()
    names = (f"{path}.", f"{path.replace(model.root, model.stored_root, 1)}.")
    return path.endswith(_GATES) or any(
        name.startswith(f"{part}.") or name.endswith(f".{part}.") for name in names for part in kept
    )


def _measure_quantized(model: ModelConfig, config: EngineConfig, numbers: int, rows: int) -> int:
    """Bytes of quantized linears. numbers, rows: those of all linears together."""
    codes = model.quantization.codes if model.quantization is not None else None
    if codes is not None:
        # Scales, and minimums if there are any, are at most float32.
        num_groups = numbers // codes.group if codes.group is not None else rows
        return numbers // 2 + num_groups * _FLOAT_BYTES * (2 if codes.has_zero_points else 1)
    if config.quantization == "int4":
        return int(numbers * QUANTIZED_BITS["int4"] / 8)
    return numbers + rows * _FLOAT_BYTES


@dataclass(frozen=True, slots=True)
class _ExpertCounts:
    """Counts over all layers, for one rank."""

    # Elements and rows of the experts' weights.
    numbers: int = 0
    rows: int = 0
    numbers_of_token: int = 0  # Elements that one token is multiplied with.


def _count_experts(model: ModelConfig, num_ranks: int) -> _ExpertCounts:
    experts, hidden = model.experts, model.hidden_size
    if experts is None:
        return _ExpertCounts()
    width, num_layers = experts.width // num_ranks, len(experts.layers)
    return _ExpertCounts(
        numbers=num_layers * experts.count * 3 * width * hidden,
        rows=num_layers * experts.count * (2 * width + hidden),
        numbers_of_token=num_layers * experts.chosen * 3 * width * hidden,
    )


def measure_activations(
    shape: ModelShape, experts: ExpertConfig | None, num_tokens: int, num_rows: int, num_ranks: int
) -> int:
    """Approximate bytes of the largest step's activations.

    shape: of one rank's part. num_rows: number of sequences that sample a token.
    """
    widest = max(linear.out_width for linear in shape.linears if linear.num_experts == 1)
    by_token = shape.element_bytes * (
        4 * shape.hidden_size + 3 * widest + 2 * shape.num_heads * shape.head_dim
    )
    if experts is not None:
        # For each expert of a token: its input or output in two orders, the intermediate columns, and float32 products.
        row = 2 * shape.hidden_size + 3 * experts.width // num_ranks
        by_token += experts.chosen * (row * shape.element_bytes + shape.hidden_size * _FLOAT_BYTES)
    return num_tokens * by_token + num_rows * shape.vocab_size * _SAMPLING_BYTES


def _measure_vectors(model: ModelConfig, shape: ModelShape, num_ranks: int, element: int) -> int:
    """Bytes of the norms and biases of a rank. shape: the sizes of its part."""
    hidden = model.num_layers * (4 if model.post_norms else 2) * model.hidden_size + model.hidden_size
    heads = model.num_layers * 2 * model.head_dim if model.qk_norm else 0
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    biases = model.num_layers * (
        model.qkv_bias * (query + 2 * key)
        + model.output_bias * shape.hidden_size
        + model.mlp_bias * (2 * model.intermediate_size // num_ranks + shape.hidden_size)
    )
    return (hidden + heads) * (_FLOAT_BYTES if model.norm_offset else element) + biases * element


def _measure_rotary(model: ModelConfig, config: EngineConfig) -> int:
    """Bytes of the tables of cosines and sines, see `slora.models.rotary`."""
    positions = config.max_model_len or model.max_positions
    rows = positions * (1 if model.rope_switch is None else 2)
    return sum(rows * (rope.rotary_dim + rope.rotary_dim % 2) * _FLOAT_BYTES for rope in model.ropes)
