"""Computes the scales and offsets of adapters with DoRA or trained biases, which depend on the base model's weights.

DoRA (arXiv 2402.09353) gives row i of the adapted weight W + s B A the trained norm m_i. So the output of a linear with
the bias b is, as in PEFT:

    scale * (W x + s B A x) + b,  where scale_i = m_i / |W_i + s B_i A|

The base model's output W x + b and the LoRA delta already exist, so the rest is a scale and an offset for each column:
b becomes b - scale * b. A trained bias replaces b, and a bias of B adds s times itself.

The norm needs no product of the size of W, because

    |W_i + s B_i A|^2 = |W_i|^2 + 2 s (W A^T)_i B_i^T + s^2 B_i A A^T B_i^T

W A^T is the base model's own product with the rows of A, whatever form its weights have. It costs as much as a decode
step with as many tokens as A has rows.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from slora.memory.device_memory import DeviceMemory, LoadedAdapter
from slora.models.collectives import Collectives
from slora_kernels.layout import LoraSite, ModelShape
from slora_kernels.torch.lora_matmuls import read_rows

# The least share of a row's square that its norm may keep in 16 bits. With less, the norm may be off by more than 5%.
_LEAST_SHARE = 0.04
_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class SiteWeight:
    """The base model's weight [out, in] at one site: the stacked weights of all modules of the site."""

    multiply: Callable[[Tensor], Tensor]  # x [R, in] -> x W^T [R, out], without bias.
    squares: Tensor  # float32 [out], the sum of the squares of each row.
    bias: Tensor | None  # [out].
    is_divided: bool = False  # Each rank has some of the columns.


def compute_affine(
    adapter: LoadedAdapter,
    memory: DeviceMemory,
    shape: ModelShape,
    find_weight: Callable[[LoraSite], SiteWeight],
    collectives: Collectives,
) -> list[tuple[int, Tensor]]:
    """Computes the scales and offsets of an adapter from what it stores. Returns what `DeviceMemory.finish` writes.

    All ranks of a group call this for the same adapters in the same order.
    """
    return [
        found
        for site in shape.sites
        if adapter.layout.affine[site.module_ids, 0].any()
        for found in _compute_site(adapter, memory, site, find_weight(site), collectives)
    ]


def _compute_site(
    adapter: LoadedAdapter,
    memory: DeviceMemory,
    site: LoraSite,
    weight: SiteWeight,
    collectives: Collectives,
) -> list[tuple[int, Tensor]]:
    layout, pages, dtype = adapter.layout, memory.pages, memory.geometry.dtype
    group_rank, first_a = layout.groups[site.group].tolist()
    a = read_rows(pages, adapter.pages, first_a, group_rank, site.in_width, dtype) if group_rank else None
    has_magnitudes = layout.affine[site.module_ids, 2].any()
    products = weight.multiply(a) if a is not None and has_magnitudes else None
    with _one_thread():
        return list(_compute_modules(adapter, memory, site, weight, a, products, collectives))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Lets torch compute small tensors on this thread alone.

    Beside a process that uses a core, each operation of several threads waits for that core. Computing an adapter of a
    110M model then took 7.6 s instead of 0.05 s.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _compute_modules(
    adapter: LoadedAdapter,
    memory: DeviceMemory,
    site: LoraSite,
    weight: SiteWeight,
    a: Tensor | None,
    products: Tensor | None,
    collectives: Collectives,
) -> Iterator[tuple[int, Tensor]]:
    layout, pages, dtype = adapter.layout, memory.pages, memory.geometry.dtype
    start = 0
    for module_id, width in zip(site.module_ids, site.widths, strict=True):
        columns = slice(start, start + width)
        start += width
        is_affine, segment, has_magnitude, replaces_bias = layout.affine[module_id].tolist()
        if not is_affine:
            continue
        stored, offsets = read_rows(pages, adapter.pages, segment, 2, width, torch.float32)
        scales = stored
        if has_magnitude:
            assert a is not None and products is not None, "a module with a magnitude has A and B"
            rank, row, first_b = layout.modules[module_id].tolist()
            rows = slice(row, row + rank)
            b = read_rows(pages, adapter.pages, first_b, rank, width, dtype).float()
            lora_scale = float(adapter.scales[module_id])
            gram = a[rows].float() @ a[rows].float().T
            terms = 2 * lora_scale * products[rows, columns].float() + lora_scale**2 * (gram @ b)
            own = weight.squares[columns]
            squares = own + (terms * b).sum(0)
            if weight.is_divided:
                squares, own = collectives.sum(squares), collectives.sum(own.clone())
            # The products are rounded to the model's dtype. Where the delta cancels most of a row, the norm would be
            # wrong, and NaN makes the upload and every request fail.
            least = _LEAST_SHARE if dtype.itemsize < _FLOAT_BYTES else 0.0
            scales = torch.where(squares > least * own, stored / squares.sqrt(), torch.nan)
        if weight.bias is not None:
            kept = 0.0 if replaces_bias else 1.0
            offsets = offsets + weight.bias[columns].float() * (kept - scales)
        yield segment, torch.stack((scales, offsets))
