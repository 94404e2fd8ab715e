"""Memory of the host that others own, pinned for a GPU: copies from it run beside the GPU's other work."""

import logging
from weakref import finalize

import torch

from slora_adapters.packing import ByteArray

__all__ = ["PinnedMemory"]

_log = logging.getLogger(__name__)

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all of a process' contexts


class PinnedMemory:
    """Pins `memory` until nobody refers to this object. A system that refuses is a warning: copies are slower then."""

    def __init__(self, memory: ByteArray) -> None:
        error = torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, _PORTABLE)
        self.is_pinned = error == torch.cuda.cudart().cudaError.success
        if self.is_pinned:
            finalize(self, _unpin, memory)  # which also keeps it mapped until then
        else:
            _log.warning(
                "the host cache (%d bytes) could not be pinned for the GPU (%s); loading adapters takes longer",
                memory.nbytes,
                error,
            )


def _unpin(memory: ByteArray) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)
