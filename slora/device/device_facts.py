"""What torch finds on a machine. This module imports no torch, so API processes and commands can import it."""

from dataclasses import dataclass

__all__ = ["DeviceFacts"]


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The facts that `slora.runner.device_probe` finds.

    type: `cpu` or `cuda`. AMD GPUs also have the type `cuda`. device: a readable name.
    num_gpus: number of GPUs that torch sees. num_threads: number of threads that torch uses on a CPU.
    torch, triton, numba: versions; None if the package is not installed.
    total_bytes, free_bytes: memory of the GPU; None on a CPU.
    """

    type: str
    device: str
    num_gpus: int
    kernels: str
    torch: str
    triton: str | None
    numba: str | None
    num_threads: int
    total_bytes: int | None = None
    free_bytes: int | None = None
