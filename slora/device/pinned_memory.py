"""Memory of the host that others own, pinned for a GPU: copies from it run beside the GPU's other work."""

import logging
from typing import Any
from weakref import finalize

import torch

from slora_adapters.peft.packing import ByteArray

__all__ = ["PinnedMemory"]

_log = logging.getLogger(__name__)

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all of a process' contexts


class PinnedMemory:
    """Pins `memory` until nobody refers to this object. A system that refuses is a warning: copies are slower then."""

    def __init__(self, memory: ByteArray) -> None:
        refusal = _pin(memory)
        self.is_pinned = refusal is None
        if self.is_pinned:
            finalize(self, _unpin, memory)  # which also keeps it mapped until then
        else:
            _log.warning(
                "the host cache (%d bytes) is not pinned for the GPU, so loading adapters takes longer: %s",
                memory.nbytes,
                refusal,
            )


def _pin(memory: ByteArray) -> str | None:
    """Why not; None if it is."""
    try:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:  # no driver, or no CUDA in this torch
        return str(error)
    result = runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, _PORTABLE)
    return None if result == runtime.cudaError.success else str(result)


def _unpin(memory: ByteArray) -> None:
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    runtime.cudaHostUnregister(memory.ctypes.data)
