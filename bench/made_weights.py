"""Weights for decoders whose checkpoint nobody has."""

from collections.abc import Sequence

import torch
from torch import Tensor

from slora.models.weights.weight_reader import LinearPart

_STD = 0.02


class MadeWeights:
    """What a `WeightReader` gives the decoder, without a checkpoint: random numbers, or none on the meta device."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self._random = None if device.type == "meta" else torch.Generator(device).manual_seed(0)

    def __contains__(self, name: str) -> bool:
        return False

    def vector(self, name: str, width: int) -> Tensor:
        return torch.ones(width, dtype=self.dtype, device=self.device)

    def matrix(
        self, name: str, num_rows: int, width: int, rows: range | None = None, num_held: int | None = None
    ) -> Tensor:
        weight = torch.empty(num_held or num_rows, width, dtype=self.dtype, device=self.device)
        return weight.normal_(std=_STD, generator=self._random)

    def head(self, name: str, num_rows: int, width: int, rows: range, num_held: int) -> Tensor:
        return self.matrix(name, num_rows, width, rows, num_held)

    def linear(self, parts: Sequence[LinearPart]) -> Tensor:
        return self.matrix("", sum(len(rows) for part in parts for rows in part.rows), len(parts[0].columns))

    def is_absent_or_same(self, name: str, other: str) -> bool:
        return False

    def skip_prefixes(self, prefixes: tuple[str, ...]) -> None: ...

    def read(self) -> None: ...
