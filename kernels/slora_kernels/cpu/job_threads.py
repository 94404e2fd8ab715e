"""Decides how many items a job needs for torch's number of threads."""

from collections.abc import Callable

import torch
from torch import Tensor

# The minimum number of items per thread. A job that would have fewer is cut into smaller items.
_ITEMS_PER_THREAD = 4
# A function that reserves scratch memory. It takes the number of float32 per thread and returns [threads, number].
Reserve = Callable[[int], Tensor]


def count_busy_items() -> int:
    """Returns how many items a job needs so that all threads finish at about the same time."""
    return _ITEMS_PER_THREAD * torch.get_num_threads()
