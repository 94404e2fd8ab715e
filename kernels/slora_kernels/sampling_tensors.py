"""The sampling parameters of a step, as the kernels take them: one tensor per parameter, one entry per row."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slora_kernels.host_copies import upload

# The top_k of a row that does not use top_k: larger than any vocabulary.
NO_TOP_K = 2**62


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """Sampling parameters, one entry for each of the N sampled rows.

    rows: int64 [N], indexes of the rows in the logits.
    keys: int64 [N], seeds of the hash that replaces a random generator.
    top_k: int64 [N], at least 1; `NO_TOP_K` where top_k is off.
    temperature: float32 [N], above 0.
    top_p: float32 [N], in (0, 1]; 1 where top_p is off.
    min_p: float32 [N], in [0, 1]; 0 where min_p is off.
    has_filters: whether any row uses top_k, top_p or min_p. It is a host flag.
    """

    rows: Tensor
    keys: Tensor
    top_k: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    has_filters: bool

    @staticmethod
    def upload(
        ints: npt.NDArray[np.int64], floats: npt.NDArray[np.float64], device: torch.device
    ) -> "SamplingTensors":
        """Uploads the parameters in one copy to the device.

        ints: [3, N], rows, keys and top_k. floats: [3, N], temperature, top_p and min_p.
        """
        narrow = floats.astype(np.float32)
        has_filters = bool((ints[2] < NO_TOP_K).any() or (narrow[1] < 1).any() or (narrow[2] > 0).any())
        packed = np.concatenate((ints.reshape(-1).view(np.uint8), narrow.reshape(-1).view(np.uint8)))
        there = upload(packed, device)
        rows, keys, top_k = there[: ints.nbytes].view(torch.int64).view(3, -1)
        temperature, top_p, min_p = there[ints.nbytes :].view(torch.float32).view(3, -1)
        return SamplingTensors(rows, keys, top_k, temperature, top_p, min_p, has_filters)
