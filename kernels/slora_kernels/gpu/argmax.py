"""The maximum and argmax of each row of logits.

A program reads one block of a row. A second kernel merges the blocks of each row. The result does not depend on the
order, because the smallest of equal indices wins.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slora_kernels.gpu.launch import Launch

# 64 rows of 128,256 logits give 1,024 programs, each of which reads 16 KB.
_BLOCK = 8192
_WARPS = 8


@triton.jit
def _find_first(values, ids, COUNT: tl.constexpr):
    """The maximum, which is NaN if any value is, and the smallest id of a maximum (the first id of all, if NaN)."""
    is_nan = values != values
    best = tl.max(tl.where(is_nan, float("-inf"), values), 0)
    has_nan = tl.max(is_nan.to(tl.int32), 0)
    token = tl.min(tl.where((values == best) | (has_nan > 0), ids, COUNT), 0)
    return tl.where(has_nan > 0, float("nan"), best), token


@triton.jit
def _block_argmax_kernel(logits, best, tokens, row_stride, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row * row_stride + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
    block_best, token = _find_first(values, ids, VOCAB)
    place = row * tl.num_programs(1) + block
    tl.store(best + place, block_best)
    tl.store(tokens + place, token)


@triton.jit
def _merge_argmax_kernel(
    block_best, block_tokens, best, tokens, BLOCKS: tl.constexpr, PADDED: tl.constexpr, VOCAB: tl.constexpr
):
    row = tl.program_id(0)
    blocks = tl.arange(0, PADDED)
    inside = blocks < BLOCKS
    values = tl.load(block_best + row * BLOCKS + blocks, mask=inside, other=float("-inf"))
    ids = tl.load(block_tokens + row * BLOCKS + blocks, mask=inside, other=VOCAB)
    row_best, token = _find_first(values, ids, VOCAB)
    tl.store(best + row, row_best)
    tl.store(tokens + row, token.to(tl.int64))


def bind_argmax(logits: Tensor) -> tuple[list[Launch], Tensor, Tensor]:
    """Binds the kernels to logits [B, V]. Returns the launches and their outputs: float32 [B] and int64 [B]."""
    num_rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, _BLOCK)
    block_best = torch.empty(num_rows, blocks, dtype=torch.float32, device=logits.device)
    block_tokens = torch.empty(num_rows, blocks, dtype=torch.int32, device=logits.device)
    best = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    find = Launch(
        _block_argmax_kernel,
        (num_rows, blocks),
        {"logits": logits, "best": block_best, "tokens": block_tokens, "row_stride": logits.stride(0)},
        {"VOCAB": vocab, "BLOCK": _BLOCK},
        _WARPS,
    )
    merge = Launch(
        _merge_argmax_kernel,
        (num_rows,),
        {"block_best": block_best, "block_tokens": block_tokens, "best": best, "tokens": tokens},
        {"BLOCKS": blocks, "PADDED": triton.next_power_of_2(blocks), "VOCAB": vocab},
        1,
    )
    return [find, merge], best, tokens
