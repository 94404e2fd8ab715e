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
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from slora.core.errors import ConfigError
from slora.memory.device_memory import DeviceMemory
from slora.models.model_spec import ModelSpec, StateTensor
from slora.models.step_batch import StateRows
from slora_kernels.kernel_selector import find_token_recurrence
from slora_kernels.torch.torch_kernels import apply_activation

_CONV, _RECURRENT = "conv", "recurrent"
# The argument with which transformers' layers get the cache.
_CACHE_ARGUMENT = "cache"
_StateKey = tuple[str, int]
# Bytes are copied in words, because copying single bytes takes several times as long.
_WORD = torch.int32


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

    def get_linear_cache(self, _: int) -> Tensor | None:
        return self.tensors.get((_RECURRENT, 0))

    def set_linear_cache(self, _: int, linear_cache: Tensor) -> None:
        self.tensors[_RECURRENT, 0] = linear_cache

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


class StatefulCall:
    """Calls the forward pass of a recurrent layer with states in place of a cache, and without what only layers of
    attention need.

    num_outputs: the length of the tuple that the last call returned. None: it returned the hidden states alone.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward
        self.num_outputs: int | None = None
        _, *others = inspect.signature(forward).parameters.values()
        required = [
            one.name for one in others if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD
        ]
        self._options = dict.fromkeys([*required, "attention_mask"])

    def compute(self, hidden: Tensor, states: LayerStates) -> Tensor:
        """Computes the layer. hidden: [B, n, H] -> [B, n, H], n tokens of each sequence.

        `states` has the updated states afterwards.
        """
        out: Tensor | tuple[Tensor, ...] = self._forward(hidden, **{**self._options, _CACHE_ARGUMENT: states})
        self.num_outputs = len(out) if isinstance(out, tuple) else None
        return out[0] if isinstance(out, tuple) else out


def bind_forward(module: nn.Module) -> Callable[..., Any]:
    """The forward pass of a recurrent layer.

    On a CPU, it is the layer's own code, in which functions of this module compute single tokens. Those of transformers
    read and write each state about ten times, and round some elements by their place in the batch.
    """
    code, names = inspect.unwrap(type(module).forward), _list_token_functions(module)
    if not names:
        return module.forward
    own = {name: partial(_TOKEN_FUNCTIONS[name][0], code.__globals__[name]) for name in names}
    bound = FunctionType(
        code.__code__, {**code.__globals__, **own}, code.__name__, code.__defaults__, code.__closure__
    )
    bound.__kwdefaults__ = code.__kwdefaults__
    return MethodType(bound, module)


def warm_up_layers(layers: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Compiles the machine code with which recurrent layers compute single tokens in `dtype`, and in float32, as the
    check at start does.
    """
    code = find_token_recurrence()
    names = {name for layer in layers for name in _list_token_functions(layer)}
    if names and code is not None:
        code.warm_up(
            sorted(_TOKEN_FUNCTIONS[name][1] for name in names), list(dict.fromkeys((torch.float32, dtype)))
        )


def _list_token_functions(module: nn.Module) -> list[str]:
    """The names in `_TOKEN_FUNCTIONS` that a recurrent layer on a CPU calls."""
    code = inspect.unwrap(type(module).forward)
    if next(module.parameters()).device.type != "cpu" or not isinstance(code, FunctionType):
        return []
    return [name for name in _TOKEN_FUNCTIONS if name in code.__code__.co_names and name in code.__globals__]


def _convolve_token(
    theirs: Callable[..., Tensor],
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Convolves one token with the inputs before it. hidden_states: [B, C, 1] -> [B, C, 1].

    conv_state: [B, C, n], the inputs before it, which are updated. weight: [C, K]. theirs: transformers' function with
    the same arguments, for what is not computed here.
    """
    if hidden_states.shape[2] != 1 or activation not in (None, "silu", "swish"):
        return theirs(hidden_states, conv_state, weight, bias, activation)
    code, x = find_token_recurrence(), hidden_states[..., 0]
    operands = [x, conv_state, weight, *(() if bias is None else (bias,))]
    is_whole = conv_state.shape[:2] == x.shape and conv_state.shape[2] + 1 >= weight.shape[1]
    if code is not None and is_whole and code.suits(conv_state, operands, x.dtype):
        convolved: Tensor = code.convolve(x, conv_state, weight, bias, activates=activation is not None)
        return convolved[..., None]
    window = torch.cat((conv_state, hidden_states.to(conv_state.dtype)), dim=2)
    conv_state.copy_(window[..., 1:])
    terms = (window[..., -weight.shape[1] :].to(weight.dtype).float() * weight.float()).unbind(2)
    out = terms[0]
    for term in terms[1:]:
        out = out + term
    if bias is not None:
        out = out + bias.float()
    if activation is not None:
        out = apply_activation(out.to(weight.dtype).float(), "silu")
    return out.to(hidden_states.dtype)[..., None]


def _apply_delta_rule(
    theirs: Callable[..., tuple[Tensor, Tensor | None]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule for one token. query, key [B, 1, Hk, Dk] and value [B, 1, Hv, Dv] -> [B, 1, Hv, Dv].

    initial_state: [B, Hv, Dk, Dv], which is updated and returned.
    """
    if query.shape[1] != 1 or initial_state is None or initial_state.dtype != torch.float32:
        return theirs(
            query,
            key,
            value,
            g=g,
            beta=beta,
            initial_state=initial_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            **options,
        )
    batch, _, key_heads, width = key.shape
    heads, code = value.shape[2], find_token_recurrence()
    is_whole = initial_state.shape == (batch, heads, width, value.shape[3]) and heads % key_heads == 0
    if code is not None and is_whole and code.suits(initial_state, (query, key, value, beta), query.dtype):
        out: Tensor = code.apply_delta_rule(
            *(query[:, 0], key[:, 0], value[:, 0], torch.exp(g[:, 0].float()), beta[:, 0], initial_state),
            norms=use_qk_l2norm_in_kernel,
        )
        return out[:, None], initial_state
    pairs = torch.stack((key[:, 0], query[:, 0]), dim=2).float()
    if use_qk_l2norm_in_kernel:
        pairs = pairs * torch.rsqrt(pairs.square().sum(-1, keepdim=True) + _NORM_EPS)
    pairs[:, :, 1] *= width**-0.5
    pairs = pairs[:, :, None].expand(-1, -1, heads // key_heads, -1, -1).reshape(batch, heads, 2, width)
    products = (pairs[:, :, 0] * pairs[:, :, 1]).sum(-1, keepdim=True)
    decay, factor = torch.exp(g[:, 0].float())[..., None, None], beta[:, 0].float()[..., None]
    seen = pairs.new_empty(batch, heads, 2, value.shape[3])
    # A state is in the cache of the core while its own operations follow one another.
    for state, scale, pair, sums in zip(initial_state, decay, pairs, seen, strict=True):
        torch.bmm(pair, state.mul_(scale), out=sums)
    delta = (value[:, 0].float() - seen[:, :, 0]) * factor
    for state, keys, change in zip(initial_state, pairs[:, :, 0, :, None], delta[:, :, None], strict=True):
        state.baddbmm_(keys, change)
    out = seen[:, :, 1] + products * delta
    return out.to(query.dtype)[:, None], initial_state


def _scan_token(
    theirs: Callable[..., Tensor],
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Mamba-2's recurrence for one token. hidden_states: [B, H, D] -> [B, H, D].

    state: [B, H, D, N], which is updated. dt [B, H, D], A [H, D, N], and D and the option `dt_bias` [H, D] are the
    same for all elements of a head. B, C: [B, G, N].
    """
    bias, gate = options.get("dt_bias"), options.get("z")
    of_heads = [tensor for tensor in (dt, A, D, bias) if tensor is not None]
    is_known = state.dtype == torch.float32 and all(tensor.stride(-1) == 0 for tensor in of_heads)
    if not is_known or A.stride(1) != 0 or gate is not None or not options.get("dt_softplus"):
        return theirs(state, hidden_states, dt, A, B, C, D, **options)
    batch, heads, _ = hidden_states.shape
    step = dt[..., 0].float()
    if bias is not None:
        step = step + bias[:, 0].float()
    step = torch.log1p(torch.exp(-step.abs())) + step.clamp(min=0)
    decay = torch.exp(step * A[:, 0, 0].float())
    code = find_token_recurrence()
    is_whole = state.shape == (*hidden_states.shape, B.shape[2]) and heads % B.shape[1] == 0
    if code is not None and is_whole and code.suits(state, (hidden_states, B, C), hidden_states.dtype):
        skip = torch.zeros(heads) if D is None else D[:, 0].float().contiguous()
        scanned: Tensor = code.scan(hidden_states, B, C, step, decay, skip, state)
        return scanned
    decay = decay[..., None, None]
    x = hidden_states.float()
    changes = (x * step[..., None])[..., None]
    inputs, outputs = (
        part.float()[:, :, None].expand(-1, -1, heads // part.shape[1], -1).reshape(batch, heads, -1)
        for part in (B, C)
    )
    out = torch.empty_like(changes)
    for one, scale, change, to_state, from_state, sums in zip(
        state, decay, changes, inputs[:, :, None], outputs[..., None], out, strict=True
    ):
        torch.bmm(one.mul_(scale).baddbmm_(change, to_state), from_state, out=sums)
    total = out[..., 0] if D is None else out[..., 0] + x * D[:, 0, None].float()
    return total.to(hidden_states.dtype)


# What transformers adds to the square of a key or a query.
_NORM_EPS = 1e-6
# By the names of transformers' functions: ours, and the function of machine code that it calls.
_TOKEN_FUNCTIONS: dict[str, tuple[Callable[..., Any], str]] = {
    "causal_conv1d_update": (_convolve_token, "convolve"),
    "torch_recurrent_gated_delta_rule": (_apply_delta_rule, "apply_delta_rule"),
    "mamba2_selective_state_update": (_scan_token, "scan"),
}


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

    def compute(self, call: StatefulCall, hidden: Tensor, part: StateRows, memory: DeviceMemory) -> Tensor:
        """Computes the layer for one part of a step. hidden: [B * n, H] -> [B * n, H]."""
        # The states of a layer follow one another, and share the first and the last page with other layers.
        first, end = self._states[0][2][0], self._states[-1][2][1]
        first_page, end_page = first // memory.full_page_bytes, -(-end // memory.full_page_bytes)
        start = first_page * memory.full_page_bytes
        pages = memory.pages.view(_WORD)
        if end_page == first_page + 1:
            pages = pages[:, (first - start) // _WORD.itemsize : (end - start) // _WORD.itemsize]
            start = first
        page_ids = part.tables[:, first_page:end_page].reshape(-1)
        words = pages.index_select(0, page_ids)
        held = dict(self._cut(words.view(len(part.tables), -1), start, part))
        # A chunk of several tokens that begins a sequence has no state. A single token has one of zeros, which is the
        # same, so that all decode rows are one call.
        states = LayerStates({} if part.num_tokens > 1 and part.all_new else dict(held))
        out = call.compute(hidden.view(len(part.tables), part.num_tokens, -1), states)
        for key, tensor in held.items():
            if states.tensors[key] is not tensor:
                tensor.copy_(states.tensors[key])
        pages.index_copy_(0, page_ids, words)
        return out.reshape(len(hidden), -1)

    def _cut(self, words: Tensor, first_byte: int, part: StateRows) -> Iterator[tuple[_StateKey, Tensor]]:
        """Yields views of the states in the pages of a part's sequences.

        words: int32 [B, n], the content from byte `first_byte` of each sequence's state on.
        """
        for state, dtype, span in self._states:
            start, end = (bound - first_byte for bound in span)
            if part.any_new:
                own = words[:, start // _WORD.itemsize : end // _WORD.itemsize]
                own.masked_fill_(part.is_new[:, None], 0)
            num_bytes = state.num_bytes(str(dtype).removeprefix("torch."))
            numbers = words.view(torch.uint8)[:, start : start + num_bytes].view(dtype)
            yield (state.kind, state.index), numbers.view(len(words), *state.shape)


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
        return torch.cat([call.compute(part, states) for part in parts], dim=1)[0].double()

    vars(layer).pop("forward", None)
    layer.forward = bind_forward(layer)
    call = StatefulCall(layer.forward)
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
