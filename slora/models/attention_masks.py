"""The masks that transformers builds for plain attention, read as functions of positions.

An attention function that is registered without a mask function is given no mask: transformers then assumes that the
function masks by itself. Paged attention knows the causal mask and the causal mask within a window. A model whose
layers are masked in another way, or whose attention calls do not name their window, would get wrong answers there. The
model is therefore run once more with a mask function that keeps each layer's mask, so that the two can be compared.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["MaskFunction", "MaskRecord", "describe_mask_difference"]

# Whether a query sees a key, from indices of batch, head, query and key. Takes tensors and returns one.
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# Distances at which masks may change, where no length of the config says so.
_COMMON_DISTANCES = tuple(1 << exponent for exponent in range(21))


class MaskRecord:
    """Remembers which mask function made which mask of one forward pass on the meta device."""

    def __init__(self) -> None:
        self._made: list[tuple[Tensor, MaskFunction]] = []

    def make(self, *, q_length: int, kv_length: int, mask_function: MaskFunction, **_: Any) -> Tensor:
        """In transformers' terms: a mask [1, 1, q_length, kv_length], without data."""
        mask = torch.empty(1, 1, q_length, kv_length, dtype=torch.bool, device="meta")
        self._made.append((mask, mask_function))
        return mask

    def function_of(self, mask: Tensor) -> MaskFunction | None:
        """None: the model built the mask itself, or changed it."""
        return next((function for made, function in self._made if made is mask), None)


def describe_mask_difference(
    function: MaskFunction, window: int | None, lengths: Iterable[int], max_positions: int
) -> str | None:
    """How `function` differs from the causal mask within `window` tokens (None: all of them). None: it does not.

    Compared at tokens before and after each of `lengths`, at multiples of it, and at powers of two.
    """
    steps = {*lengths, *_COMMON_DISTANCES} | ({window} if window is not None else set())
    edges = {factor * step + offset for step in steps for factor in (1, 2, 3) for offset in (-1, 0, 1)}
    points = torch.tensor(sorted(edge for edge in {0, *edges} if 0 <= edge < max_positions))
    queries, keys = points.repeat_interleave(len(points)), points.repeat(len(points))
    # The tokens just inside and just outside a window are no common distances apart.
    shifted = queries - keys
    queries, keys = torch.cat((queries, queries)), torch.cat((keys, shifted.clamp(min=0)))
    expected = keys <= queries
    if window is not None:
        expected &= keys > queries - window
    zero = torch.zeros((), dtype=torch.int64)
    seen = function(zero, zero, queries, keys).expand(queries.shape)
    different = (seen != expected).nonzero()
    if not len(different):
        return None
    query, key = int(queries[different[0, 0]]), int(keys[different[0, 0]])
    difference = f"shows token {key} to" if seen[different[0, 0]] else f"hides token {key} from"
    told = "no window" if window is None else f"a window of {window} tokens"
    return f"its attention call is told {told}, but the model's own mask {difference} token {query}"
