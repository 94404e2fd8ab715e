"""The time of a step for masks is divided so that a sequence with an expensive grammar delays only itself."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from slora.sampling import token_masks
from slora.sampling.token_masks import TokenMasks
from slora_kernels.layout import Int32Array


@dataclass
class Matcher:
    """Spends CPU time on each mask."""

    cpu_s: float

    def write_mask(self, words: Int32Array) -> None:
        end = time.thread_time() + self.cpu_s
        while time.thread_time() < end:
            pass
        words[:] = -1


@dataclass
class Sequence:
    matcher: Matcher
    num_generated: int = 1
    num_deferrals: int = 0
    mask_s: float = 0.0


def test_expensive_masks_take_turns_and_defer_no_cheap_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_masks, "_STEP_S", 0.001)
    cheap = [Sequence(Matcher(0.0)) for _ in range(4)]
    expensive = [Sequence(Matcher(0.02), mask_s=0.02) for _ in range(3)]
    batch: Any = [*expensive, *cheap]
    num_tokens = np.zeros(len(batch), int)
    for _ in range(12):
        masks = TokenMasks.compute(batch, 40, torch.device("cpu"))
        assert masks is not None and {3, 4, 5, 6} <= set(masks.kept)
        assert len(masks.rows) == len(masks.kept) == len(masks.words)
        num_tokens[masks.kept] += 1
    assert all(num_tokens[:3] >= 3), num_tokens
