"""Matches the targets of a config with tensors, and returns the LoRA pairs or every reason to refuse the adapter.

The checks are stricter than PEFT's. PEFT only warns if an adapter has tensors that the config does not name, or has no
tensors for some of its modules. Such an adapter would answer fully or partly like the base model without any error, so
it is refused here.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from slora_adapters.errors import Reason
from slora_adapters.peft.adapter import AdapterLimits, AnyFactor, LoraPair
from slora_adapters.peft.module_names import ModuleId, parse_factor_name
from slora_adapters.peft.number_format import fits, is_finite, largest_magnitude_bits
from slora_adapters.peft.targeting import Target
from slora_adapters.peft.tensor_file import Factor, StoredTensor
from slora_kernels.layout import LinearShape, ModelShape

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
