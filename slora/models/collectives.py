"""The communication of tensor parallelism between ranks: sums, and the gathering of columns.

A decoder with `num_layers` layers sums once after the embedding and twice in each layer, and gathers the logits.
Adapters need no communication of their own (`slora_kernels.partition`).
"""

from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["ALONE", "Collectives", "TorchCollectives"]

# A rank may wait for the others while they load their weights. A rank that ends is noticed without this limit.
_TIMEOUT = timedelta(minutes=10)


class Collectives(Protocol):
    """The group of ranks as one of them sees it. All ranks make the same calls in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, x: Tensor) -> Tensor:
        """Returns the sum of all ranks' x, in the memory of x."""

    def gather_columns(self, x: Tensor) -> Tensor:
        """Returns [N, size * K]: all ranks' x [N, K] side by side, in the order of the ranks."""


class _Alone:
    rank, size = 0, 1

    def sum(self, x: Tensor) -> Tensor:
        return x

    def gather_columns(self, x: Tensor) -> Tensor:
        return x


ALONE: Collectives = _Alone()


class TorchCollectives:
    """A process group of torch.distributed on one host: NCCL on GPUs, gloo on CPUs.

    The constructor waits until all ranks have connected. path: a file that all ranks can write, and that no group has
    used before.
    """

    def __init__(self, rank: int, size: int, device: torch.device, path: Path) -> None:
        self.rank, self.size = rank, size
        store = dist.FileStore(str(path), size)  # type: ignore[attr-defined]
        self._group: Any
        if device.type == "cuda":
            torch.cuda.set_device(device)
            self._group = dist.ProcessGroupNCCL(store, rank, size, dist.ProcessGroupNCCL.Options())
        else:
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
            options._timeout = _TIMEOUT
            self._group = dist.ProcessGroupGloo(store, rank, size, options)
        # NCCL connects the ranks at the first call. After it, no rank needs the file.
        self.sum(torch.zeros(1, device=device))

    def sum(self, x: Tensor) -> Tensor:
        self._group.allreduce([x]).wait()
        return x

    def gather_columns(self, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        self._group.allgather([parts], [x.contiguous()]).wait()
        return torch.cat(parts, dim=1)

    def close(self) -> None:
        """Disconnects this rank. Without it, the threads of the group abort the process at its end."""
        self._group.shutdown()
        del self._group
