"""Memory is mapped before its first use, and its contents do not change."""

import os
import platform
from pathlib import Path

import torch

from slora.memory.host_memory import empty_tensor, prefault

CPU = torch.device("cpu")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_prefaulting_maps_all_of_the_memory_and_changes_no_byte() -> None:
    tensor = empty_tensor((96 << 20,), torch.uint8, CPU)
    tensor[5 << 20] = 7
    before = resident_bytes()
    thread = prefault(tensor)
    assert thread is not None
    tensor[50 << 20] = 9  # written while the mapping runs
    thread.join()
    assert tensor[5 << 20] == 7 and tensor[50 << 20] == 9
    major, minor = map(int, platform.release().split(".")[:2])
    # Older kernels do not support this; they clear each page at its first write.
    if (major, minor) >= (5, 14):
        assert resident_bytes() - before > 60 << 20


def test_small_tensors_are_not_prefaulted() -> None:
    assert prefault(torch.empty(1000)) is None
