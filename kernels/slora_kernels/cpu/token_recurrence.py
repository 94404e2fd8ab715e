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
        _make_team().run(find_worker(worker, name_dtype(dtype)), job, threads)


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
    return _compute_heads(
        DELTA_RULE, (query, key, value, decay, beta), state, state.shape[2:], (norms, *_NO_NUMBERS)
    )


def scan(
    x: Tensor, inputs: Tensor, outputs: Tensor, step: Tensor, decay: Tensor, skip: Tensor, state: Tensor
) -> Tensor:
    """Mamba-2's recurrence. x [B, H, D], inputs and outputs (B and C) [B, G, N] of one dtype -> [B, H, D].

    step, decay: float32 [B, H]. skip: float32 [H], the factor of x in the result. state: float32 [B, H, D, N].
    """
    operands = outputs, inputs, x, decay, step
    sizes = state.shape[3], state.shape[2]
    return _compute_heads(SCAN, operands, state, sizes, pack_row(skip))


def _compute_heads(
    worker: Worker, operands: Sequence[Tensor], state: Tensor, sizes: Sequence[int], last: FieldWords
) -> Tensor:
    """Runs a job whose items are the heads of all sequences. Returns a tensor like the values.

    operands: what is read from the state with, what is written to it with, the values, the decay and the factor of
    what is written. sizes: the widths of what is read with and of a value. last: the job's last field.
    """
    _, write, value, _, _ = operands
    out = torch.empty(value.shape, dtype=value.dtype)
    scratch = torch.empty(torch.get_num_threads(), 2 * sum(sizes))
    # The job has the addresses of these tensors, so copies have to live as long.
    tensors = [state.view(len(state), -1), *map(_as_rows, (*operands, out)), scratch]
    heads = state.shape[1]
    numbers = ((number, *_NO_NUMBERS) for number in (heads, write.shape[1], *sizes))
    _run(worker, value.dtype, len(state) * heads, state.numel(), *map(pack_rows, tensors), *numbers, last)
    return out
