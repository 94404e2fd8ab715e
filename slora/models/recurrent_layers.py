"""Runs the recurrent layers of transformers' classes (short convolutions, Mamba, gated delta nets) on our pages.

Such a layer passes a state from each token of a sequence to the next one. transformers keeps the states of a batch in a
cache, which the layer reads and updates through a few methods. `LayerStates` has the same methods. So the layer's own
arithmetic serves here, whatever its recurrence is: the rows of a step are passed to the layer in parts (`StateRows`),
all decode rows together and each longer chunk by itself, and each part comes with its states.

All states of a sequence form one byte string in pages of the pool, see `ModelSpec.lay_out_states`. A step reads each
state before it computes the layer, and writes it afterwards. A step that fails halfway leaves states of different
tokens behind, so the scheduler restarts its sequences.

A layer that keeps its state elsewhere needs a method that `LayerStates` lacks, and is refused.
"""

import inspect
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from slora.memory.device_memory import DeviceMemory
from slora.models.model_spec import ModelSpec, StateTensor
from slora.models.step_batch import StateRows

_CONV, _RECURRENT = "conv", "recurrent"
# The argument with which transformers' layers get the cache.
_CACHE_ARGUMENT = "cache"
_StateKey = tuple[str, int]


class LayerStates:
    """The states of one recurrent layer, for the sequences of one call. It has the methods of transformers' `Cache`.

    tensors: by kind and number, [B, ...] each. Empty if the sequences begin with this call.
    """

    def __init__(self, tensors: dict[_StateKey, Tensor] | None = None) -> None:
        self.tensors: dict[_StateKey, Tensor] = tensors or {}

    def get_conv_state(self, _: int, state_idx: int = 0) -> Tensor | None:
        return self.tensors.get((_CONV, state_idx))

    def get_recurrent_state(self, _: int, state_idx: int = 0) -> Tensor | None:
        return self.tensors.get((_RECURRENT, state_idx))

    def update_conv_state(
        self, conv_states: Tensor, _: int, state_idx: int = 0, *, conv_kernel_size: int, **__: object
    ) -> Tensor:
        """Returns the inputs of the convolution, [B, channels, n]: the kept ones and then the new ones."""
        before = self.tensors.get((_CONV, state_idx))
        if before is None:
            num_missing = max(0, conv_kernel_size - conv_states.shape[-1])
            inputs = nn.functional.pad(conv_states, (num_missing, 0))
        else:
            inputs = torch.cat((before, conv_states), dim=-1)
        self.tensors[_CONV, state_idx] = inputs[..., -conv_kernel_size:]
        return inputs

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> Tensor:
        self.tensors[_RECURRENT, state_idx] = recurrent_states
        return recurrent_states

    def is_recording_past(self, _: int) -> bool:
        """Whether earlier states are kept too, as transformers does for drafts."""
        return False


def find_stateful_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The innermost modules that get transformers' cache: layers of attention and recurrent layers."""
    getting = {
        name: module
        for name, module in model.named_modules()
        if _CACHE_ARGUMENT in inspect.signature(module.forward).parameters
    }
    for name, module in getting.items():
        if not any(other.startswith(f"{name}." if name else "") and other != name for other in getting):
            yield name, module


def call_with_states(forward: Callable[..., Tensor], hidden: Tensor, states: LayerStates) -> Tensor:
    """Computes a layer. hidden: [B, n, H], n tokens of each sequence. `states` has the updated states afterwards."""
    return forward(hidden, cache=states, attention_mask=None)


def describe_states(module: str, states: LayerStates) -> Iterator[StateTensor]:
    """The states that a call of the module for one sequence has left. In a model in bfloat16, others are float32."""
    for (kind, index), tensor in states.tensors.items():
        is_float32 = tensor.dtype == torch.float32
        yield StateTensor(module, kind, index, tuple(tensor.shape[1:]), is_float32)


class StatePages:
    """Reads and writes the states of one layer in the pages of the pool."""

    def __init__(self, spec: ModelSpec, module: str, dtype: torch.dtype) -> None:
        spans = spec.lay_out_states(str(dtype).removeprefix("torch."))
        self._states = [
            (state, torch.float32 if state.is_float32 else dtype, span)
            for state, span in zip(spec.states, spans, strict=True)
            if state.module == module
        ]

    def compute(
        self, forward: Callable[..., Tensor], hidden: Tensor, part: StateRows, memory: DeviceMemory
    ) -> Tensor:
        """Computes the layer for one part of a step. hidden: [B * n, H] -> [B * n, H]."""
        states = LayerStates(self._read(part, memory))
        out = call_with_states(forward, hidden.view(len(part.tables), part.num_tokens, -1), states)
        for state, dtype, span in self._states:
            _write(memory, part.tables, span, states.tensors[state.kind, state.index].to(dtype))
        return out.reshape(len(hidden), -1)

    def _read(self, part: StateRows, memory: DeviceMemory) -> dict[_StateKey, Tensor]:
        # A chunk of several tokens that begins a sequence has no state. A single token has one of zeros, which is the
        # same, so that all decode rows are one call.
        if part.num_tokens > 1 and part.all_new:
            return {}
        found = {}
        for state, dtype, span in self._states:
            rows = _read(memory, part.tables, span, state.num_bytes(str(dtype).removeprefix("torch.")))
            tensor = rows.view(dtype).reshape(len(rows), *state.shape)
            is_new = part.is_new.view(-1, *(1 for _ in state.shape))
            found[state.kind, state.index] = torch.where(is_new, torch.zeros_like(tensor), tensor)
        return found


# Bytes are copied in words, because copying single bytes takes several times as long.
_WORD = torch.int32


def _pieces(span: tuple[int, int], page_bytes: int) -> Iterator[tuple[int, slice, slice]]:
    """For each page that the span touches: its number, the words of the page, and the words of the span."""
    start, end = (bound // _WORD.itemsize for bound in span)
    page_words = page_bytes // _WORD.itemsize
    for page in range(start // page_words, -(-end // page_words)):
        first, last = max(start, page * page_words), min(end, (page + 1) * page_words)
        yield (
            page,
            slice(first - page * page_words, last - page * page_words),
            slice(first - start, last - start),
        )


def _read(memory: DeviceMemory, tables: Tensor, span: tuple[int, int], num_bytes: int) -> Tensor:
    """uint8 [B, num_bytes]: the first bytes of the span in the state of each sequence."""
    words = memory.pages.view(_WORD)
    pieces = [
        words[:, of_page].index_select(0, tables[:, page])
        for page, of_page, _ in _pieces(span, memory.full_page_bytes)
    ]
    return torch.cat(pieces, dim=1).view(torch.uint8)[:, :num_bytes]


def _write(memory: DeviceMemory, tables: Tensor, span: tuple[int, int], tensor: Tensor) -> None:
    """Writes a tensor [B, ...] to the first bytes of the span in the state of each sequence."""
    content = tensor.reshape(len(tensor), -1).contiguous().view(torch.uint8)
    content = nn.functional.pad(content, (0, span[1] - span[0] - content.shape[1])).view(_WORD)
    words = memory.pages.view(_WORD)
    for page, of_page, of_span in _pieces(span, memory.full_page_bytes):
        words[:, of_page].index_copy_(0, tables[:, page], content[:, of_span])
