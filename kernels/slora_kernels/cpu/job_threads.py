"""What a job is cut for: the threads that torch has."""

from collections.abc import Callable

import torch
from torch import Tensor

# Items of a job are made smaller until there are this many for each thread.
_ITEMS_PER_THREAD = 4
# Scratch of so many float32 for each thread, [threads, numbers].
Reserve = Callable[[int], Tensor]


def count_busy_items() -> int:
    """Items from which on no thread waits long for the last."""
    return _ITEMS_PER_THREAD * torch.get_num_threads()
