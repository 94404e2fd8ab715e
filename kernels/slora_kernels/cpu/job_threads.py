"""How many items a job is cut into, given torch's number of threads."""

from collections.abc import Callable

import torch
from torch import Tensor

# Jobs are cut into smaller items until there are this many per thread.
_ITEMS_PER_THREAD = 4
# Returns scratch of the given number of float32 for each thread, [threads, numbers].
Reserve = Callable[[int], Tensor]


def count_busy_items() -> int:
    """The number of items from which on no thread waits long for the last one to finish."""
    return _ITEMS_PER_THREAD * torch.get_num_threads()
