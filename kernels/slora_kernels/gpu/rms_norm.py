"""Root mean square norm (arXiv 1910.07467), fused with the addition of the residual if there is one.

A program handles one row and holds it in registers. With 8 warps, a hidden size of 16384 is 64 fp32 values per thread
on NVIDIA and 32 on AMD.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slora_kernels.gpu.lora_columns import add_scaled, find_module, multiply_b
from slora_kernels.gpu.lora_delta import RowDelta, bind_delta
from slora_kernels.launch import Launch

# Elements of B that a program has in flight: 128 registers of a thread with 8 warps and a 16-bit dtype.
_DELTA_ELEMENTS = 16 * 4096


@triton.jit(do_not_specialize=["first_module"])
def _rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    eps,
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
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_MODULES: tl.constexpr,
    SEGMENT: tl.constexpr,
    PAGE_SEGMENTS: tl.constexpr,
    TWO_PAGES: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    lanes = tl.arange(0, BLOCK)
    inside = lanes < WIDTH
    row = tl.program_id(0).to(tl.int64)
    place = row * WIDTH + lanes
    if shrunk is None:
        values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    else:
        slot = tl.load(row_slots + row * 2)
        rank, first_row, first_segment, scale = find_module(
            modules, scales, slot, tl.load(row_weights + row), first_module, NUM_MODULES
        )
        acc, _, _, _ = multiply_b(
            shrunk + row * shrunk_stride + first_row,
            1,
            shrunk_stride,
            adapter_pages,
            page_table + slot * table_stride,
            first_segment,
            rank,
            lanes,
            inside,
            adapter_page_stride,
            WIDTH,
            SEGMENT,
            PAGE_SEGMENTS,
            TWO_PAGES,
            BLOCK_R,
            1,
        )
        values = add_scaled(tl.load(x + place, mask=inside, other=0.0), acc, scale)
    if HAS_RESIDUAL:
        values += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(residual.dtype.element_ty)
        tl.store(residual + place, rounded, mask=inside)
        values = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
    gain = tl.load(weight + lanes, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, (values * scale * gain).to(out.dtype.element_ty), mask=inside)


def bind_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, delta: RowDelta | None = None
) -> tuple[Launch, Tensor]:
    """Binds the kernel to x [T, H] and weight [H].

    The launch first adds the delta to x, if there is one. If there is a residual [T, H], it adds x to the residual in
    place, and computes the norm of the sum.
    Returns the launch and its output [T, H].
    """
    out = torch.empty_like(x)
    block = triton.next_power_of_2(x.shape[1])
    arguments, constants = bind_delta(delta, x.dtype, max(1, min(16, _DELTA_ELEMENTS // block)))
    return Launch(
        _rms_norm_kernel,
        (x.shape[0],),
        {
            "x": x,
            "residual": x if residual is None else residual,
            "weight": weight,
            "out": out,
            "eps": eps,
            **arguments,
        },
        {"WIDTH": x.shape[1], "HAS_RESIDUAL": residual is not None, "BLOCK": block, **constants},
        num_warps=4 if block <= 2048 else 8,
    ), out
