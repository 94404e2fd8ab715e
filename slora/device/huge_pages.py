"""Large tensors in huge pages of the system's memory, where it grants them to those who ask.

The system clears memory on first touch, 4 KiB at a time unless told otherwise: on two cores of a virtual machine 2 GB
took 5.5 s to touch in small pages and 1.5 s in huge ones, and reading weights took 1.2 s and 0.5 s. Decoding, which
reads all of them in each step, misses fewer address translations, too.
"""

import ctypes
import mmap
import os
import sys
from threading import Thread, get_native_id

import torch
from torch import Tensor

_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23  # of Linux; the second from 5.14 on
_HUGE_PAGE_BYTES = 2 << 20
# Others that map memory wait for one stretch, so it is short: some ms.
_STRETCH_BYTES = 4 << 20


def empty_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As torch.empty, for tensors that live long. A system that has no huge pages to give is no error."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if _is_large(tensor):
        start, num_bytes = _whole_pages(tensor)
        _madvise(ctypes.c_void_p(start), ctypes.c_size_t(num_bytes), _MADV_HUGEPAGE)
    return tensor


def touch(tensor: Tensor) -> Thread | None:
    """Has the system clear the tensor's memory now, on a thread of its own, instead of in the midst of whatever writes
    there first; nothing that is written meanwhile is lost. Measured: an adapter of 20 MB took 50 to 80 ms into a pool
    that nobody had written to, which all who decoded waited for, and 2 ms later on.

    None if the tensor is small or not the CPU's. A system that can't is no error.
    """
    if not _is_large(tensor):
        return None
    thread = Thread(target=_populate, args=(tensor,), name="slora-touch", daemon=True)
    thread.start()
    return thread


def _populate(tensor: Tensor) -> None:
    os.setpriority(
        os.PRIO_PROCESS, get_native_id(), 19
    )  # of this thread: only what requests leave of the cores
    start, num_bytes = _whole_pages(tensor)
    for done in range(0, num_bytes, _STRETCH_BYTES):
        count = min(_STRETCH_BYTES, num_bytes - done)
        if _madvise(ctypes.c_void_p(start + done), ctypes.c_size_t(count), _MADV_POPULATE_WRITE):
            return


def _is_large(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and sys.platform == "linux" and tensor.nbytes >= 2 * _HUGE_PAGE_BYTES


def _whole_pages(tensor: Tensor) -> tuple[int, int]:
    """Address and length of the system's pages that lie within the tensor."""
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    num_bytes = tensor.data_ptr() + tensor.nbytes - start
    return start, num_bytes // mmap.PAGESIZE * mmap.PAGESIZE


_madvise = ctypes.CDLL(None).madvise
