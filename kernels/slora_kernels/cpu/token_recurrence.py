"""One token of recurrent layers by machine code (see `workers.recurrence`).

Each function updates the states in place. A state may be a part of longer rows, such as those of a page: only its own
elements have to be contiguous. The bits of a sequence's results do not depend on the other sequences.
"""

from collections.abc import Iterable, Sequence
from functools import cache

import torch
from torch import Tensor

from slora_kernels.cpu.job_fields import NO_TENSOR, FieldWords, begin_job, name_dtype, pack_row, pack_rows
from slora_kernels.cpu.machine_code import CONVOLVE, DELTA_RULE, SCAN, Worker, find_worker
from slora_kernels.cpu.thread_team import ThreadTeam, load_workers

# Computing fewer elements than this takes less time than waking a second thread.
_SERIAL_ELEMENTS = 65536
_NO_NUMBERS = (0, 0)
# By the names of the functions below.
_WORKERS = {"convolve": CONVOLVE, "apply_delta_rule": DELTA_RULE, "scan": SCAN}


@cache
def _make_team() -> ThreadTeam:
    return ThreadTeam()


def _run(worker: Worker, dtype: torch.dtype, items: int, num_elements: int, *fields: FieldWords) -> None:
    job = begin_job(items, *(word for field in fields for word in field))
    threads = 1 if num_elements < _SERIAL_ELEMENTS else min(torch.get_num_threads(), items)
    if items:
        _make_team().run(find_worker(worker, name_dtype(dtype)), job.buffer_info()[0], threads)


def warm_up(functions: Iterable[str], dtypes: Sequence[torch.dtype]) -> None:
    """Loads the workers of the functions below with these names, and compiles those that there are not.

    dtypes: those of the operands.
    """
    names = [*functions]
    load_workers((_WORKERS[name], name_dtype(dtype)) for dtype in dtypes for name in names)


def suits(state: Tensor, operands: Sequence[Tensor], dtype: torch.dtype) -> bool:
    """Whether the functions below can compute with a state and operands: all operands have to be of `dtype`."""
    is_known = dtype in (torch.float32, torch.bfloat16, torch.float16)
    return is_known and _are_rows(state) and all(operand.dtype == dtype for operand in operands)


def _are_rows(tensor: Tensor) -> bool:
    """Whether the elements of each row [B, ...] are contiguous."""
    return tensor[:1].is_contiguous()


def _as_rows(tensor: Tensor) -> Tensor:
    """[B, ...] -> [B, n], whose elements of a row are contiguous."""
    return tensor.reshape(len(tensor), -1) if _are_rows(tensor) else tensor.contiguous().view(len(tensor), -1)


def convolve(x: Tensor, window: Tensor, weight: Tensor, bias: Tensor | None, *, activates: bool) -> Tensor:
    """Convolves x [B, C] with the inputs before it, and applies silu if `activates` -> [B, C].

    window: [B, C, n], the inputs before x, to which x is added. weight: [C, K], K <= n + 1. All are of one dtype, also
    the bias [C].
    """
    x, (channels, taps), kept = _as_rows(x), weight.shape, window.shape[2]
    out, weight = torch.empty_like(x, memory_format=torch.contiguous_format), weight.contiguous()
    fields = (
        *(pack_rows(x), pack_rows(window.view(len(x), -1)), (weight.data_ptr(), 1, weight.numel())),
        *(NO_TENSOR if bias is None else pack_row(bias), pack_rows(out)),
        *((number, *_NO_NUMBERS) for number in (kept, taps, bias is not None, activates)),
    )
    # A channel costs about as much as reading many elements.
    _run(CONVOLVE, x.dtype, len(x), 16 * len(x) * channels, *fields)
    return out


def apply_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor, *, norms: bool
) -> Tensor:
    """The gated delta rule. query, key [B, Hk, Dk], value [B, Hv, Dv] and beta [B, Hv] of one dtype -> [B, Hv, Dv].

    decay: float32 [B, Hv], what the state is multiplied with. state: float32 [B, Hv, Dk, Dv]. norms: whether keys and
    queries are divided by their lengths first.
    """
    out = torch.empty(value.shape, dtype=value.dtype)
    _, heads, width, value_width = state.shape
    scratch = torch.empty(torch.get_num_threads(), 2 * (width + value_width))
    # The job has their addresses, so copies have to live as long.
    rows = [_as_rows(tensor) for tensor in (query, key, value, decay, beta, out)]
    read, write, values, decays, betas, results = map(pack_rows, rows)
    numbers = (heads, key.shape[1], width, value_width, norms)
    fields = (
        *(
            pack_rows(state.view(len(state), -1)),
            read,
            write,
            values,
            decays,
            betas,
            results,
            pack_rows(scratch),
        ),
        *((number, *_NO_NUMBERS) for number in numbers),
    )
    _run(DELTA_RULE, value.dtype, len(state) * heads, state.numel(), *fields)
    return out


def scan(
    x: Tensor, inputs: Tensor, outputs: Tensor, step: Tensor, decay: Tensor, skip: Tensor, state: Tensor
) -> Tensor:
    """Mamba-2's recurrence. x [B, H, D], inputs and outputs (B and C) [B, G, N] of one dtype -> [B, H, D].

    step, decay: float32 [B, H]. skip: float32 [H], the factor of x in the result. state: float32 [B, H, D, N].
    """
    out = torch.empty(x.shape, dtype=x.dtype)
    _, heads, value_width, width = state.shape
    scratch = torch.empty(torch.get_num_threads(), 2 * width)
    rows = [_as_rows(tensor) for tensor in (outputs, inputs, x, decay, step, out)]
    read, write, values, decays, steps, results = map(pack_rows, rows)
    fields = (
        *(
            pack_rows(state.view(len(state), -1)),
            read,
            write,
            values,
            decays,
            steps,
            results,
            pack_rows(scratch),
        ),
        *((number, *_NO_NUMBERS) for number in (heads, inputs.shape[1], width, value_width)),
        pack_row(skip),
    )
    _run(SCAN, x.dtype, len(state) * heads, state.numel(), *fields)
    return out
