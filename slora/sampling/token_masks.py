"""The masks of a step: which tokens the grammars and token filters of its sequences allow.

A hostile grammar must slow down only its own tenant. A step therefore spends a limited CPU time on masks, and computes
the cheapest masks first. When the time runs out, the remaining sequences are deferred: they get no token in this step.
The sequence that was deferred for the most steps always gets its mask, so every deferred sequence makes progress.
"""

import math
import time
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slora.scheduler.sequence import Sequence
from slora_kernels.host_copies import upload
from slora_kernels.layout import Int32Array

# CPU seconds. The masks of 64 common schemas take 1 ms. A mask that exceeds a limit of the library takes 10 ms.
_STEP_S = 0.005


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The masks of a step."""

    kept: list[int]  # The rows of the batch that get a token, ascending. All others are deferred.
    rows: Tensor  # int64 [N], ascending: the indices into `kept` of the rows that have a mask.
    words: Tensor  # int32 [N, ceil(vocab_size / 32)], see `Kernels.mask_logits`.

    @staticmethod
    def compute(
        sequences: Rows[Sequence], vocab_size: int, device: torch.device, *, may_defer: bool = True
    ) -> "TokenMasks | None":
        """Computes the masks of the sequences that have a matcher. None if there is no such sequence.

        may_defer: whether the step's time for masks is limited.

        On a GPU, the host computes masks while the device computes the step. A sequence whose grammar allows no token
        gets an empty mask, and its matcher has the reason.
        """
        formed = [row for row, sequence in enumerate(sequences) if sequence.matcher is not None]
        if not formed:
            return None
        words = np.empty((len(formed), -(-vocab_size // 32)), np.int32)
        most_s = _STEP_S if may_defer else math.inf
        is_written = _write_masks([sequences[row] for row in formed], words, most_s)
        deferred = {row for row, written in zip(formed, is_written, strict=True) if not written}
        kept = [row for row in range(len(sequences)) if row not in deferred]
        rows = np.searchsorted(kept, [row for row in formed if row not in deferred])
        if deferred:
            words = words[is_written]
        return TokenMasks(kept, upload(rows, device), upload(words, device))


def _write_masks(sequences: list[Sequence], words: Int32Array, most_s: float) -> list[bool]:
    """Writes the mask of each sequence into its row of `words`, unless the sequence is deferred.

    most_s: the step's CPU seconds for masks.

    Returns for each sequence whether its mask was written.

    A first token is never deferred: its mask was computed when the grammar was compiled.
    """
    longest = max(sequences, key=lambda sequence: sequence.num_deferrals)
    order = sorted(range(len(sequences)), key=lambda place: sequences[place].mask_s)
    is_written, spent_s = [False] * len(sequences), 0.0
    for place in order:
        sequence = sequences[place]
        waits_longest = sequence is longest and sequence.num_deferrals > 0
        if spent_s > most_s and sequence.num_generated and not waits_longest:
            sequence.num_deferrals += 1
            continue
        matcher, started_s = sequence.matcher, time.thread_time()
        assert matcher is not None, "only sequences with a matcher get here"
        matcher.write_mask(words[place])
        sequence.mask_s, sequence.num_deferrals = time.thread_time() - started_s, 0
        spent_s += sequence.mask_s
        is_written[place] = True
    return is_written
