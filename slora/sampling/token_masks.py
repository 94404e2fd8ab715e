"""The masks of a step: which tokens the grammars of its sequences allow."""

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slora.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The masks of the N rows of a batch that have one.

    rows: int64 [N], ascending. words: int32 [N, ceil(vocab_size / 32)], see `Kernels.mask_logits`.
    """

    rows: Tensor
    words: Tensor

    @staticmethod
    def compute(sequences: Rows[Sequence], vocab_size: int, device: torch.device) -> "TokenMasks | None":
        """Computes the mask of each sequence with a structured form. None if there is no such sequence.

        On a GPU, the host computes masks while the device computes the step. A sequence whose grammar allows no token
        gets an empty mask, and its matcher has the reason.
        """
        rows = [row for row, sequence in enumerate(sequences) if sequence.matcher is not None]
        if not rows:
            return None
        words = np.empty((len(rows), -(-vocab_size // 32)), np.int32)
        for place, row in enumerate(rows):
            matcher = sequences[row].matcher
            assert matcher is not None
            matcher.write_mask(words[place])
        return TokenMasks(torch.tensor(rows, device=device), torch.from_numpy(words).to(device))
