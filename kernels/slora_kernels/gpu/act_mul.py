"""activation(gate) * up over the fused gate_up output of a gated MLP (arXiv 2002.05202)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slora_kernels.batch import Activation
from slora_kernels.gpu.lora_columns import add_scaled, find_module, multiply_b
from slora_kernels.gpu.lora_delta import RowDelta, bind_delta
from slora_kernels.launch import Launch

# Columns per program. In a 16-bit dtype, each of NVIDIA's 128 threads then has two 16-byte loads. On an MI300, four
# warps have 256 threads, and each thread has one such load.
BLOCK_COLUMNS = 2048
# Columns, warps and rows of B in flight of a program that also expands. Each of NVIDIA's 64 threads has one 16-byte
# load for each row of B, and eight sums for each of the eight rows of gate and up.
_DELTA_COLUMNS, _DELTA_WARPS, _DELTA_RANK = 512, 2, 16


@triton.jit
def _sigmoid(x):
    # exp of a negative number cannot overflow.
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def _act_mul(gate, up, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        factor = _sigmoid(gate)
    elif ACTIVATION == "gelu":
        factor = 0.5 + 0.5 * tl.erf(gate * 0.7071067811865476)
    else:
        # 0.5 (1 + tanh(y)) = sigmoid(2 y); 2 sqrt(2 / pi) = 1.596.
        factor = _sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    return gate * factor * up


@triton.jit(do_not_specialize=["first_module"])
def _act_mul_kernel(
    gate_up,
    out,
    shrunk,
    adapter_pages,
    row_slots,
    row_weights,
    page_table,
    modules,
    scales,
    first_module,
    adapter_page_stride,
    table_stride,
    shrunk_stride,
    WIDTH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_MODULES: tl.constexpr,
    SEGMENT: tl.constexpr,
    PAGE_SEGMENTS: tl.constexpr,
    TWO_PAGES: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    source = gate_up + row * (2 * WIDTH) + columns
    target = out + row * WIDTH + columns
    if shrunk is None:
        gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(source + WIDTH, mask=inside, other=0.0).to(tl.float32)
        tl.store(target, _act_mul(gate, up, ACTIVATION).to(out.dtype.element_ty), mask=inside)
    else:
        # The program of a tile's first row computes all rows of the tile, so that they share the read of B.
        size = tl.load(row_slots + row * 2 + 1)
        if size == 0:
            return
        slot, weight = tl.load(row_slots + row * 2), tl.load(row_weights + row)
        # Tensors, because the interpreter cannot combine a mask with a comparison of scalars.
        sizes = size + columns * 0
        inside_1, inside_2, inside_3 = inside & (sizes > 1), inside & (sizes > 2), inside & (sizes > 3)
        table, y = page_table + slot * table_stride, shrunk + row * shrunk_stride
        rank, first_row, first_segment, gate_scale = find_module(
            modules, scales, slot, weight, first_module, NUM_MODULES
        )
        gate_0, gate_1, gate_2, gate_3 = multiply_b(
            y + first_row,
            size,
            shrunk_stride,
            adapter_pages,
            table,
            first_segment,
            rank,
            columns,
            inside,
            adapter_page_stride,
            WIDTH,
            SEGMENT,
            PAGE_SEGMENTS,
            TWO_PAGES,
            BLOCK_R,
            4,
        )
        rank, first_row, first_segment, up_scale = find_module(
            modules, scales, slot, weight, first_module + 1, NUM_MODULES
        )
        up_0, up_1, up_2, up_3 = multiply_b(
            y + first_row,
            size,
            shrunk_stride,
            adapter_pages,
            table,
            first_segment,
            rank,
            columns,
            inside,
            adapter_page_stride,
            WIDTH,
            SEGMENT,
            PAGE_SEGMENTS,
            TWO_PAGES,
            BLOCK_R,
            4,
        )
        # All loads come before the first store, because the compiler cannot move a load before a store that may write
        # to the same address.
        gate_0 = add_scaled(tl.load(source, mask=inside, other=0.0), gate_0, gate_scale)
        up_0 = add_scaled(tl.load(source + WIDTH, mask=inside, other=0.0), up_0, up_scale)
        gate_1 = add_scaled(tl.load(source + 2 * WIDTH, mask=inside_1, other=0.0), gate_1, gate_scale)
        up_1 = add_scaled(tl.load(source + 3 * WIDTH, mask=inside_1, other=0.0), up_1, up_scale)
        gate_2 = add_scaled(tl.load(source + 4 * WIDTH, mask=inside_2, other=0.0), gate_2, gate_scale)
        up_2 = add_scaled(tl.load(source + 5 * WIDTH, mask=inside_2, other=0.0), up_2, up_scale)
        gate_3 = add_scaled(tl.load(source + 6 * WIDTH, mask=inside_3, other=0.0), gate_3, gate_scale)
        up_3 = add_scaled(tl.load(source + 7 * WIDTH, mask=inside_3, other=0.0), up_3, up_scale)
        element = out.dtype.element_ty
        tl.store(target, _act_mul(gate_0, up_0, ACTIVATION).to(element), mask=inside)
        tl.store(target + WIDTH, _act_mul(gate_1, up_1, ACTIVATION).to(element), mask=inside_1)
        tl.store(target + 2 * WIDTH, _act_mul(gate_2, up_2, ACTIVATION).to(element), mask=inside_2)
        tl.store(target + 3 * WIDTH, _act_mul(gate_3, up_3, ACTIVATION).to(element), mask=inside_3)


def bind_act_mul(
    gate_up: Tensor, activation: Activation, delta: RowDelta | None = None
) -> tuple[Launch, Tensor]:
    """Binds the kernel to gate_up [T, 2I] and to the delta that is added to it.

    Returns the launch and its output [T, I].
    """
    width = gate_up.shape[1] // 2
    out = torch.empty(gate_up.shape[0], width, dtype=gate_up.dtype, device=gate_up.device)
    arguments, constants = bind_delta(delta, gate_up.dtype, _DELTA_RANK)
    block, num_warps = (BLOCK_COLUMNS, 4) if delta is None else (_DELTA_COLUMNS, _DELTA_WARPS)
    return Launch(
        _act_mul_kernel,
        (gate_up.shape[0], triton.cdiv(width, block)),
        {"gate_up": gate_up, "out": out, **arguments},
        {"WIDTH": width, "ACTIVATION": activation, "BLOCK": block, **constants},
        num_warps,
    ), out
