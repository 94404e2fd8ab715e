"""Computes RMS norms and gated MLPs of transformers' classes with our kernels, in fewer calls than the classes.

A decode step of a small model spends more time in Python and in torch's calls than in arithmetic. A norm of
transformers makes eight calls, and one kernel computes the same. The two products that a gated MLP begins with become
one, and another kernel computes what is between them and the third.

A module is recognised by what it has, and by what its own forward pass computes from a trial in float32. So other
classes keep their own code, whatever they are called. Outside a step, all modules run their own code: the check at
start thus compares the two.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers.pytorch_utils import Conv1D

from slora.models.mixture_layers import FindStep
from slora.models.weights.packed_weight import PackedWeight
from slora_kernels.batch import Activation
from slora_kernels.layout import LinearDivision, LoraSite
from slora_kernels.torch.torch_kernels import apply_activation

# The greatest difference of a trial's results, relative to the greatest of its row. Rounding gives about 3e-7.
_TOLERANCE = 5e-6
_TRIAL_WIDTH = 64
# From rows whose mean square is much smaller than any epsilon to rows that any limit of a class would cut, as powers of
# two.
_TRIAL_SIZES = (-24.0, -12.0, -8.0, -4.0, 0.0, 2.0, 6.0, 10.0, 20.0)


@dataclass(frozen=True, slots=True)
class _NormForm:
    """x / sqrt(mean(x^2) + eps) * weight, or times 1 + weight."""

    eps: float
    adds_one: bool


def _as_rows(x: Tensor) -> Tensor:
    """[..., width] -> [n, width]. The elements of a row are contiguous."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


class FusedNorm:
    """The forward pass of an RMS norm."""

    def __init__(self, module: nn.Module, form: _NormForm, find_step: FindStep) -> None:
        self._module, self._form, self._find_step = module, form, find_step
        self._own: Callable[..., Tensor] = module.forward
        # The weight of the model, and what the kernel multiplies with for it.
        self._weight = module.get_parameter("weight")
        self._factors = self._find_factors(self._weight)

    def forward(self, x: Tensor, *others: Any, **options: Any) -> Tensor:
        step = self._find_step()
        # Not `get_parameter`: an adapter's weight takes its place while `functional_call` runs.
        weight: Any = self._module.weight
        if step is None or others or options or x.dtype != weight.dtype:
            return self._own(x, *others, **options)
        factors = self._factors if weight is self._weight else self._find_factors(weight)
        _, kernels = step
        # The input may be a part of a wider product, as in latent attention.
        return kernels.rms_norm(_as_rows(x).contiguous(), factors, self._form.eps).view(x.shape)

    def _find_factors(self, weight: Tensor) -> Tensor:
        return 1.0 + weight.detach().float() if self._form.adds_one else weight.detach()


def fuse_norms(model: nn.Module, find_step: FindStep) -> None:
    """Replaces the forward passes of the RMS norms that a kernel can compute."""
    forms: dict[object, _NormForm | None] = {}
    for module in model.modules():
        described = _describe_norm(module)
        if described is None:
            continue
        if described not in forms:
            forms[described] = _try_norm(module, described[1])
        form = forms[described]
        if form is not None:
            module.forward = FusedNorm(module, form, find_step).forward


def _describe_norm(module: nn.Module) -> tuple[object, ...] | None:
    """What norms with the same arithmetic share. The second is the only number among their settings.

    None for other modules.
    """
    parameters = dict(module.named_parameters())
    numbers = {value for value in vars(module).values() if isinstance(value, float)}
    others = [*module.children(), *module.buffers()]
    if parameters.keys() != {"weight"} or others or len(numbers) != 1 or "forward" in vars(module):
        return None
    weight = parameters["weight"]
    settings = [(name, value) for name, value in vars(module).items() if isinstance(value, int | str)]
    return (type(module), numbers.pop(), len(weight), *settings) if weight.dim() == 1 else None


@torch.inference_mode()
def _try_norm(module: nn.Module, eps: Any) -> _NormForm | None:
    """Computes a few rows by the module's own code, and compares them with what the kernel computes."""
    random = torch.Generator().manual_seed(0)
    width = len(module.get_parameter("weight"))
    weight = torch.randn(width, generator=random)
    x = _draw_rows(width, random)
    try:
        found = functional_call(module, {"weight": weight}, (x,))
    except Exception:
        # The module's code belongs to transformers and may raise any exception.
        return None
    normal = x.double() / torch.sqrt(x.double().square().mean(-1, keepdim=True) + eps)
    for adds_one in (False, True):
        if _are_close(found, normal * (weight.double() + adds_one)):
            return _NormForm(eps, adds_one)
    return None


def _draw_rows(width: int, random: torch.Generator) -> Tensor:
    """Random rows of each of the sizes, [1, n, width]."""
    sizes = torch.exp2(torch.tensor(_TRIAL_SIZES))[:, None]
    return (torch.randn(len(sizes), width, generator=random) * sizes)[None]


def _are_close(found: Any, expected: Tensor) -> bool:
    """Whether rows are the same but for rounding."""
    if not isinstance(found, Tensor) or found.shape != expected.shape or found.dtype != torch.float32:
        return False
    errors = (found.double() - expected).abs().amax(-1)
    return bool((errors <= _TOLERANCE * expected.abs().amax(-1)).all())


class _Probe(nn.Module):
    """Stands for a linear in a trial: returns a given tensor and passes on its inputs."""

    def __init__(self, given: Tensor, record: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.given, self._record = given, record

    def forward(self, x: Tensor) -> Tensor:
        self._record(x)
        return self.given


@dataclass(frozen=True, slots=True)
class MlpForm:
    """down(activation(gate(x)) * up(x)), by the names of the linears.

    first: gate and up; or one linear, whose product has the gate in its first half and up in the second.
    """

    first: tuple[str, ...]
    down: str
    activation: Activation


@torch.inference_mode()
def find_mlp_form(module: nn.Module) -> MlpForm | None:
    """Returns how a module computes a gated MLP. None if it computes anything else.

    Its own code runs once, with probes in place of the linears: no product is computed, but all that the code does with
    the products is seen.
    """
    linears = [name for name, child in module.named_children() if isinstance(child, nn.Linear)]
    others = [child for name, child in module.named_children() if name not in linears]
    held = [
        *module.parameters(recurse=False),
        *module.buffers(),
        *(p for other in others for p in other.parameters()),
    ]
    if len(linears) not in (2, 3) or held:
        return None
    random = torch.Generator().manual_seed(0)
    x = torch.randn(1, len(_TRIAL_SIZES), 8, generator=random)
    given = {name: _draw_rows(_TRIAL_WIDTH, random) for name in linears}
    trial = _try_mlp(module, x, given)
    if trial is None:
        return None
    first = [name for name in linears if trial.inputs[name] is x]
    down = [name for name in linears if name not in first and trial.result is given[name]]
    if len(first) + len(down) != len(linears) or len(down) != 1:
        return None
    between = trial.inputs[down[0]]
    for order in permutations(first):
        gate, up = torch.cat([given[name] for name in order], dim=-1).double().chunk(2, dim=-1)
        for activation in get_args(Activation):
            if _are_close(between, apply_activation(gate, activation) * up):
                return MlpForm(order, down[0], activation)
    return None


@torch.inference_mode()
def find_mlp_division(module: nn.Module) -> dict[str, LinearDivision]:
    """Returns how ranks can divide the linears of an MLP, by their names, so that only the outputs of the last one have
    to be summed. Empty if they can't, or for another module.

    The module's own code runs with probes, for the whole products of the first linears and for each of two parts of
    them. With a part, it must pass the last linear the same part of what it passes it otherwise.
    """
    linears = [name for name, child in module.named_children() if isinstance(child, nn.Linear | Conv1D)]
    if len(linears) not in (2, 3) or len(list(module.parameters(recurse=False))):
        return {}
    random = torch.Generator().manual_seed(0)
    x = torch.randn(1, len(_TRIAL_SIZES), 8, generator=random)
    given = {name: _draw_rows(_TRIAL_WIDTH, random) for name in linears}
    whole = _try_mlp(module, x, given)
    if whole is None or len(whole.inputs) != len(linears):
        return {}
    *first, last = whole.inputs
    for division in ("rows", "halves") if len(first) == 1 else ("rows",):
        parts = []
        for part in range(2):
            cut = {name: _cut_products(given[name], division, part) for name in first}
            parts.append(_try_mlp(module, x, {**given, **cut}))
        if all(part is not None and _is_part(whole, part, number) for number, part in enumerate(parts)):
            return {**dict.fromkeys(first, division), last: "columns"}
    return {}


@dataclass(frozen=True, slots=True)
class _MlpTrial:
    """inputs: those of the linears, by their names, in the order of their calls."""

    inputs: dict[str, Tensor]
    result: Tensor


def _try_mlp(module: nn.Module, x: Tensor, given: Mapping[str, Tensor]) -> _MlpTrial | None:
    """Runs a module's own code with probes that return `given` in place of its linears. None if it fails, or if it
    calls a linear otherwise than once.
    """
    inputs: dict[str, Tensor] = {}
    calls: list[str] = []

    def probe(name: str, seen: Tensor) -> None:
        calls.append(name)
        inputs[name] = seen

    trial: Any = copy.copy(module)
    probes = {name: _Probe(tensor, partial(probe, name)) for name, tensor in given.items()}
    vars(trial)["_modules"] = {**module._modules, **probes}
    try:
        result = type(module).forward(trial, x)
    except Exception:
        # The module's code belongs to transformers and may raise any exception.
        return None
    is_complete = sorted(calls) == sorted(given) and isinstance(result, Tensor)
    return _MlpTrial(inputs, result) if is_complete else None


def _cut_products(products: Tensor, division: LinearDivision, part: int) -> Tensor:
    halves = products.chunk(2, dim=-1) if division == "halves" else (products,)
    return torch.cat([half.chunk(2, dim=-1)[part] for half in halves], dim=-1)


def _is_part(whole: _MlpTrial, part: _MlpTrial, number: int) -> bool:
    """Whether a run with one of two parts gave the last linear that part of its inputs, and everything else whole."""
    *first, last = whole.inputs
    expected = {name: whole.inputs[name] for name in first}
    expected[last] = whole.inputs[last].chunk(2, dim=-1)[number]
    return _are_close(part.result, whole.result.double()) and all(
        _are_close(part.inputs[name], tensor.double()) for name, tensor in expected.items()
    )


class FusedMlp:
    """The forward pass of a gated MLP.

    joined: the weights of its first linears, packed together. None: they are computed one by one.
    sites: of the first linears, by name. Without a site, no adapter adds to a linear.
    """

    def __init__(
        self,
        module: nn.Module,
        form: MlpForm,
        joined: PackedWeight | None,
        sites: Mapping[str, LoraSite],
        find_step: FindStep,
        dtype: torch.dtype,
    ) -> None:
        self._dtype = dtype
        self._activation, self._joined, self._find_step = form.activation, joined, find_step
        self._own: Callable[..., Tensor] = module.forward
        first: list[Any] = [module.get_submodule(name) for name in form.first]
        self._first, self._down = first, module.get_submodule(form.down)
        biases = [linear.bias for linear in first]
        self._bias = None if joined is None or biases[0] is None else torch.cat(biases)
        self._parts: list[tuple[LoraSite, slice]] = []
        start = 0
        for name, linear in zip(form.first, first, strict=True):
            if name in sites:
                self._parts.append((sites[name], slice(start, start + linear.out_features)))
            start += linear.out_features

    def forward(self, x: Tensor, *others: Any, **options: Any) -> Tensor:
        step = self._find_step()
        if step is None or others or options or x.dtype != self._dtype:
            return self._own(x, *others, **options)
        deltas, kernels = step
        if self._joined is None:
            products = [linear(x) for linear in self._first]
            product = products[0] if len(products) == 1 else torch.cat(products, dim=-1)
            product = product.view(-1, product.shape[-1])
        else:
            rows = _as_rows(x)
            product = self._joined.multiply(rows, self._bias)
            if deltas.has_layers:
                for site, columns in self._parts:
                    deltas.add(product[:, columns], rows, site)
        between = kernels.act_mul(product, self._activation)
        out: Tensor = self._down(between.view(*x.shape[:-1], between.shape[1]))
        return out
