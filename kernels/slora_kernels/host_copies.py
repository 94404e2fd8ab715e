"""Copies between host and device that do not wait for the device.

A copy from or to ordinary memory waits until the device has finished all earlier work. A copy through page-locked
memory only takes its place in the device's queue. So the host can prepare the next step while the device computes this
one. PyTorch reuses the page-locked memory of a finished copy.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def upload(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """Returns a copy on the device. On a CPU, the result shares the memory of the array."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def download(tensor: Tensor) -> Tensor:
    """Returns a copy on the host, which is complete when the device has done all work that was launched before.

    On a CPU, the result is the tensor itself.
    """
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
