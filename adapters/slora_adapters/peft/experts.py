"""Adapters of experts that were trained with transformers 4 or with Unsloth, where each expert has linears of its own.

transformers 5 keeps the linears of all experts as two parameters, so PEFT adapts parameters (`target_parameters`). The
other adapters have tensors for each linear of each expert, such as `mlp.experts.7.up_proj.lora_A.weight`. They are
checked under the names that they have, and then joined into the tensors of the two parameters, as PEFT does it. The A
of gate_proj and of up_proj follow one another, and the B form a block-diagonal matrix of twice the rank.
"""

import math
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from slora_adapters.errors import Reason
from slora_adapters.peft.adapter import AdapterLimits, LoraPair
from slora_adapters.peft.peft_config import PeftConfig
from slora_adapters.peft.targeting import Target, resolve_targets, spell_out
from slora_adapters.peft.tensor_file import StoredTensor
from slora_adapters.peft.validation import validate
from slora_kernels.layout import LinearShape, ModelShape

# The block of Mixtral's experts in transformers 4, and of those like it. In other models it is that of the base model.
_OLD_BLOCK = "block_sparse_moe"


@dataclass(frozen=True, slots=True)
class _Style:
    """Names of the linears of single experts, within their module, with {} for the number of the expert.

    parameter: the name of the base model's parameter that joins those of `first`, one after the other.
    router: the name of the router, if the base model has another one.
    """

    first: tuple[str, ...]
    last: str
    parameter: str = "gate_up_proj"
    router: str = "gate"

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.first, self.last)


# The last one is that of Unsloth, which cuts the experts of gpt-oss into linears for training in 4 bits.
_STYLES = (
    _Style(("{}.w1", "{}.w3"), "{}.w2"),
    _Style(("{}.gate_proj", "{}.up_proj"), "{}.down_proj"),
    _Style(("{}.up_proj",), "{}.down_proj", parameter="up_proj"),
    _Style(("gate_up_projs.{}",), "down_projs.{}", router="router.linear"),
)
_EXPERT = re.compile(r"\.(?P<block>\w+)\.experts\.(?P<linear>\d+\.\w+|\w+\.\d+)\.lora_", re.ASCII)
# The most bytes that a tensor takes in the header of a file.
_ENTRY_BYTES = 256


@dataclass(frozen=True, slots=True)
class ExpertSpelling:
    """The names of experts in an adapter.

    block: the block of the experts within a layer. router: the name of the router in it.
    shape: that of the base model, with a module for each linear of an expert.
    """

    block: str
    style: _Style
    router: str
    shape: ModelShape

    def is_own(self, path: str) -> bool:
        """Whether a module has another name in `shape` than in the base model."""
        return f".{self.block}.experts." in path or path.endswith(f".{self.block}.{self.router}")


def find_spelling(tensor_names: Iterable[str], shape: ModelShape) -> ExpertSpelling | None:
    """Returns how an adapter names the experts; None if it has no tensors for single experts of this base model."""
    styles = [style for style in _STYLES if any(_fits(style, linear) for linear in shape.linears)]
    paths = [linear.path.split(".") for linear in shape.linears if linear.role == "experts"]
    blocks = {_OLD_BLOCK, *(block for path in paths for block in path[:-2])}
    for name in tensor_names if styles else ():
        match = _EXPERT.search(name)
        if match is not None and match["block"] in blocks:
            linear = re.sub(r"^\d+(?=\.)|(?<=\.)\d+$", "{}", match["linear"])
            for style in styles:
                if linear in style.names:
                    return _spell_experts(shape, match["block"], style)
    return None


def _fits(style: _Style, linear: LinearShape) -> bool:
    """Whether a linear of the base model is the parameter that joins `style.first`."""
    is_parameter = linear.role == "experts" and linear.path.rpartition(".")[2] == style.parameter
    return is_parameter and not linear.is_transposed and linear.has_halves == (len(style.first) > 1)


# Tables about a shape are cached, and found faster for the same object.
@cache
def _spell_experts(shape: ModelShape, block: str, style: _Style) -> ExpertSpelling:
    router = style.router
    linears: list[LinearShape] = []
    groups: list[tuple[int, ...]] = []
    groups_of_group: list[range] = []
    for group in shape.groups:
        first_group, linear = len(groups), shape.linears[group[0]]
        members = [[shape.linears[index] for index in group]]
        if linear.role == "router":
            parent, _, name = linear.path.rpartition(".")
            router = name if parent == block and "." not in router else router
            members = [[replace(linear, path=f"{block}.{router}", role="linear")]]
        elif linear.role == "experts":
            names = style.first if _fits(style, linear) else (style.last,)
            width, prefix = linear.out_width // len(names), f"{block}.experts"
            members = [
                [LinearShape(f"{prefix}.{name.format(expert)}", linear.in_width, width) for name in names]
                for expert in range(linear.num_experts)
            ]
        for own in members:
            groups.append(tuple(range(len(linears), len(linears) + len(own))))
            linears += own
        groups_of_group.append(range(first_group, len(groups)))
    of_layer = tuple(
        tuple(own for group in shape.layer_groups(layer) for own in groups_of_group[group])
        for layer in range(shape.num_layers)
    )
    spelled = replace(shape, linears=tuple(linears), groups=tuple(groups), groups_of_layer=of_layer)
    return ExpertSpelling(block, style, router, spelled)


def join_experts(
    config: PeftConfig,
    tensors: Mapping[str, StoredTensor],
    spelling: ExpertSpelling,
    shape: ModelShape,
    limits: AdapterLimits,
) -> tuple[PeftConfig, dict[str, StoredTensor], list[Reason]]:
    """Returns an equivalent config and tensors under the names of `shape`, and the reasons to refuse the adapter.

    The tensors are complete only if there is no reason.
    """
    targets, reasons = resolve_targets(config, spelling.shape)
    reasons += _refuse_variants(config)
    modules = spelling.shape.modules
    own_targets = {m: target for m, target in targets.items() if spelling.is_own(modules[m].path)}
    own = {name: tensor for name, tensor in tensors.items() if spelling.is_own(_module_path(name))}
    plain = replace(config, bias="none", modules_to_save=(), token_indices=(), ensure_weight_tying=False)
    found, faults = validate(plain, own_targets, own, spelling.shape, limits)
    reasons += faults
    if reasons:
        return config, {}, reasons
    by_path = {modules[m].path: (pair, targets[m]) for m, pair in found.pairs.items()}
    joined = {name: tensor for name, tensor in tensors.items() if name not in own}
    targets_by_path = {modules[m].path: target for m, target in targets.items() if m not in own_targets}
    num_bytes = sum(tensor.values.nbytes for tensor in joined.values())
    count = max(linear.num_experts for linear in shape.linears)
    for layer in range(shape.num_layers):
        prefix = f"{shape.layers_path}.{layer}"
        own_linears = [shape.linears[index] for index in shape.layer_linears(layer)]
        parts = _LayerParts(prefix, spelling, by_path)
        for router in (linear for linear in own_linears if linear.role == "router"):
            if (found_router := parts.find(spelling.router)) is not None:
                pair, target = found_router
                path = f"{prefix}.{router.path}"
                targets_by_path[path] = target._replace(is_parameter=True)
                joined |= {tensor.name: tensor for tensor in _rename(pair, path)}
        for path, wrapper, linears in parts.list_wrappers(own_linears):
            pairs, faults = parts.collect(linears, count)
            reasons += faults
            if pairs and not faults:
                num_bytes += _measure_joined(pairs) + 2 * _ENTRY_BYTES
                if num_bytes > limits.max_tensor_bytes:
                    message = (
                        f"the joined tensors of the experts take more than {limits.max_tensor_bytes} bytes, which this "
                        "server accepts at most"
                    )
                    return config, {}, [Reason("too_large", message)]
                _, target = by_path[f"{prefix}.{spelling.block}.experts.{linears[0].format(0)}"]
                reasons += _check_joined_rank(path, len(linears), target.rank, limits)
                rank, alpha = (len(linears) * number for number in (target.rank, target.alpha))
                targets_by_path[path] = Target(int(rank), alpha, is_parameter=True)
                joined |= {tensor.name: tensor for tensor in _join(pairs, wrapper)}
    ids = {module.path: m for m, module in enumerate(shape.modules)}
    new_targets = {ids[path]: target for path, target in targets_by_path.items()}
    config, length_reasons = spell_out(config, new_targets, shape, all_fields=True)
    return config, joined, [*reasons, *length_reasons]


def _check_joined_rank(path: str, num_linears: int, rank: int, limits: AdapterLimits) -> Iterable[Reason]:
    if num_linears * rank > limits.max_lora_rank:
        yield Reason(
            "rank_too_high",
            f"{path} joins {num_linears} linears of rank {rank}, so it has rank {num_linears * rank}; this server "
            f"accepts at most {limits.max_lora_rank} (max_lora_rank)",
        )


def _refuse_variants(config: PeftConfig) -> Iterable[Reason]:
    variants = {
        "use_dora": config.use_dora,
        "lora_bias": config.lora_bias,
        "alora_invocation_tokens": bool(config.invocation),
        "use_rslora": config.use_rslora,
        "target_parameters": bool(config.target_parameters),
    }
    for field, is_set in variants.items():
        if is_set:
            yield Reason(
                field,
                f"{field} is set, and the adapter has tensors for single experts (transformers 4 or Unsloth), which "
                "are not served together; train with transformers 5 and target_parameters",
            )


def _module_path(tensor_name: str) -> str:
    return tensor_name.removeprefix("base_model.model.").partition(".lora_")[0]


_Pair = LoraPair[StoredTensor]


class _LayerParts:
    """The pairs of one layer's experts and router."""

    def __init__(
        self, prefix: str, spelling: ExpertSpelling, by_path: Mapping[str, tuple[_Pair, Target]]
    ) -> None:
        self._prefix, self._block, self._style = prefix, spelling.block, spelling.style
        self._by_path = by_path

    def find(self, name: str) -> tuple[_Pair, Target] | None:
        return self._by_path.get(f"{self._prefix}.{self._block}.{name}")

    def list_wrappers(self, linears: Iterable[LinearShape]) -> list[tuple[str, str, Sequence[str]]]:
        """For each parameter of the experts: its path, the path of PEFT's wrapper, and the linears that it joins.

        linears: those of the layer.
        """
        style = self._style
        has_last = self.find(f"experts.{style.last.format(0)}") is not None
        found: list[tuple[str, str, Sequence[str]]] = []
        for linear in linears:
            if linear.role == "experts":
                path, is_first = f"{self._prefix}.{linear.path}", _fits(style, linear)
                wrapper = path.rpartition(".")[0]
                own = f"{wrapper}.base_layer" if is_first and has_last else wrapper
                found.append((path, own, style.first if is_first else (style.last,)))
        return found

    def collect(self, linears: Sequence[str], count: int) -> tuple[list[list[_Pair]], list[Reason]]:
        """Returns the pairs of these linears of each expert; none if none is adapted. They must have one form."""
        numbers = range(count)
        found = [[self.find(f"experts.{name.format(expert)}") for name in linears] for expert in numbers]
        pairs = [pair for experts in found for pair in experts if pair is not None]
        if not pairs:
            return [], []
        names = [
            f"{self._prefix}.{self._block}.experts.{name.format(expert)}"
            for expert in numbers
            for name in linears
        ]
        absent = [name for name in names if name not in self._by_path]
        if absent:
            why = "joined linears of all experts are adapted together"
            return [], [Reason("missing_tensors", f"there are no tensors for {absent[0]}, but {why}")]
        forms = {(pair.rank, pair.scale, pair.a.dtype, pair.b.dtype) for pair, _ in pairs}
        if len(forms) > 1:
            what = " and ".join(name.replace("{}", "").strip(".") for name in linears)
            return [], [
                Reason(
                    "target_parameters",
                    f"{what} of the experts of {self._prefix} differ in rank, scale or dtype; all of them must have "
                    "the same",
                )
            ]
        return [[pair for pair, _ in filter(None, experts)] for experts in found], []


def _rename(pair: _Pair, path: str) -> list[StoredTensor]:
    return [replace(pair.a, name=_name(path, "A")), replace(pair.b, name=_name(path, "B"))]


def _name(path: str, factor: str) -> str:
    return f"base_model.model.{path}.lora_{factor}.weight"


def _measure_joined(pairs: list[list[_Pair]]) -> int:
    (first, *others), count = pairs[0], len(pairs)
    num_linears = 1 + len(others)
    return count * num_linears * (first.a.values.nbytes + num_linears * first.b.values.nbytes)


def _join(pairs: list[list[_Pair]], wrapper: str) -> list[StoredTensor]:
    """Joins the pairs of each expert. See `LoraPair` for the order of rows and columns."""
    first = pairs[0][0]
    count, num_linears, rank, width = len(pairs), len(pairs[0]), first.rank, first.b.shape[0]
    a = _map_zeros((count, num_linears * rank, first.a.shape[1]), first.a.values.dtype)
    b = _map_zeros((num_linears * width, num_linears * rank, count), first.b.values.dtype)
    for expert, members in enumerate(pairs):
        for index, pair in enumerate(members):
            a[expert, index * rank : (index + 1) * rank] = pair.a.values
            rows, columns = slice(index * width, (index + 1) * width), slice(index * rank, (index + 1) * rank)
            b[rows, columns, expert] = pair.b.values
    return [
        replace(first.a, name=_name(wrapper, "A"), values=a.reshape(-1, a.shape[-1])),
        replace(first.b, name=_name(wrapper, "B"), values=b.reshape(num_linears * width, -1)),
    ]


def _map_zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Returns zeros in a file without a name, because the memory of an inspection is limited.

    Raises OSError if the disk is full.
    """
    with tempfile.TemporaryFile(prefix="slora-experts-") as file:
        # Writing to a page that the disk has no space for would kill the process.
        os.posix_fallocate(file.fileno(), 0, max(1, math.prod(shape) * dtype.itemsize))
        return np.memmap(file, dtype, "r+", shape=shape)
