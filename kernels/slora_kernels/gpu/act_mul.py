"""activation(gate) * up over the fused gate_up output of a gated MLP (arXiv 2002.05202)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slora_kernels.batch import Activation
from slora_kernels.gpu.launch import Launch

# Columns per program. In a 16-bit dtype, each of NVIDIA's 128 threads then has two 16-byte loads. On an MI300, four
# warps have 256 threads, and each thread has one such load.
BLOCK_COLUMNS = 2048


@triton.jit
def _sigmoid(x):
    # exp of a negative number cannot overflow.
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def _act_mul_kernel(gate_up, delta, out, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    source = gate_up + row * (2 * WIDTH) + columns
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + WIDTH, mask=inside, other=0.0).to(tl.float32)
    if delta is not None:
        delta_source = delta + row * (2 * WIDTH) + columns
        gate += tl.load(delta_source, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(delta_source + WIDTH, mask=inside, other=0.0).to(tl.float32)
        gate = gate.to(gate_up.dtype.element_ty).to(tl.float32)
        up = up.to(gate_up.dtype.element_ty).to(tl.float32)
    if ACTIVATION == "silu":
        factor = _sigmoid(gate)
    elif ACTIVATION == "gelu":
        factor = 0.5 + 0.5 * tl.erf(gate * 0.7071067811865476)
    else:
        # 0.5 (1 + tanh(y)) = sigmoid(2 y); 2 sqrt(2 / pi) = 1.596.
        factor = _sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    tl.store(out + row * WIDTH + columns, (gate * factor * up).to(out.dtype.element_ty), mask=inside)


def bind_act_mul(
    gate_up: Tensor, activation: Activation, delta: Tensor | None = None
) -> tuple[Launch, Tensor]:
    """Binds the kernel to gate_up [T, 2I] and a delta [T, 2I] that is added to it.

    Returns the launch and its output [T, I].
    """
    width = gate_up.shape[1] // 2
    out = torch.empty(gate_up.shape[0], width, dtype=gate_up.dtype, device=gate_up.device)
    return Launch(
        _act_mul_kernel,
        (gate_up.shape[0], triton.cdiv(width, BLOCK_COLUMNS)),
        {"gate_up": gate_up, "delta": delta, "out": out},
        {"WIDTH": width, "ACTIVATION": activation, "BLOCK": BLOCK_COLUMNS},
    ), out
