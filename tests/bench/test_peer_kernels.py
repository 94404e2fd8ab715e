"""What peers are given of our adapters, and that one which adds other numbers is found out."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bench.gpu.peer_kernels import SMALL, PeerTimes
from bench.gpu.peer_sources import Weights
from bench.table import Row
from slora_kernels.kernel_selector import select_kernels
from slora_kernels.layout import llama_shape

CPU = torch.device("cpu")
# In float32, two layers, and adapters of many pages.
SIZES = replace(SMALL, shape=llama_shape(2, 96, 4, 2, 24, 160, 100, 4), dtype=torch.float32, batches=(5,))


class PlainPeer:
    """In plain torch. factor: on what it adds."""

    def __init__(self, num_tokens: list[int], factor: float) -> None:
        self._num_tokens = num_tokens
        self._factor = factor

    def prepare(self, weights: Weights) -> Weights:
        return weights

    def run(self, x: Tensor, out: Tensor, weights: Weights) -> None:
        parts = zip(x.split(self._num_tokens), out.split(self._num_tokens), strict=True)
        for adapter, (rows, target) in enumerate(parts):
            deltas = [rows @ a[adapter].T @ b[adapter].T for a, b in zip(weights.a, weights.b, strict=True)]
            target += self._factor * torch.cat(deltas, 1)


def measure(factor: float) -> list[Row]:
    makers = {"plain": lambda num_tokens, _: PlainPeer(num_tokens, factor)}
    times = PeerTimes(SIZES, CPU, select_kernels("torch", CPU), makers)
    cases: list[tuple[Row, Callable[[], Row]]] = list(times.cases())
    return [key | measure() for key, measure in cases]


def test_a_peer_gets_the_numbers_that_lie_in_our_pages() -> None:
    rows = measure(1.0)
    assert [row["site"] for row in rows] == ["qkv", "o", "gate_up", "down"]
    assert all(row["over plain"] == row["plain"] / row["slora"] > 0 for row in rows)


def test_a_peer_that_adds_other_numbers_is_not_timed() -> None:
    with pytest.raises(AssertionError, match="plain"):
        measure(3.0)
