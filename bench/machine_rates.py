"""What this machine can do at most, measured beside the runs: bytes read and numbers multiplied in a second."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

# Far beyond any cache.
_READ_BYTES = 512 << 20
_MATMUL = 2048


@dataclass(frozen=True, slots=True)
class MachineRates:
    """By all of torch's threads. flops: of matmuls in the dtype asked for."""

    read_bytes_per_s: float
    flops: float


class RateMeter:
    """Measured again in each round, so that a drift of the machine meets the rates as it meets the runs."""

    def __init__(self, dtype: torch.dtype, read_bytes: int = _READ_BYTES) -> None:
        self._memory = torch.ones(read_bytes // 8, dtype=torch.int64)
        self._a, self._b = (torch.ones(_MATMUL, _MATMUL, dtype=dtype) for _ in range(2))

    def measure(self, repeats: int = 3) -> MachineRates:
        """Medians."""
        read_s = _median_s(lambda: self._memory.sum(), repeats)
        matmul_s = _median_s(lambda: self._a @ self._b, repeats)
        return MachineRates(self._memory.nbytes / read_s, 2 * _MATMUL**3 / matmul_s)


def _median_s(work: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
