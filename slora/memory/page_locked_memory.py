"""Page-locks host memory that another object owns, so that copies from it to a GPU run in parallel with kernels."""

import logging
from typing import Any
from weakref import finalize

import torch

from slora_adapters.peft.packing import ByteArray

__all__ = ["PageLockedMemory"]

_log = logging.getLogger(__name__)

_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for all contexts of the process.


class PageLockedMemory:
    """Page-locks `memory` for the lifetime of this object.

    If the system refuses, a warning is logged and copies are slower.
    """

    def __init__(self, memory: ByteArray) -> None:
        refusal = _lock(memory)
        self.is_page_locked = refusal is None
        if self.is_page_locked:
            finalize(self, _unlock, memory)  # The reference to `memory` keeps it mapped until it is unlocked.
        else:
            _log.warning(
                "the host cache (%d bytes) is not page-locked for the GPU, so loading adapters takes longer: %s",
                memory.nbytes,
                refusal,
            )


def _lock(memory: ByteArray) -> str | None:
    """Page-locks the memory. Returns None, or the reason why it failed."""
    try:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:  # There is no driver, or torch was built without CUDA.
        return str(error)
    result = runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, _PORTABLE)
    return None if result == runtime.cudaError.success else str(result)


def _unlock(memory: ByteArray) -> None:
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    runtime.cudaHostUnregister(memory.ctypes.data)
