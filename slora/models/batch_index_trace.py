"""Finds values that a model computes from a token's index in the batch, instead of its position in the sequence.

A step holds tokens of many sequences, so a token's batch index has no meaning for its sequence. A model that uses the
batch index would change a sequence's answer whenever other sequences come before it in the batch. Short prompts may not
show the difference: Llama 4 scales queries by index, but only from the 8,192nd token on. So this module traces the
model's arithmetic instead.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["BatchIndexTrace"]

_aten = torch.ops.aten
_NUMBERINGS = (_aten.arange.default, _aten.arange.start, _aten.arange.start_step)
# Operations whose indices select rows but do not enter the values. For example, a mixture of experts numbers its tokens
# to sort them by expert.
_SELECTIONS = frozenset(
    {
        _aten.index,
        _aten.index_add,
        _aten.index_add_,
        _aten.index_copy_,
        _aten.index_put,
        _aten.index_put_,
        _aten.index_select,
        _aten.gather,
        _aten.scatter,
        _aten.scatter_,
        _aten.scatter_add,
        _aten.scatter_add_,
    }
)


class BatchIndexTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that records every tensor computed from a numbering of `num_tokens` tokens."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._num_tokens = num_tokens
        # Traced tensors are kept alive, so that their ids are not reused.
        self._traced: dict[int, Tensor] = {}

    def is_traced(self, tensor: Tensor) -> bool:
        return id(tensor) in self._traced

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _NUMBERINGS:
            is_traced = result.shape == (self._num_tokens,)
        elif func.overloadpacket in _SELECTIONS:
            is_traced = self.is_traced(args[0]) or (
                len(args) > 3 and any(map(self.is_traced, _tensors(args[3])))
            )
        else:
            is_traced = any(map(self.is_traced, _tensors((args, kwargs or {}))))
        if is_traced:
            self._traced |= {id(tensor): tensor for tensor in _tensors(result)}
        return result


def _tensors(value: object) -> Iterator[Tensor]:
    """All tensors in nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
