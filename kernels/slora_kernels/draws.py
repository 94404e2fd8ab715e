"""What the rows of a step that draw their token ask for, as kernels take it: columns beside each other."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# A top_k beyond any vocabulary: none.
NO_TOP_K = 2**62


@dataclass(frozen=True, slots=True)
class Draws:
    """One entry for each of the N rows that draw.

    rows: int64 [N], their rows of the logits. keys: int64 [N], what chance is hashed from.
    top_k: int64 [N], at least 1, `NO_TOP_K` where off. temperature, top_p, min_p: float32 [N], above 0, in (0, 1] and
    in [0, 1]; 1 and 0 where off.
    truncates: whether any row has one of the three filters; a host's flag.
    """

    rows: Tensor
    keys: Tensor
    top_k: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    truncates: bool

    @staticmethod
    def upload(
        whole: npt.NDArray[np.int64], fractions: npt.NDArray[np.float64], device: torch.device
    ) -> "Draws":
        """whole [3, N]: rows, keys, top_k; fractions [3, N]: temperature, top_p, min_p. One copy to the device."""
        narrow = fractions.astype(np.float32)
        truncates = bool((whole[2] < NO_TOP_K).any() or (narrow[1] < 1).any() or (narrow[2] > 0).any())
        packed = np.concatenate((whole.reshape(-1).view(np.uint8), narrow.reshape(-1).view(np.uint8)))
        there = torch.from_numpy(packed).to(device)
        rows, keys, top_k = there[: whole.nbytes].view(torch.int64).view(3, -1)
        temperature, top_p, min_p = there[whole.nbytes :].view(torch.float32).view(3, -1)
        return Draws(rows, keys, top_k, temperature, top_p, min_p, truncates)
