"""Bit masks of grammars, against a twin that reads each bit."""

import pytest
import torch

from slora_kernels.ops import Kernels


def draw_masks(count: int, vocab: int) -> torch.Tensor:
    """Random words of `count` masks, of which the first allows all tokens and the last none."""
    random = torch.Generator().manual_seed(vocab)
    words = torch.randint(-(2**31), 2**31, (count, -(-vocab // 32)), generator=random, dtype=torch.int64)
    words[0], words[-1] = -1, 0
    return words.to(torch.int32)


def mask_each_bit(logits: torch.Tensor, rows: list[int], masks: torch.Tensor) -> torch.Tensor:
    masked = logits.clone()
    for row, words in zip(rows, masks.tolist(), strict=True):
        for token in range(logits.shape[1]):
            if not words[token // 32] >> (token % 32) & 1:
                masked[row, token] = -torch.inf
    return masked


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize(
    ("vocab", "rows"), [(1, [0, 1]), (31, [0, 2, 3]), (257, [1, 3]), (2100, [0, 1, 2, 3])]
)
def test_the_banned_tokens_of_the_rows_with_a_mask_are_minus_infinity(
    kernels: Kernels, device: str, dtype: torch.dtype, vocab: int, rows: list[int]
) -> None:
    logits = torch.randn(4, vocab + 5, generator=torch.Generator().manual_seed(1)).to(dtype)[:, :vocab]
    masks = draw_masks(len(rows), vocab)
    found = logits.to(device)
    kernels.mask_logits(found, torch.tensor(rows, device=device), masks.to(device))
    assert torch.equal(found.cpu(), mask_each_bit(logits, rows, masks))
