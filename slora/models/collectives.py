"""The communication of tensor parallelism between ranks: sums, and the gathering of columns.

A decoder with `num_layers` layers sums once after the embedding and twice in each layer, and gathers the logits.
Adapters need no communication of their own (`slora_kernels.partition`).
"""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# A rank may wait for the others while they load their weights. A rank that ends is noticed without this limit.
_TIMEOUT = timedelta(minutes=10)


class Collectives:
    """The group of ranks as one of them sees it. All ranks make the same calls in the same order.

    group: a process group of torch.distributed; None for a rank that is alone.
    """

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None) -> None:
        self.rank, self.size = rank, size
        self._group = group

    @staticmethod
    def connect(rank: int, size: int, device: torch.device, path: Path) -> "Collectives":
        """Waits until all ranks of this host have connected: with NCCL on GPUs, with gloo on CPUs.

        path: a file that all ranks can write, and that no group has used before.
        """
        store = dist.FileStore(str(path), size)  # type: ignore[attr-defined]
        group: Any
        if device.type == "cuda":
            torch.cuda.set_device(device)
            group = dist.ProcessGroupNCCL(store, rank, size, dist.ProcessGroupNCCL.Options())
        else:
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
            options._timeout = _TIMEOUT
            group = dist.ProcessGroupGloo(store, rank, size, options)
        collectives = Collectives(rank, size, group)
        # NCCL connects the ranks at the first call. After it, no rank needs the file.
        collectives.sum(torch.zeros(1, device=device))
        return collectives

    def sum(self, x: Tensor) -> Tensor:
        """Returns the sum of all ranks' x, in the memory of x."""
        if self._group is not None:
            self._group.allreduce([x]).wait()
        return x

    def gather_columns(self, x: Tensor) -> Tensor:
        """Returns [N, size * K]: all ranks' x [N, K] side by side, in the order of the ranks."""
        if self._group is None:
            return x
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        self._group.allgather([parts], [x.contiguous()]).wait()
        return torch.cat(parts, dim=1)

    def close(self) -> None:
        """Disconnects this rank. Without it, the threads of the group abort the process at its end."""
        if self._group is not None:
            self._group.shutdown()
            self._group = None


ALONE = Collectives()
