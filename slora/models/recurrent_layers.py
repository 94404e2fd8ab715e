"""Runs the recurrent layers of transformers' classes (short convolutions, Mamba, gated delta nets) on our pages.

Such a layer passes a state from each token of a sequence to the next one. transformers keeps the states of a batch in a
cache, which the layer reads and updates through a few methods. `LayerStates` has the same methods. So the layer's own
arithmetic serves here, whatever its recurrence is: the rows of a step are passed to the layer in parts (`StateRows`),
all decode rows together and each longer chunk by itself, and each part comes with its states.

All states of a sequence form one byte string in pages of the pool, see `ModelSpec.lay_out_states`. A step reads each
state before it computes the layer, and writes it afterwards. A step that fails halfway leaves states of different
tokens behind, so the scheduler restarts its sequences.

A layer that keeps its state elsewhere needs a method that `LayerStates` lacks, and is refused.

transformers' layers compute a prompt by other code than single tokens. `check_recurrent_layers` compares the two at
start. Random weights and a small model do not show every difference: Mamba-2's class limits the time steps of a prompt
only, which matters if those of the checkpoint exceed the limits.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slora.core.errors import ConfigError
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


# The tokens of each call. Each call reads all weights of a layer, so more of them would take seconds in large models.
_CHUNKS = (11, 9)
_NUM_SINGLE = 3
_NUM_TOKENS = sum(_CHUNKS) + _NUM_SINGLE
# Limits of the root mean square of a token's difference, relative to that of all outputs. In float32, rounding gave at
# most 8e-7 over eight architectures. Fused kernels on a GPU may multiply in TF32.
_TOLERANCE, _TOLERANCE_OF_FUSED = 1e-4, 3e-3
# The most tokens of a chunk of a scan. The usual 256 would take seconds and gigabytes, and test one chunk only.
_SCAN_TOKENS = 16


@torch.inference_mode()
def check_recurrent_layers(model: nn.Module, spec: ModelSpec) -> None:
    """Raises ConfigError if a recurrent layer computes a sequence in several calls otherwise than in one.

    Of layers that differ only in their weights, one is computed, in float32.
    """
    seen = set()
    for path in dict.fromkeys(state.module for state in spec.states):
        module = model.get_submodule(path)
        kind = _describe_kind(module)
        if kind not in seen:
            seen.add(kind)
            _check_layer(path, module, spec)


def _describe_kind(module: nn.Module) -> tuple[object, ...]:
    """What layers with the same arithmetic share: their class, and the sizes and settings of their modules."""
    sizes = tuple((name, *parameter.shape) for name, parameter in module.named_parameters())
    settings = tuple(
        (path, name, repr(value))
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, int | float | str | tuple | list) and "layer" not in name
    )
    return type(module), sizes, settings


def _check_layer(path: str, module: nn.Module, spec: ModelSpec) -> None:
    # `forward` of the module itself reads its states from pages.
    layer: Any = copy.deepcopy(module, {id(vars(module).get("forward")): None}).float()
    for part in layer.modules():
        if isinstance(getattr(part, "chunk_size", None), int):
            part.chunk_size = min(part.chunk_size, _SCAN_TOKENS)
    device = next(layer.parameters()).device
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, _NUM_TOKENS, spec.sizes.hidden_size, generator=random)
    # Of different sizes, so that the gates of a recurrence are open in some tokens and closed in others.
    hidden *= torch.exp2(torch.rand(1, _NUM_TOKENS, 1, generator=random) * 4 - 2)
    hidden = hidden.to(device)
    zeros = {
        (state.kind, state.index): torch.zeros(1, *state.shape, device=device)
        for state in spec.states
        if state.module == path
    }
    chunks = _CHUNKS if spec.continues_states else (sum(_CHUNKS),)
    ways: dict[str, tuple[Sequence[int], LayerStates]] = {
        "in chunks and then token by token": ((*chunks, *(1,) * _NUM_SINGLE), LayerStates()),
        "token by token": ((1,) * _NUM_SINGLE, LayerStates(zeros)),
    }

    def compute(lengths: Sequence[int], states: LayerStates) -> Tensor:
        parts = torch.split(hidden[:, : sum(lengths)], list(lengths), dim=1)
        return torch.cat([call_with_states(layer.forward, part, states) for part in parts], dim=1)[0].double()

    layer.forward = type(module).forward.__get__(layer)
    expected = compute([_NUM_TOKENS], LayerStates())
    most = _TOLERANCE if device.type == "cpu" else _TOLERANCE_OF_FUSED
    for how, (lengths, states) in ways.items():
        name = f"{type(module).__name__} at {path}"
        refusal = f"model_type {spec.family!r} can't be served: {name} computes a sequence {how}"
        try:
            answers = compute(lengths, states)
        except Exception as error:
            # The layer's code belongs to transformers and may raise any exception.
            raise ConfigError(f"{refusal}, but that failed: {type(error).__name__}: {error}") from error
        errors = (answers - expected[: len(answers)]).square().mean(dim=1).sqrt()
        off = float(errors.max() / expected.square().mean().sqrt())
        if not off <= most:
            raise ConfigError(
                f"{refusal} otherwise than in one call; the outputs differ by {off:.2g} of their size, and rounding "
                f"explains at most {most:.2g}"
            )
