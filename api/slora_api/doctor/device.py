"""Checks the device that would run the model, and the packages that compute on it."""

from collections.abc import Iterator

from slora.device.device_facts import DeviceFacts, explain_few_gpus
from slora_api.doctor.finding import Finding, failure, fine, warning
from slora_api.doctor.shared_fact import SharedFact

__all__ = ["check_device"]


def check_device(device: SharedFact[DeviceFacts], num_ranks: int = 1) -> Iterator[Finding]:
    """num_ranks: the number of tensor-parallel ranks."""
    found = device.get()
    packages = ", ".join(
        f"{name} {version}"
        for name, version in (("torch", found.torch), ("triton", found.triton), ("numba", found.numba))
        if version
    )
    yield fine(f"{found.device}, kernels {found.kernels}; {packages}")
    if found.type == "cpu" and found.kernels == "torch" and found.numba is None:
        yield warning("the fast kernels for CPUs need numba", "pip install 'slora[cpu]'")
    if found.type == "cpu" and found.num_gpus:
        yield warning("the GPU of this machine is not used", "set --device auto and --kernels auto")
    if found.type == "cuda" and (reason := explain_few_gpus(num_ranks, found.num_gpus)):
        yield failure(reason)
    elif found.num_gpus > num_ranks:
        used = "the first is" if num_ranks == 1 else f"the first {num_ranks} are"
        yield fine(f"{found.num_gpus} GPUs, of which {used} used; CUDA_VISIBLE_DEVICES selects others")
