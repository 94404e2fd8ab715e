"""Compiles launches again with the tensors of another step, and prints the kernels that Triton compiles anew for them.

    python -P -m tests.support.shifted_launches TARGET DTYPE PATTERN

PATTERN: the launches that are left out, see `slora_kernels.gpu.ahead_of_time`. The arrays of a step are parts of one
transfer, so the alignment of each depends on the sizes of those before it.
"""

import re
import sys
from dataclasses import replace

import torch
from torch import Tensor

from slora_kernels.gpu.ahead_of_time import DTYPES, set_compile_target
from slora_kernels.gpu.launch import Launch
from slora_kernels.gpu.lora_sizes import load_sizes
from slora_kernels.gpu.model_launches import bind_all
from slora_kernels.kv_format import KVFormat

# Allocated apart from all others: weights, tables of the engine, masks, and what a kernel writes for the next one.
_ALIGNED = {
    "codes", "values", "scales", "page_table", "modules", "groups", "affine", "masks", "starts", "tokens",
    "best_tokens", "block_tokens", "candidates",
}  # fmt: skip
_NUMBERS_OF_ROWS = {"temperature", "top_p", "min_p"}


def _is_of_step(launch: Launch, name: str, value: object) -> bool:
    if not isinstance(value, Tensor):
        return False
    if value.dtype in (torch.int32, torch.int64):
        return name not in _ALIGNED
    return name in _NUMBERS_OF_ROWS or (name == "weights" and "tiles" in launch.arguments)


def _shift(value: Tensor) -> Tensor:
    """The same tensor behind one element more."""
    return torch.zeros(value.numel() + 1, dtype=value.dtype)[1:].view(value.shape)


def shift(launch: Launch) -> Launch:
    arguments = {
        name: _shift(value) if isinstance(value, Tensor) and _is_of_step(launch, name, value) else value
        for name, value in launch.arguments.items()
    }
    if "block_tables" in arguments:
        arguments["table_stride"] = 7
    return replace(launch, arguments=arguments)


def main() -> None:
    target, dtype, left_out = sys.argv[1:]
    set_compile_target(target)
    seen = set()
    for case, launch in bind_all(DTYPES[dtype], [], [KVFormat.MODEL], load_sizes(target)):
        name = launch.kernel.__name__
        if name in seen or re.search(left_out, f"{name}: {case}"):
            continue
        seen.add(name)
        is_same = launch.compile().hash == shift(launch).compile().hash
        print(name, "same" if is_same else "other")


if __name__ == "__main__":
    main()
