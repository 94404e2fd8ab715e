"""Computes the mixtures of experts of transformers' classes with our kernels, and with LoRA on experts and routers.

Since transformers 5, one module holds the weights of all experts of a layer as two parameters. A decorator of its class
tells how they are stored, and the module has a method or a module for the activation between them. `ExpertLayer`
multiplies the rows of all experts by groups, as our own decoder does, and calls that activation. `ExpertLayer.check`
compares it with the class's own forward pass, so a class with another arithmetic is refused.

The experts of Llama 4 have no decorator. They get each token once for each expert, multiplied by the router's score,
which is zero for the experts that the token has not chosen.

A router is a module that multiplies by its parameter `weight` and then chooses experts. Its forward pass runs as it is
in a `MixtureBlock`, which computes the product.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from slora.core.errors import ConfigError
from slora.models.decoder import ExpertChoice
from slora.models.lora_deltas import LoraDeltas
from slora.models.weights.linear import multiply
from slora_kernels.layout import LinearDivision, LinearShape, LoraSite
from slora_kernels.ops import Kernels

_DOWN = "down_proj"
_POST_NORM = "post_expert_norm"
# What the decorator tells of a class, and what holds if it does not. Its module has the activation of most classes.
_FLAGS = {
    "has_gate": True,
    "has_bias": False,
    "has_post_expert_norm": False,
    "is_transposed": None,
    "is_concatenated": True,
}
_DECORATING_MODULE = "transformers.integrations.moe"
# Limits of the difference of two ways to compute the same rows, relative to the root mean square of the results.
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}
_CHECKED_TOKENS = 5
_CASTS = (Tensor.float, Tensor.to, Tensor.type)
_SIGMOIDS = (torch.sigmoid, Tensor.sigmoid)
# A stack of matrices has this many dimensions.
_STACK_DIMS = 3
_GROUPED_ROW_BYTES = 16

# What a step passes to the modules of the model; None outside a step.
FindStep = Callable[[], tuple[LoraDeltas, Kernels] | None]


@dataclass(frozen=True, slots=True)
class ExpertForm:
    """How a module stores the experts' weights.

    up: the name of the parameter that is multiplied first. It has the gate, too, if `has_gate`.
    is_transposed: the parameters are [E, in, out] instead of [E, out, in].
    is_swapped: PEFT nevertheless takes them for [E, out, in].
    has_halves: the outputs of the gate come before those of up.
    has_norm: the outputs of each expert are normalized.
    takes_scaled: the module gets all tokens for each expert, [E * T, in], already multiplied by the router's scores.
        The others get the tokens [T, in], the experts of each token, and their weights.
    """

    up: str
    num_experts: int
    widths: tuple[int, int, int]  # Of the inputs, of the activation's results, and of the outputs.
    has_gate: bool
    has_bias: bool
    is_transposed: bool
    is_swapped: bool
    has_halves: bool
    has_norm: bool
    takes_scaled: bool

    @property
    def names(self) -> tuple[str, str]:
        return self.up, _DOWN

    def list_linears(self, path: str, division: LinearDivision) -> list[LinearShape]:
        """The linears of the experts at `path`, in the order in which PEFT wraps their parameters.

        division: of the first one, see `find_expert_division`.
        """
        first, middle, last = self.widths
        of_up = (first, middle * (2 if self.has_gate else 1))
        return [
            LinearShape(
                f"{path}.{name}",
                *sizes,
                num_experts=self.num_experts,
                is_transposed=self.is_swapped,
                role="experts",
                has_halves=halves,
                division=of_ranks,
            )
            for name, sizes, halves, of_ranks in (
                (self.up, of_up, self.has_halves, division),
                (_DOWN, (middle, last), False, "whole" if division == "whole" else "columns"),
            )
        ]


def describe_experts(module: nn.Module) -> ExpertForm | None:
    """Returns the form of the experts in a module; None if it holds none, or if their form is unknown."""
    flags = {name: getattr(module, name, default) for name, default in _FLAGS.items()}
    takes_scaled = _takes_scaled(module)
    if takes_scaled:
        flags["is_transposed"] = True
    is_decorated = hasattr(type(module).forward, "__wrapped__")
    if not (is_decorated or takes_scaled) or not all(isinstance(flag, bool) for flag in flags.values()):
        return None
    up = "gate_up_proj" if flags["has_gate"] else "up_proj"
    biases = [f"{up}_bias", f"{_DOWN}_bias"] if flags["has_bias"] else []
    parameters = dict(module.named_parameters())
    if flags["has_post_expert_norm"]:
        parameters = {name: one for name, one in parameters.items() if not name.startswith(f"{_POST_NORM}.")}
    stacks = [parameters[name] for name in parameters if name in (up, _DOWN)]
    if parameters.keys() != {up, _DOWN, *biases} or next(iter(parameters)) != up:
        return None
    if any(stack.dim() != _STACK_DIMS for stack in stacks):
        return None
    shapes = [stack.mT.shape if flags["is_transposed"] else stack.shape for stack in stacks]
    (count, up_width, first), (down_count, last, middle) = shapes
    if count != down_count or count == 1 or up_width != middle * (2 if flags["has_gate"] else 1):
        return None
    widths = {f"{up}_bias": up_width, f"{_DOWN}_bias": last}
    if any(parameters[name].shape != (count, widths[name]) for name in biases):
        return None
    gate = getattr(module, "_apply_gate", None)
    if flags["has_gate"] and gate is None and not takes_scaled:
        return None
    has_own_gate = gate is not None and getattr(gate, "__module__", None) != _DECORATING_MODULE
    return ExpertForm(
        up,
        count,
        (first, middle, last),
        has_gate=bool(flags["has_gate"]),
        has_bias=bool(flags["has_bias"]),
        is_transposed=bool(flags["is_transposed"]),
        # PEFT reads this attribute, too.
        is_swapped=bool(flags["is_transposed"] and not getattr(module, "is_transposed", False)),
        has_halves=bool(flags["has_gate"] and flags["is_concatenated"] and not has_own_gate),
        has_norm=bool(flags["has_post_expert_norm"]),
        takes_scaled=takes_scaled,
    )


def avoid_grouped_products(model: PreTrainedModel) -> None:
    """Lets the model multiply its experts one after the other if PyTorch's grouped product refuses their rows.

    It wants rows of a multiple of 16 bytes, also after a division among ranks. transformers does not check this.
    """
    for module in model.modules():
        form = describe_experts(module)
        if form is not None:
            itemsize = module.get_parameter(_DOWN).itemsize
            if any(width * itemsize % _GROUPED_ROW_BYTES for width in form.widths):
                model.set_experts_implementation("eager")
                return


@torch.inference_mode()
def find_expert_division(module: nn.Module, form: ExpertForm) -> LinearDivision:
    """Returns how ranks can divide the first linear of experts, so that only the outputs of the second one have to be
    summed: `rows`, `halves`, or `whole` if its activation needs all outputs.

    The activation is computed from random outputs, and from a part of them.
    """
    if form.has_norm:
        return "whole"
    width = 4 * _CHECKED_TOKENS
    up = torch.randn(_CHECKED_TOKENS, width, generator=torch.Generator().manual_seed(0))
    halves = [half.chunk(2, dim=-1)[0] for half in up.chunk(2, dim=-1)]
    parts: dict[LinearDivision, Tensor] = {"rows": up[:, : width // 2], "halves": torch.cat(halves, dim=-1)}
    try:
        whole = _activate(module, form, up)
        for division, part in parts.items():
            if torch.allclose(_activate(module, form, part), whole[:, : whole.shape[1] // 2]):
                return division
    except Exception:
        # The module's code belongs to transformers and may raise any exception.
        return "whole"
    return "whole"


def _activate(module: Any, form: ExpertForm, up: Tensor) -> Tensor:
    """The outputs of the first linear of experts [S, up width] -> the inputs of the second one."""
    if form.takes_scaled:
        gate, linear = up.chunk(2, dim=-1)
        gated: Tensor = module.act_fn(gate) * linear
    else:
        gated = module._apply_gate(up) if form.has_gate else module.act_fn(up)
    return gated


def _takes_scaled(module: nn.Module) -> bool:
    """Whether a module looks like the experts of Llama 4. `ExpertLayer.check` finds out whether it computes so, too."""
    names = [name for name, _ in module.named_parameters()]
    code = type(module).forward
    is_plain = not hasattr(code, "__wrapped__") and hasattr(module, "act_fn")
    return is_plain and names == ["gate_up_proj", _DOWN] and len(inspect.signature(code).parameters) == 2


# Multiplies x [..., in] by a weight that has a key. Called with the key, x, the weight or a cast of it, and the bias.
_MultiplyKeyed = Callable[[str, Tensor, Tensor, Tensor | None], Tensor]


class _Products(TorchFunctionMode):
    """A context in which `multiply` takes the place of `F.linear` for some weights, also if they are cast before.

    weights: by their keys.
    """

    def __init__(self, weights: Mapping[str, Tensor], multiply: _MultiplyKeyed) -> None:
        super().__init__()
        self._keys = {id(weight): key for key, weight in weights.items()}
        self._multiply = multiply
        # Casts are kept alive, so that their ids are not reused.
        self._casts: dict[int, tuple[str, Tensor]] = {}

    def __exit__(self, *args: Any) -> None:
        self._casts.clear()
        super().__exit__(*args)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func is F.linear and len(args) > 1 and (key := self._find_key(args[1])) is not None:
            x, weight, *bias = args
            return self._multiply(key, x, weight, bias[0] if bias else options.get("bias"))
        if func in _SIGMOIDS and args[0].device.type == "cpu":
            return _sigmoid(args[0])
        result = func(*args, **options)
        if func in _CASTS and (key := self._find_key(args[0])) is not None:
            self._casts[id(result)] = key, result
        return result

    def _find_key(self, weight: Any) -> str | None:
        cast = self._casts.get(id(weight))
        return self._keys.get(id(weight)) if cast is None else cast[0]


def _sigmoid(x: Tensor) -> Tensor:
    """On a CPU, torch.sigmoid rounds an element by its place in the tensor."""
    return (1 / (1 + torch.exp(-x.float()))).to(x.dtype)


class MixtureTrace:
    """Records how a model on the meta device calls its experts and routers."""

    def __init__(self, model: nn.Module, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._forms: dict[str, ExpertForm] = {}
        self._modules: dict[str, nn.Module] = {}
        self._routers: dict[str, nn.Module] = {}
        # For each call, whether it is known and computes all tokens.
        self._calls: dict[str, list[bool]] = {}
        self._is_active = False
        for name, module in model.named_modules():
            form = describe_experts(module)
            if form is not None:
                self._forms[name], self._modules[name] = form, module
                module.register_forward_pre_hook(partial(self._record_experts, name), with_kwargs=True)
                self._routers |= _find_routers(model, name.rpartition(".")[0])
        weights = {name: router.get_parameter("weight") for name, router in self._routers.items()}
        self._products = _Products(weights, self._record_product)

    @contextmanager
    def record(self) -> Iterator[None]:
        self._calls.clear()
        self._is_active = True
        try:
            with self._products:
                yield
        finally:
            self._is_active = False

    def list_linears(self, path: str) -> Iterator[LinearShape]:
        """Yields the linears of routers and experts in the layer at `path`. Their paths are relative to the layer."""
        for name, router in self._routers.items():
            if name.startswith(f"{path}.") and self._calls.get(name) == [True]:
                width, in_width = router.get_parameter("weight").shape
                has_bias = isinstance(getattr(router, "bias", None), nn.Parameter)
                relative = name.removeprefix(f"{path}.")
                yield LinearShape(relative, in_width, width, has_bias, role="router", division="whole")
        for name, form in self._forms.items():
            if name.startswith(f"{path}.") and self._calls.get(name) == [True]:
                division = find_expert_division(self._modules[name], form)
                yield from form.list_linears(name.removeprefix(f"{path}."), division)

    def _record_experts(
        self, name: str, _: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        if not self._is_active:
            return
        shapes = [arg.shape for arg in args if isinstance(arg, Tensor)]
        num_tokens, form = self._num_tokens, self._forms[name]
        in_width, calls = form.widths[0], self._calls.setdefault(name, [])
        if form.takes_scaled:
            calls.append(not options and shapes == [(form.num_experts * num_tokens, in_width)])
            return
        is_known = not options and len(shapes) == len(args) == len(("hidden", "experts", "weights"))
        is_known = is_known and shapes[0] == (num_tokens, in_width) and shapes[1] == shapes[2]
        calls.append(
            is_known and shapes[1][:1] == (num_tokens,) and len(shapes[1]) == len(("tokens", "choices"))
        )

    def _record_product(self, name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        own = getattr(self._routers[name], "bias", None)
        is_known = math.prod(x.shape[:-1]) == self._num_tokens and (bias is None or bias is own)
        self._calls.setdefault(name, []).append(is_known)
        return F.linear(x, weight, bias)


def _find_routers(model: nn.Module, block: str) -> dict[str, nn.Module]:
    """The modules in the block of experts that have a matrix `weight` and are no linears of torch."""
    return {
        f"{block}.{name}": module
        for name, module in model.get_submodule(block).named_modules()
        if not isinstance(module, nn.Embedding)
        and type(module) not in (nn.Linear, Conv1D)
        and len(getattr(module, "weight", torch.empty(0)).shape) == len(("out", "in"))
        and "weight" in dict(module.named_parameters(recurse=False))
    }


class ExpertLayer:
    """One layer's experts. Within a step, it takes the place of the module's forward pass.

    sites: of the two linears. A transposed parameter keeps its shape and is laid out as [E, out, in].
    combine: makes the module's outputs from those of this rank's part of each expert.
    """

    def __init__(
        self,
        module: nn.Module,
        sites: Sequence[LoraSite],
        find_step: FindStep,
        combine: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        form = describe_experts(module)
        assert form is not None, "a module of other experts was listed"
        self._module: Any = module
        self._form, self._sites, self._find_step = form, tuple(sites), find_step
        self._forward, self._combine = module.forward, combine
        stacks = []
        for name in form.names:
            parameter = module.get_parameter(name)
            if form.is_transposed:
                parameter.data = parameter.data.mT.contiguous().mT
            stacks.append(parameter.data.mT if form.is_transposed else parameter.data)
        self._stacks = stacks
        self._biases = [
            module.get_parameter(f"{name}_bias").data if form.has_bias else None for name in form.names
        ]

    def forward(self, hidden: Tensor, *choice: Tensor) -> Tensor:
        """hidden [T, in], the chosen experts int64 [T, k] and their weights [T, k] -> [T, out].

        If the module takes scaled tokens, hidden [E * T, in] alone -> [E * T, out].
        """
        step = self._find_step()
        out: Tensor = self._forward(hidden, *choice) if step is None else self._compute(step, hidden, *choice)
        return out if self._combine is None else self._combine(out)

    @torch.inference_mode()
    def check(self, path: str, block: nn.Module, kernels: Kernels) -> None:
        """Raises ConfigError if the module's own arithmetic gives another result for random tokens, or if the block
        that holds it passes it the tokens in another order.
        """
        form, module, stack = self._form, self._module, self._stacks[0]
        random, size = torch.Generator().manual_seed(0), (_CHECKED_TOKENS, min(2, form.num_experts))
        num_rows = _CHECKED_TOKENS * (form.num_experts if form.takes_scaled else 1)
        hidden = torch.randn(num_rows, form.widths[0], generator=random).to(stack.device, stack.dtype)
        weights = torch.rand(size, generator=random).to(stack.device, stack.dtype)
        experts = (torch.arange(size[0] * size[1]).view(size) % form.num_experts).to(stack.device)
        inputs = (hidden,) if form.takes_scaled else (hidden, experts, weights)
        # The decorator replaces the class's own forward pass by a faster one.
        code = inspect.unwrap(type(module).forward)
        expected = code(module, *inputs).float()
        error = (self._compute((None, kernels), *inputs).float() - expected).square().mean()
        if not error <= _TOLERANCES[stack.dtype] ** 2 * expected.square().mean():
            raise ConfigError(
                f"{path} can't be served: {type(module).__name__} of transformers computes its experts in another way "
                "than its class tells"
            )
        if form.takes_scaled and not self._gets_tokens_in_order(block, hidden[:_CHECKED_TOKENS]):
            raise ConfigError(
                f"{path} can't be served: {type(block).__name__} of transformers does not pass it each token once for "
                "each expert, in the order of the tokens"
            )

    def _gets_tokens_in_order(self, block: nn.Module, hidden: Tensor) -> bool:
        """Whether the block multiplies the tokens [T, in] by one number for each expert and token, [E, T]."""
        passed: list[Tensor] = []
        hook = self._module.register_forward_pre_hook(lambda _, inputs: passed.append(inputs[0]))
        try:
            block(hidden[None])
        finally:
            hook.remove()
        rows = passed[0].float().view(self._form.num_experts, *hidden.shape)
        tokens = hidden.float()
        scores = (rows * tokens).sum(-1, keepdim=True) / tokens.square().sum(-1, keepdim=True)
        rest = (rows - scores * tokens).square().mean()
        return bool(rest <= _TOLERANCES[hidden.dtype] ** 2 * rows.square().mean())

    def _compute(self, step: tuple[LoraDeltas | None, Kernels], hidden: Tensor, *choice: Tensor) -> Tensor:
        if self._form.takes_scaled:
            return self._compute_scaled(step, hidden)
        count, (experts, weights) = self._form.num_experts, choice
        # Only the activation needs the context of `MixtureBlock`, which would take time in each call of torch.
        with torch._C.DisableTorchFunction():
            # As in transformers, a number that no expert has stands for no expert.
            weights = weights.float().masked_fill(experts >= count, 0.0)
            chosen = ExpertChoice.sort(weights, experts.clamp(max=count - 1), count)
            rows, places = chosen.spread(hidden), (chosen.starts, chosen.token_of_row, chosen.expert_of_row)
        out = self._compute_rows(step, rows, len(hidden), places)
        with torch._C.DisableTorchFunction():
            return chosen.combine(out).to(hidden.dtype)

    def _compute_scaled(self, step: tuple[LoraDeltas | None, Kernels], hidden: Tensor) -> Tensor:
        """hidden [E * T, in] -> [E * T, out]. On a CPU, rows of zeros are left out, because their outputs are zeros."""
        count = self._form.num_experts
        num_tokens = len(hidden) // count
        with torch._C.DisableTorchFunction():
            kept = torch.arange(len(hidden), device=hidden.device)
            if hidden.device.type == "cpu":
                is_kept = hidden.any(dim=1)
                is_kept[0] = True  # The kernels need a row.
                kept = kept[is_kept]
            bounds = num_tokens * torch.arange(count + 1, device=hidden.device)
            starts = torch.searchsorted(kept, bounds, out_int32=True)
            rows, places = hidden[kept], (starts, kept % num_tokens, kept // num_tokens)
        out = self._compute_rows(step, rows, num_tokens, places)
        with torch._C.DisableTorchFunction():
            return hidden.new_zeros(len(hidden), out.shape[1]).index_copy_(0, kept, out.to(hidden.dtype))

    def _compute_rows(
        self,
        step: tuple[LoraDeltas | None, Kernels],
        rows: Tensor,
        num_tokens: int,
        places: tuple[Tensor, Tensor, Tensor],
    ) -> Tensor:
        """rows [S, in] -> [S, out].

        places: the first row of each expert, the token of each row, and the expert of each row, as in `ExpertChoice`.
        """
        form, (up_site, down_site), (deltas, kernels) = self._form, self._sites, step
        starts, token_of_row, expert_of_row = places
        module, routed = self._module, None
        with torch._C.DisableTorchFunction():
            rows = rows.to(self._stacks[0].dtype)
            up = self._multiply(0, rows, starts, expert_of_row, kernels)
            if deltas is not None:
                routed = deltas.route(starts, token_of_row, num_tokens, self._sites)
                routed.add(up, rows, up_site)
        gated = _activate(module, form, up).contiguous()
        with torch._C.DisableTorchFunction():
            out = self._multiply(1, gated, starts, expert_of_row, kernels)
            if routed is not None:
                routed.add(out, gated, down_site)
        normalized: Tensor = getattr(module, _POST_NORM)(out) if form.has_norm else out
        return normalized

    def _multiply(
        self, index: int, rows: Tensor, starts: Tensor, expert_of_row: Tensor, kernels: Kernels
    ) -> Tensor:
        out = kernels.grouped_linear(rows, self._stacks[index], None, starts)
        bias = self._biases[index]
        return out if bias is None else out.add_(bias[expert_of_row])


class MixtureBlock:
    """The module with a layer's router and experts. Its forward pass runs as it is, but routers have LoRA.

    routers: for each router, its weight and its site.
    """

    def __init__(
        self, module: nn.Module, routers: Mapping[str, tuple[Tensor, LoraSite]], find_step: FindStep
    ) -> None:
        self._forward, self._find_step = module.forward, find_step
        self._routers = routers
        self._products = _Products({name: weight for name, (weight, _) in routers.items()}, self._multiply)

    def forward(self, *args: Any, **options: Any) -> Any:
        if self._find_step() is None:
            return self._forward(*args, **options)
        with self._products:
            return self._forward(*args, **options)

    def _multiply(self, name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        step, (stored, site) = self._find_step(), self._routers[name]
        assert step is not None, "a router was called outside a step"
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        out = multiply(rows, weight, bias)
        if out.dtype == stored.dtype:
            step[0].add(out, rows, site)
        else:
            delta = out.new_zeros(out.shape, dtype=stored.dtype)
            step[0].add(delta, rows.to(stored.dtype), site)
            out += delta
        return out.view(*x.shape[:-1], len(weight))
