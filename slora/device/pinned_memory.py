"""Pins host memory of another owner for a GPU, so that copies from it run in parallel with kernels."""

import logging
from typing import Any
from weakref import finalize

import torch

from slora_adapters.peft.packing import ByteArray

__all__ = ["PinnedMemory"]

_log = logging.getLogger(__name__)

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all contexts of the process.


class PinnedMemory:
    """Pins `memory` for the lifetime of this object.

    If the system refuses, it logs a warning, and copies are slower.
    """

    def __init__(self, memory: ByteArray) -> None:
        refusal = _pin(memory)
        self.is_pinned = refusal is None
        if self.is_pinned:
            finalize(self, _unpin, memory)  # The finalizer also keeps the memory mapped until then.
        else:
            _log.warning(
                "the host cache (%d bytes) is not pinned for the GPU, so loading adapters takes longer: %s",
                memory.nbytes,
                refusal,
            )


def _pin(memory: ByteArray) -> str | None:
    """Pins the memory. Returns None, or the reason why it failed."""
    try:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:  # No driver, or a torch without CUDA.
        return str(error)
    result = runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, _PORTABLE)
    return None if result == runtime.cudaError.success else str(result)


def _unpin(memory: ByteArray) -> None:
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    runtime.cudaHostUnregister(memory.ctypes.data)
