"""What torch finds on a machine. This module imports no torch, so API processes and commands can import it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The facts that `slora.runner.device_probe` finds."""

    type: str  # `cpu` or `cuda`. AMD GPUs also have the type `cuda`.
    device: str  # A readable name.
    num_gpus: int  # Number of GPUs that torch sees.
    kernels: str
    has_cpu_kernels: bool  # Whether there is machine code of the kernels `cpu`, or numba to compile it.
    # Versions; None if the package is not installed.
    torch: str
    triton: str | None
    numba: str | None
    num_threads: int  # Number of threads that torch uses on a CPU.
    # Memory of the GPU; None on a CPU.
    total_bytes: int | None = None
    free_bytes: int | None = None


def explain_few_gpus(num_ranks: int, num_gpus: int) -> str | None:
    """Returns why a machine with `num_gpus` GPUs can't run so many tensor-parallel ranks, or None if it can."""
    if num_ranks <= num_gpus:
        return None
    seen = f"{num_gpus} GPU" if num_gpus == 1 else f"{num_gpus} GPUs"
    return (
        f"tensor_parallel_size is {num_ranks}, but torch sees {seen}, and each rank needs a GPU of its own; set "
        f"tensor_parallel_size to at most {num_gpus}, or make more GPUs visible (CUDA_VISIBLE_DEVICES)"
    )
