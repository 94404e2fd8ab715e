"""Compares the masks of transformers' plain attention with the masks that paged attention implements.

transformers builds no mask for an attention function that is registered without a mask function, because it assumes
that such a function masks by itself. Paged attention implements the causal mask, and the causal mask within a sliding
window. A model with other masks, or whose attention calls do not pass their window, would get wrong answers. The model
is therefore run a second time with a mask function that records the mask of each layer, and the two are compared.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["MaskFunction", "MaskRecord", "describe_mask_difference"]

# Returns whether a query sees a key. The arguments are the indices of batch, head, query and key, as tensors.
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# Distances at which a mask may change, in addition to the lengths in the config.
_COMMON_DISTANCES = tuple(1 << exponent for exponent in range(21))


class MaskRecord:
    """Records which mask function built which mask in one forward pass on the meta device."""

    def __init__(self) -> None:
        self._made: list[tuple[Tensor, MaskFunction]] = []

    def make_mask(self, *, q_length: int, kv_length: int, mask_function: MaskFunction, **_: Any) -> Tensor:
        """transformers' mask interface: returns a mask [1, 1, q_length, kv_length] without data."""
        mask = torch.empty(1, 1, q_length, kv_length, dtype=torch.bool, device="meta")
        self._made.append((mask, mask_function))
        return mask

    def find_function(self, mask: Tensor) -> MaskFunction | None:
        """The function that built the mask. None if the model built the mask itself, or changed it."""
        return next((function for made, function in self._made if made is mask), None)


def describe_mask_difference(
    function: MaskFunction, window: int | None, lengths: Iterable[int], max_positions: int
) -> str | None:
    """Describes how `function` differs from the causal mask within `window` tokens, or returns None if it does not.

    window: None means that a token sees all earlier tokens. The masks are compared at tokens just before and after each
    of `lengths`, at multiples of each length, and at powers of two.
    """
    steps = {*lengths, *_COMMON_DISTANCES} | ({window} if window is not None else set())
    edges = {factor * step + offset for step in steps for factor in (1, 2, 3) for offset in (-1, 0, 1)}
    points = torch.tensor(sorted(edge for edge in {0, *edges} if 0 <= edge < max_positions))
    queries, keys = points.repeat_interleave(len(points)), points.repeat(len(points))
    # Add the pairs just inside and just outside a window, which the points above do not contain.
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
    return f"its attention call has {told}, but the model's own mask {difference} token {query}"
