"""Finds the modules to which tensors belong, and matches them with the targets of a config. Returns the LoRA pairs or
every reason to refuse the adapter.

The checks are stricter than PEFT's. PEFT only warns if an adapter has tensors that the config does not name, or has no
tensors for some of its modules. Such an adapter would answer fully or partly like the base model without any error, so
it is refused here.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache

from slora_adapters.errors import Reason
from slora_adapters.peft.adapter import AdapterLimits, AnyFactor, LoraPair, ModuleId
from slora_adapters.peft.targeting import Target
from slora_adapters.peft.tensor_file import Factor, StoredTensor, fits, is_finite, largest_magnitude_bits
from slora_kernels.layout import LinearShape, ModelShape

# PEFT writes names with the prefix "base_model.model." and without the adapter's name, "default". PEFT also loads names
# with "default" before `.weight`. transformers' integration loads names without the prefix. The factors of an embedding
# are parameters, so their names have no `.weight`.
_PREFIX = r"(?:base_model\.model\.)?"
_LINEAR_FACTOR = re.compile(rf"{_PREFIX}(?P<path>.+)\.lora_(?P<factor>[AB])(?:\.default)?\.weight", re.DOTALL)
_EMBEDDING_FACTOR = re.compile(
    rf"{_PREFIX}(?P<path>.+)\.lora_embedding_(?P<factor>[AB])(?:\.default)?", re.DOTALL
)
_IMAGE_FACTOR = re.compile(
    rf"{_PREFIX}(?:model\.)?(?P<part>vision_tower|multi_modal_projector)\..+\.lora_(?:embedding_)?[AB](?:\..+)?",
    re.DOTALL,
)
_COPY = re.compile(rf"{_PREFIX}(?P<path>.+?)(?:\.base_layer)?\.(?P<parameter>weight|bias)", re.DOTALL)


# Where transformers puts a decoder: alone, as a part of a model that also reads images, and in earlier releases. The
# same weights have other names there, and so have adapters on them.
_ROOTS = ("model", "model.language_model", "language_model.model")


def find_other_names(tensor_names: Iterable[str], shape: ModelShape) -> ModelShape | None:
    """Returns the shape with the module names that the tensors have; None if these are the names of `shape`, or if the
    tensors have no known names.
    """
    root = shape.layers_path.removesuffix(".layers")
    if root not in _ROOTS or shape.embedding_path != f"{root}.embed_tokens":
        return None
    names = [re.sub(f"^{_PREFIX}", "", name) for name in tensor_names]
    # The longest root comes first, because one root begins with another.
    for other in sorted(_ROOTS, key=len, reverse=True):
        if any(name.startswith((f"{other}.layers.", f"{other}.embed_tokens.")) for name in names):
            renamed = replace(shape, layers_path=f"{other}.layers", embedding_path=f"{other}.embed_tokens")
            return None if other == root else renamed
    return None


def rename_module(tensor_name: str, other: ModelShape, shape: ModelShape) -> str:
    """Returns the name under `shape` of a tensor that is named as under `other`."""
    pairs = ((other.layers_path, shape.layers_path), (other.embedding_path, shape.embedding_path))
    for theirs, ours in pairs:
        match = re.match(rf"({_PREFIX}){re.escape(theirs)}\.", tensor_name)
        if match is not None:
            return f"{match[1]}{ours}.{tensor_name[match.end() :]}"
    return tensor_name


def list_spellings(name: str) -> list[str]:
    """Returns the names that a parameter of a decoder may have in a checkpoint."""
    for root in sorted(_ROOTS, key=len, reverse=True):
        if name.startswith(f"{root}."):
            return [name, *(f"{other}.{name.removeprefix(f'{root}.')}" for other in _ROOTS if other != root)]
    return [name]


def parse_factor_name(tensor_name: str, shape: ModelShape) -> tuple[ModuleId, str] | None:
    """Returns the module of a tensor, and whether the tensor is "A" or "B"; None if the name is unknown."""
    match = _EMBEDDING_FACTOR.fullmatch(tensor_name)
    if match is not None:
        return (shape.embedding_module, match["factor"]) if match["path"] == shape.embedding_path else None
    match = _LINEAR_FACTOR.fullmatch(tensor_name)
    module_id = _linears_by_path(shape).get(match["path"]) if match is not None else None
    return None if match is None or module_id is None else (module_id, match["factor"])


def parse_copy_name(tensor_name: str, shape: ModelShape) -> str | None:
    """Returns the name of the base model's embedding or head parameter that a tensor copies; None for other tensors."""
    match = _COPY.fullmatch(tensor_name)
    if match is None:
        return None
    parameter = f"{match['path']}.{match['parameter']}"
    heads = (f"{shape.head_path}.weight", f"{shape.head_path}.bias")
    return parameter if parameter in (f"{shape.embedding_path}.weight", *heads) else None


def find_image_part(tensor_name: str) -> str | None:
    """Returns the part of a model that reads images to which a LoRA factor belongs; None for other tensors."""
    match = _IMAGE_FACTOR.fullmatch(tensor_name)
    return None if match is None else match["part"]


@cache
def _linears_by_path(shape: ModelShape) -> Mapping[str, ModuleId]:
    return {module.path: m for m, module in enumerate(shape.modules) if m != shape.embedding_module}


# Parts of names that torch.compile, DDP, FSDP and activation checkpointing add.
_WRAPPER = re.compile(r"_orig_mod\.|(?<![a-z_])module\.|_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.")
# Parts of the names of tensors that belong to unsupported PEFT features.
_FOREIGN_TENSORS: Sequence[tuple[str, str, str]] = (
    ("lora_magnitude_vector", "use_dora", "DoRA magnitudes"),
    ("lora_embedding_", "embeddings", "an adapter on an embedding that the base model does not have"),
    ("modules_to_save", "modules_to_save", "a fully trained module"),
    ("trainable_tokens", "trainable_token_indices", "trained token embeddings"),
    (".bias", "bias", "a trained bias"),
    *(
        (part, "unknown_tensor", f"of the part that reads images (exclude it: exclude_modules='.*{part}.*')")
        for part in ("vision_tower", "multi_modal_projector")
    ),
)


def validate(
    targets: Mapping[ModuleId, Target],
    tensors: Mapping[str, AnyFactor],
    shape: ModelShape,
    limits: AdapterLimits,
    *,
    use_rslora: bool,
) -> tuple[dict[ModuleId, LoraPair[AnyFactor]], list[Reason]]:
    """Returns the adapter's pairs, and the reasons to refuse the adapter. `resolve_targets` finds reasons in the
    config, and `check_values` finds reasons in the values.

    The pairs are complete only if there is no reason to refuse the adapter.
    """
    factors, reasons = _sort_factors(tensors, shape)
    present = frozenset(module_id for module_id, _ in factors)
    reasons += _compare_with_targets(present, frozenset(targets), shape)
    pairs: dict[ModuleId, LoraPair[AnyFactor]] = {}
    for module_id in sorted(present & targets.keys()):
        pair = (factors.get((module_id, "A")), factors.get((module_id, "B")))
        module = shape.modules[module_id]
        rank, alpha = targets[module_id]
        scale = alpha / (rank**0.5 if use_rslora else rank)
        found = list(_check_pair(module, pair, rank, scale, limits))
        reasons += found
        if pair[0] is not None and pair[1] is not None and not found:
            pairs[module_id] = LoraPair(module.path, pair[0], pair[1], scale)
    return pairs, reasons


def check_values(tensors: Iterable[StoredTensor], limits: AdapterLimits) -> Iterable[Reason]:
    """Yields reasons to refuse values: NaN, infinity, and values that overflow in the served dtype.

    Values are checked once per upload. A later load verifies the digest, so it has the values that were checked.
    """
    for tensor in tensors:
        magnitude = largest_magnitude_bits(tensor.values)
        if not is_finite(tensor.dtype, magnitude):
            yield Reason("non_finite", f"tensor {tensor.name!r} contains NaN or infinity")
        elif limits.served_dtype is not None and not fits(tensor.dtype, magnitude, limits.served_dtype):
            message = f"tensor {tensor.name!r} overflows in {limits.served_dtype}, the dtype of this server"
            yield Reason("overflow", message)


def _sort_factors(
    tensors: Mapping[str, AnyFactor], shape: ModelShape
) -> tuple[dict[tuple[ModuleId, str], AnyFactor], list[Reason]]:
    factors: dict[tuple[ModuleId, str], AnyFactor] = {}
    reasons: list[Reason] = []
    for name, tensor in tensors.items():
        parsed = parse_factor_name(name, shape)
        if parsed is None:
            reasons.append(_foreign_tensor(name))
        elif parsed in factors:
            reasons.append(
                Reason(
                    "duplicate_tensor",
                    f"{name!r} and {factors[parsed].name!r} name the same weight; keep one of them",
                )
            )
        else:
            factors[parsed] = tensor
    return factors, reasons


def _foreign_tensor(name: str) -> Reason:
    for part, code, what in _FOREIGN_TENSORS:
        if part in name:
            return Reason(code, f"tensor {name[:120]!r} is {what}, which is not supported")
    message = f"tensor {name[:120]!r} does not belong to any module of the base model"
    wrapper = _WRAPPER.search(name)
    if wrapper is not None:
        message += (
            f": {wrapper[0]!r} is left from a wrapper of the training run; load the file with safetensors, remove "
            f"{wrapper[0]!r} from all names, and save it again"
        )
    return Reason("unknown_tensor", message)


def _compare_with_targets(
    present: frozenset[ModuleId], targets: frozenset[ModuleId], shape: ModelShape
) -> Iterable[Reason]:
    if missing := targets - present:
        yield Reason(
            "missing_tensors", f"the config adapts {_some(missing, shape)}, but there are no tensors for it"
        )
    if extra := present - targets:
        yield Reason(
            "untargeted_tensors",
            f"there are tensors for {_some(extra, shape)}, which the config does not adapt",
        )


def _some(modules: frozenset[ModuleId], shape: ModelShape) -> str:
    names = [shape.modules[module_id].path for module_id in sorted(modules)]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _check_pair(
    module: LinearShape,
    pair: tuple[Factor | None, Factor | None],
    rank: int,
    scale: float,
    limits: AdapterLimits,
) -> Iterable[Reason]:
    name = module.path
    if rank > limits.max_lora_rank:
        message = (
            f"{name} has rank {rank}; this server accepts at most {limits.max_lora_rank} (max_lora_rank)"
        )
        yield Reason("rank_too_high", message)
    if abs(scale) > limits.max_scale:
        message = (
            f"{name} has the scale {scale:g}; this server accepts at most {limits.max_scale:g} (max_scale)"
        )
        yield Reason("scale_too_high", message)
    expected = ((rank, module.in_width), (module.out_width, rank))
    for factor, tensor, wanted in zip("AB", pair, expected, strict=True):
        if tensor is None:
            yield Reason("missing_tensors", f"{name} has no lora_{factor}")
        elif tensor.shape != wanted:
            message = (
                f"lora_{factor} of {name} has shape {list(tensor.shape)}; the config and the base "
                f"model require {list(wanted)}"
            )
            yield Reason("shape_mismatch", message)
