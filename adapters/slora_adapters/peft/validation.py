"""Finds the modules to which tensors belong, and matches them with the targets of a config. Returns the tensors of each
module, or every reason to refuse the adapter.

The checks are stricter than PEFT's. PEFT only warns if an adapter has tensors that the config does not name, or has no
tensors for some of its modules. Such an adapter would answer fully or partly like the base model without any error, so
it is refused here.
"""

import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Literal

import numpy as np

from slora_adapters.errors import Reason
from slora_adapters.peft.adapter import (
    AdapterLimits,
    AdapterTensors,
    AnyFactor,
    LoraPair,
    ModuleId,
    NormTensors,
    TrainedRows,
    Vocabulary,
)
from slora_adapters.peft.peft_config import CONFIG_NAME, PeftConfig
from slora_adapters.peft.targeting import Target
from slora_adapters.peft.tensor_file import Factor, StoredTensor, fits, is_finite, largest_magnitude_bits
from slora_kernels.layout import MAX_ADDED_ROWS, LinearShape, ModelShape

# PEFT writes names with the prefix "base_model.model." and without the adapter's name, "default". PEFT also loads names
# with "default" before `.weight`. transformers' integration (`model.get_adapter_state_dict`, `model.load_adapter`) has
# names without the prefix, which PEFT ignores with a warning. The factors of an embedding
# are parameters, so their names have no `.weight`.
PEFT_PREFIX = "base_model.model."
_PREFIX = rf"(?:{re.escape(PEFT_PREFIX)})?"
_LINEAR_FACTOR = re.compile(rf"{_PREFIX}(?P<path>.+)\.lora_(?P<factor>[AB])(?:\.default)?\.weight", re.DOTALL)
_FACTOR_ENDS = (".lora_A.weight", ".lora_B.weight")
_MAGNITUDE = re.compile(
    rf"{_PREFIX}(?P<path>.+)\.lora_magnitude_vector(?:\.default)?(?:\.weight)?", re.DOTALL
)
_B_BIAS = re.compile(rf"{_PREFIX}(?P<path>.+)\.lora_B(?:\.default)?\.bias", re.DOTALL)
_BIAS = re.compile(rf"{_PREFIX}(?P<path>.+?)(?:\.base_layer)?\.bias", re.DOTALL)
_TOKEN_ROWS = re.compile(
    rf"{_PREFIX}(?P<path>.+)\.token_adapter\.trainable_tokens_delta(?:\.default)?", re.DOTALL
)
_EMBEDDING_FACTOR = re.compile(
    rf"{_PREFIX}(?P<path>.+)\.lora_embedding_(?P<factor>[AB])(?:\.default)?", re.DOTALL
)
_COPY = re.compile(
    rf"{_PREFIX}(?P<path>.+?)(?:\.token_adapter)?(?:\.base_layer)?\.(?P<parameter>weight|bias)", re.DOTALL
)
# PEFT also saves these parts of a module in modules_to_save, if the vocabulary was resized.
_SAVED_PART = re.compile(
    rf"{_PREFIX}(?P<path>.+)\.(?P<part>modules_to_save|original_module)(?:\.default)?\.weight", re.DOTALL
)


# The head of transformers' classes for sequence classification. PEFT names both in `modules_to_save` with
# `task_type: SEQ_CLS`, although a model has only one of them.
CLASSIFIER_PATH = "score"
CLASSIFIER_NAMES = (CLASSIFIER_PATH, "classifier")
MAX_LABELS = 4096

# Where transformers puts a decoder: alone, as a part of a model that also reads images or sound, and in earlier
# releases. The same weights have other names there, and so have adapters on them.
_ROOTS = ("model", "model.language_model", "model.text_model", "language_model.model")
# The modules beside a decoder that read or write images or sound, in the classes of transformers and in InternVL's own.
# Text does not pass through them. A module that is not known may be a misspelt part of the decoder, so its tensors are
# refused.
_OTHER_PARTS = frozenset(
    {
        *("vision_tower", "vision_model", "vision_encoder", "vision_tokenizer", "visual", "image_tower"),
        *("vision_projection", "vision_adapter", "vision_resampler", "vision_embed_tokens", "embed_vision"),
        *("visual_embeddings_table", "video_tower", "audio_tower", "audio_tokenizer", "embed_audio", "mlp1"),
        *("multi_modal_projector", "mm_projector", "projector", "aligner", "connector", "merger"),
        *("perception_emb_norm", "vqmodel", "generation_embeddings", "generation_aligner", "generation_head"),
    }
)
# The part of Qwen2-VL and Qwen2.5-VL that reads images lay beside `model` before transformers 4.52.
_EARLY_PART = "visual"
_EARLY_HEAD = "language_model.lm_head"
# The name of no known module has half as many dots. `ignore_saved_parts` makes a text up to each of them.
_MAX_DOTS = 40
# The part of an attention module that selects the tokens to read. Sequences are no longer than what it selects, so its
# weights have no effect.
INDEXER = "indexer"


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
            final = shape.final_norm and replace(
                shape.final_norm, path=shape.final_norm.path.replace(root, other, 1)
            )
            renamed = replace(
                shape,
                layers_path=f"{other}.layers",
                embedding_path=f"{other}.embed_tokens",
                final_norm=final,
            )
            if any(name.startswith(f"{_EARLY_HEAD}.") for name in names):
                renamed = replace(renamed, head_path=_EARLY_HEAD)
            return None if renamed == shape else renamed
    return None


def rename_module(tensor_name: str, other: ModelShape, shape: ModelShape) -> str:
    """Returns the name under `shape` of a tensor that is named as under `other`."""
    pairs = [
        (getattr(other, name), getattr(shape, name))
        for name in ("layers_path", "embedding_path", "head_path")
    ]
    if other.final_norm is not None and shape.final_norm is not None:
        pairs.append((other.final_norm.path, shape.final_norm.path))
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


Part = Literal["lora_A", "lora_B", "lora_magnitude_vector", "lora_B.bias", "bias"]
_FACTORS: Mapping[str, Part] = {"A": "lora_A", "B": "lora_B"}


def parse_tensor_name(tensor_name: str, shape: ModelShape) -> tuple[ModuleId, Part] | None:
    """Returns the module of a tensor, and what the tensor is to the module; None if the name is unknown."""
    part: Part
    # Most names match the first expression. No name matches two of the first four.
    if match := _LINEAR_FACTOR.fullmatch(tensor_name):
        part = _FACTORS[match["factor"]]
    elif match := _EMBEDDING_FACTOR.fullmatch(tensor_name):
        is_embedding = match["path"] == shape.embedding_path
        return (shape.embedding_module, _FACTORS[match["factor"]]) if is_embedding else None
    elif match := _MAGNITUDE.fullmatch(tensor_name):
        part = "lora_magnitude_vector"
        if match["path"] == shape.embedding_path:
            return shape.embedding_module, part
    elif match := _B_BIAS.fullmatch(tensor_name):
        part = "lora_B.bias"
    else:
        match, part = _BIAS.fullmatch(tensor_name), "bias"
    module_id = _linears_by_path(shape).get(match["path"]) if match is not None else None
    return None if module_id is None else (module_id, part)


def parse_copy_name(tensor_name: str, shape: ModelShape) -> str | None:
    """Returns the name of the base model's embedding or head parameter that a tensor copies; None for other tensors."""
    match = _COPY.fullmatch(tensor_name)
    if match is None:
        return None
    parameter = f"{match['path']}.{match['parameter']}"
    heads = (f"{shape.head_path}.weight", f"{shape.head_path}.bias")
    return parameter if parameter in (f"{shape.embedding_path}.weight", *heads) else None


def parse_norm_name(tensor_name: str, shape: ModelShape) -> tuple[int, str] | None:
    """Returns the norm to which a tensor belongs, as an index in `ModelShape.norms`, and "weight" or "bias"; None for
    other tensors.
    """
    match = _COPY.fullmatch(tensor_name)
    norm_id = None if match is None else _norms_by_path(shape).get(match["path"])
    return None if match is None or norm_id is None else (norm_id, match["parameter"])


def find_other_part(tensor_name: str, shape: ModelShape) -> str | None:
    """Returns the part without effect that a tensor belongs to: one beside the decoder, such as that which reads
    images, or `INDEXER`. None if the tensor does not belong to a known part.

    shape: with the module names that the adapter has. They tell whether it was trained in a model with other parts.
    """
    root = shape.layers_path.removesuffix(".layers")
    path = re.sub(f"^{_PREFIX}", "", tensor_name)
    if path.count(".") > _MAX_DOTS:
        return None
    if shape.has_indexers and path.startswith(f"{shape.layers_path}.") and f".{INDEXER}." in path:
        return INDEXER
    if root not in _ROOTS or _WRAPPER.match(path):
        return None
    part, _, rest = path.partition(".")
    if root == "model":
        return part if part == _EARLY_PART else None
    if part == "model":
        part, _, rest = rest.partition(".")
    return part if rest and part in _OTHER_PARTS else None


def ignore_saved_parts(config: PeftConfig, others: Collection[str], shape: ModelShape) -> PeftConfig:
    """Returns a config without the names in modules_to_save that stand only for modules of other parts.

    others: the names of tensors for which `find_other_part` finds a part.
    """
    modules = {name[: end.start()] for name in others for end in re.finditer(r"\.", name)}
    paths = [*(module.path for module in shape.modules), *(norm.path for norm in shape.norms)]
    # Of names in reverse, those with a common end are neighbours.
    theirs, ours = (sorted(path[::-1] for path in group) for group in (modules, (*CLASSIFIER_NAMES, *paths)))

    def ends_one(name: str, backwards: Sequence[str]) -> bool:
        place = bisect_left(backwards, name[::-1])
        return place < len(backwards) and backwards[place].startswith(name[::-1])

    saved = tuple(
        name for name in config.modules_to_save if ends_one(name, ours) or not ends_one(name, theirs)
    )
    return replace(config, modules_to_save=saved)


@cache
def _norms_by_path(shape: ModelShape) -> Mapping[str, int]:
    return {norm.path: norm_id for norm_id, norm in enumerate(shape.norms)}


@cache
def _linears_by_path(shape: ModelShape) -> Mapping[str, ModuleId]:
    return {_wrapper_path(m, shape): m for m in range(len(shape.modules)) if m != shape.embedding_module}


def _wrapper_path(module_id: ModuleId, shape: ModelShape) -> str:
    """PEFT wraps the module of the experts once for each adapted parameter: last, and outermost, for the second one."""
    module = shape.modules[module_id]
    if module.role != "experts":
        return module.path
    wrapper = module.path.rpartition(".")[0]
    is_first = shape.modules[module_id + 1].path.rpartition(".")[0] == wrapper
    return f"{wrapper}.base_layer" if is_first else wrapper


def _find_experts(
    found: dict[tuple[ModuleId, Part], AnyFactor], targets: Collection[ModuleId], shape: ModelShape
) -> dict[tuple[ModuleId, Part], AnyFactor]:
    """Corrects the modules of tensors of experts: if only the first parameter is adapted, it has the only wrapper."""
    moved = {}
    for (module_id, part), tensor in found.items():
        paths = [shape.modules[m].path.rpartition(".")[0] for m in (module_id - 1, module_id)]
        is_second = shape.modules[module_id].role == "experts" and len(set(paths)) == 1
        is_only = is_second and module_id not in targets and module_id - 1 in targets
        moved[module_id - 1 if is_only and (module_id - 1, part) not in found else module_id, part] = tensor
    return moved


# Parts of names that torch.compile, DDP, FSDP and activation checkpointing add.
_WRAPPER = re.compile(r"_orig_mod\.|(?<![a-z_])module\.|_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.")
# Parts of the names of tensors that belong to unsupported PEFT features.
_FOREIGN_TENSORS: Sequence[tuple[str, str, str]] = (
    ("lora_magnitude_vector", "use_dora", "a DoRA magnitude of a module that the base model does not have"),
    ("lora_embedding_", "embeddings", "an adapter on an embedding that the base model does not have"),
    ("modules_to_save", "modules_to_save", "a fully trained module"),
    ("trainable_tokens", "trainable_token_indices", "rows of a module that is neither embedding nor head"),
    (".bias", "bias", "a bias of a module whose bias can't be replaced"),
)


def validate(
    config: PeftConfig,
    targets: Mapping[ModuleId, Target],
    tensors: Mapping[str, AnyFactor],
    shape: ModelShape,
    limits: AdapterLimits,
) -> tuple[AdapterTensors[AnyFactor], list[Reason]]:
    """Returns the adapter's tensors, and the reasons to refuse the adapter. `resolve_targets` finds reasons in the
    config, and `check_values` finds reasons in the values.

    The result is complete only if there is no reason to refuse the adapter.
    """
    # Most tensors are factors of linears, whose names need no comparison with those of other weights.
    weights = {name: tensor for name, tensor in tensors.items() if not name.endswith(_FACTOR_ENDS)}
    vocabulary, row_names, reasons = _find_vocabulary(config, targets, weights, shape)
    norms, norm_names, faults = _find_norms(config, weights, shape)
    reasons += faults
    others = {
        name: tensor for name, tensor in tensors.items() if name not in row_names and name not in norm_names
    }
    found, faults = _sort_tensors(others, shape)
    found = _find_experts(found, targets, shape)
    reasons += faults
    present = frozenset(module_id for module_id, part in found if part != "bias")
    reasons += _compare_with_targets(present, frozenset(targets), shape)
    pairs: dict[ModuleId, LoraPair[AnyFactor]] = {}
    for module_id in sorted(present & targets.keys()):
        a, b = found.get((module_id, "lora_A")), found.get((module_id, "lora_B"))
        module = shape.modules[module_id]
        target = targets[module_id]
        scale = target.alpha / (target.rank**0.5 if config.use_rslora else target.rank)
        magnitude = found.get((module_id, "lora_magnitude_vector"))
        b_bias = found.get((module_id, "lora_B.bias"))
        faults = [
            *_check_pair(module, (a, b), target, scale, limits),
            *_check_vector(module, "lora_magnitude_vector", magnitude, "use_dora", is_set=config.use_dora),
            *_check_vector(module, "lora_B.bias", b_bias, "lora_bias", is_set=config.lora_bias),
        ]
        reasons += faults
        if a is not None and b is not None and not faults:
            pairs[module_id] = LoraPair(
                module.path,
                a,
                b,
                scale,
                magnitude,
                b_bias,
                module.num_experts,
                _adapts_transpose(module, target),
            )
    biases = {module_id: tensor for (module_id, part), tensor in found.items() if part == "bias"}
    reasons += _check_biases(config, biases, frozenset(targets), shape)
    reasons += _check_invocation(config, targets, shape)
    num_added = vocabulary.count_added(shape.vocab_size)
    return AdapterTensors(pairs, biases, vocabulary, norms, config.invocation, num_added), reasons


def _check_invocation(
    config: PeftConfig, targets: Mapping[ModuleId, Target], shape: ModelShape
) -> Iterable[Reason]:
    if not config.invocation:
        return
    if max(config.invocation) >= shape.vocab_size:
        yield Reason(
            "alora_invocation_tokens",
            f"alora_invocation_tokens names token {max(config.invocation)}, but the base model has {shape.vocab_size} "
            "tokens",
        )
    for module_id in sorted(targets):
        path = shape.modules[module_id].path
        if module_id in (shape.embedding_module, shape.head_module):
            yield Reason(
                "alora_invocation_tokens",
                f"the adapter is activated (alora_invocation_tokens) and adapts {path}, which is not served together",
            )
        elif shape.latent is not None and path.endswith(f".{shape.latent.linear}"):
            yield Reason(
                "alora_invocation_tokens",
                f"the adapter is activated (alora_invocation_tokens) and adapts {path}, which would expand the latents "
                "of the tokens before the invocation, too; train it without this linear",
            )


def names_module(name: str, path: str) -> bool:
    """Whether a name in trainable_token_indices stands for the module at `path`."""
    return path == name or path.endswith(f".{name}")


def is_saved(path: str, config: PeftConfig) -> bool:
    """Whether modules_to_save names the module at `path`. As in PEFT, a name may begin within a part of a path: `norm`
    names every norm whose path ends with it.
    """
    return any(path.endswith(name) for name in config.modules_to_save)


def _find_norms(
    config: PeftConfig, tensors: Mapping[str, AnyFactor], shape: ModelShape
) -> tuple[dict[int, NormTensors[AnyFactor]], set[str], list[Reason]]:
    """Returns the replaced norms, the names of their tensors, and reasons to refuse them."""
    found: dict[tuple[int, str], AnyFactor] = {}
    names, reasons = set(), []
    for name, tensor in tensors.items():
        place = parse_norm_name(name, shape)
        if place is None:
            continue
        names.add(name)
        norm = shape.norms[place[0]]
        if place in found:
            message = f"{name!r} and {found[place].name!r} name the same weight; keep one of them"
            reasons.append(Reason("duplicate_tensor", message))
        elif not is_saved(norm.path, config):
            message = f"tensor {name[:120]!r} is a trained {place[1]}, but modules_to_save does not name {norm.path}"
            reasons.append(Reason("modules_to_save", message))
        elif place[1] == "bias" and not norm.has_bias:
            reasons.append(
                Reason(
                    "modules_to_save",
                    f"tensor {name[:120]!r} is a bias, but {norm.path} of the base model has none",
                )
            )
        elif tensor.shape != (norm.width,):
            message = f"tensor {name[:120]!r} has shape {list(tensor.shape)}; the base model requires {[norm.width]}"
            reasons.append(Reason("shape_mismatch", message))
        found[place] = tensor
    norms: dict[int, NormTensors[AnyFactor]] = {}
    for norm_id, norm in enumerate(shape.norms):
        weight, bias = found.get((norm_id, "weight")), found.get((norm_id, "bias"))
        if weight is not None and norm.has_bias == (bias is not None):
            norms[norm_id] = NormTensors(weight, bias)
        elif is_saved(norm.path, config) or bias is not None:
            message = f"modules_to_save names {norm.path}, but not all of its tensors are there"
            reasons.append(Reason("missing_tensors", message))
    return norms, names, reasons


def _find_vocabulary(
    config: PeftConfig,
    targets: Mapping[ModuleId, Target],
    tensors: Mapping[str, AnyFactor],
    shape: ModelShape,
) -> tuple[Vocabulary[AnyFactor], set[str], list[Reason]]:
    """Returns the replaced rows of embedding and head, the names of their tensors, and reasons to refuse them."""
    paths = {shape.embedding_path: shape.embedding_module, shape.head_path: shape.head_module}
    trained = {
        path: ids for path in paths for name, ids in config.token_indices if stands_for(name, path, shape)
    }
    reasons = [*_refuse_other_modules(config, shape), *_check_tying(config, trained, shape)]
    found: dict[str, AnyFactor] = {}
    row_names = set()
    for name, tensor in tensors.items():
        row_path = parse_rows_name(name)
        path = row_path or (parse_copy_name(name, shape) or "").removesuffix(".weight")
        if path in paths and (row_path is not None or is_saved(path, config)):
            row_names.add(name)
            if path in found:
                message = (
                    f"{name[:120]!r} and {found[path].name[:120]!r} are both rows of {path}; keep one of them"
                )
                reasons.append(Reason("duplicate_tensor", message))
            found[path] = tensor
    by_path: dict[str, TrainedRows[AnyFactor]] = {}
    for path, module_id in paths.items():
        rows, ids = found.get(path), trained.get(path)
        if path == shape.head_path and is_tied_rows(trained, shape):
            if rows is not None or is_saved(path, config):
                why = "PEFT ties them to the rows of the embedding"
                reasons.append(Reason("trainable_token_indices", f"{path} has rows of its own, but {why}"))
            continue
        faults = [*_check_rows(path, rows, ids, config, shape, is_target=module_id in targets)]
        reasons += faults
        if rows is not None and not faults:
            by_path[path] = TrainedRows(rows, ids)
    embedding, head = by_path.get(shape.embedding_path), by_path.get(shape.head_path)
    if is_tied_rows(trained, shape):
        head = embedding
    reasons += _check_added(embedding, head, shape)
    classifier, names, faults = _find_classifier(config, tensors, shape)
    return Vocabulary(embedding, head, classifier), row_names | names, reasons + faults


def _check_added(
    embedding: TrainedRows[AnyFactor] | None, head: TrainedRows[AnyFactor] | None, shape: ModelShape
) -> Iterable[Reason]:
    """Yields reasons to refuse rows behind those of the base model."""
    size = shape.vocab_size
    counts = [Vocabulary(rows).count_added(size) for rows in (embedding, head)]
    if not any(counts):
        return
    numbers = " and ".join(map(str, counts))
    if counts[0] != counts[1]:
        yield Reason(
            "added_tokens",
            f"the embedding and the head of the adapter have {numbers} rows behind the {size} of the base model; added "
            "tokens need a row of each: save the adapter with save_pretrained(..., save_embedding_layers=True)",
        )
    for rows in (embedding, head):
        if rows is not None and rows.token_ids is not None:
            missing = sorted({*range(size, size + max(counts))} - {*rows.token_ids})
            if missing and counts[0] == counts[1]:
                yield Reason(
                    "added_tokens",
                    f"the adapter has rows for {max(counts)} tokens behind the {size} of the base model, but none for "
                    f"token {missing[0]}; save it with save_pretrained(..., save_embedding_layers=True)",
                )
                return


def _find_classifier(
    config: PeftConfig, tensors: Mapping[str, AnyFactor], shape: ModelShape
) -> tuple[TrainedRows[AnyFactor] | None, set[str], list[Reason]]:
    """Returns the head that classifies texts, the names of its tensors, and reasons to refuse them."""
    named = {
        name: match["parameter"]
        for name in tensors
        if (match := _COPY.fullmatch(name)) is not None and match["path"] == CLASSIFIER_PATH
    }
    weights = [tensors[name] for name, parameter in named.items() if parameter == "weight"]
    saved = sorted({*CLASSIFIER_NAMES} & {*config.modules_to_save})
    reasons = []
    if "bias" in named.values():
        message = (
            f"the head {CLASSIFIER_PATH} has a bias; this server serves heads for classification without one"
        )
        reasons.append(Reason("modules_to_save", message))
    if len(weights) > 1:
        message = (
            f"{weights[0].name[:120]!r} and {weights[1].name[:120]!r} name the same head; keep one of them"
        )
        reasons.append(Reason("duplicate_tensor", message))
    if saved and not weights:
        message = (
            f"modules_to_save names {' and '.join(saved)}, but there is no tensor {CLASSIFIER_PATH}.weight"
        )
        reasons.append(Reason("missing_tensors", message))
    if not weights:
        return None, {*named}, reasons
    weight = weights[0]
    if not is_saved(CLASSIFIER_PATH, config):
        message = f"tensor {weight.name[:120]!r} is a trained head, which modules_to_save does not name"
        reasons.append(Reason("modules_to_save", message))
    if len(weight.shape) != 2 or weight.shape[1] != shape.hidden_size:
        message = (
            f"tensor {weight.name[:120]!r} has shape {list(weight.shape)}; the base model requires "
            f"[labels, {shape.hidden_size}]"
        )
        reasons.append(Reason("shape_mismatch", message))
    elif not 1 <= weight.shape[0] <= MAX_LABELS:
        message = f"the head has {weight.shape[0]} labels; accepted are 1 to {MAX_LABELS}"
        reasons.append(Reason("shape_mismatch", message))
    return TrainedRows(weight, None), {*named}, reasons


def _refuse_other_modules(config: PeftConfig, shape: ModelShape) -> Iterable[Reason]:
    paths = (shape.embedding_path, shape.head_path)
    for name, _ in config.token_indices:
        if name is not None and not any(names_module(name, path) for path in paths):
            served = " and ".join(paths)
            message = f"trainable_token_indices names {name[:80]!r}; this server serves it for {served} only"
            yield Reason("trainable_token_indices", message)
    final_norms = () if shape.final_norm is None else (shape.final_norm,)
    for name in config.modules_to_save:
        # `_find_classifier` checks these.
        if name not in CLASSIFIER_NAMES and not any(
            path.endswith(name) for path in (*paths, *(norm.path for norm in shape.norms))
        ):
            served = ", ".join((*paths, *(norm.path for norm in (*shape.layer_norms, *final_norms))))
            message = (
                f"modules_to_save names {name[:80]!r}; of this base model, it is served for {served} only"
            )
            yield Reason("modules_to_save", message)


def _check_rows(
    path: str,
    tensor: Factor | None,
    ids: tuple[int, ...] | None,
    config: PeftConfig,
    shape: ModelShape,
    *,
    is_target: bool,
) -> Iterable[Reason]:
    """Yields reasons to refuse the rows that replace those of the embedding or of the head.

    ids: the trained tokens, if trainable_token_indices names the module.
    """
    is_whole = is_saved(path, config)
    field = "modules_to_save" if is_whole else "trainable_token_indices"
    if tensor is None:
        if is_whole or ids is not None:
            yield Reason("missing_tensors", f"{field} names {path}, but there is no tensor for it")
        return
    name = f"tensor {tensor.name[:120]!r}"
    num_rows = shape.vocab_size + shape.count_added_rows(tensor.shape) if ids is None else len(ids)
    expected = (num_rows, shape.hidden_size)
    if ids is None and not is_whole:
        yield Reason(field, f"{name} has rows of {path}, which {field} does not name")
    elif ids is not None and is_whole:
        yield Reason(
            field, f"modules_to_save and trainable_token_indices both name {path}; PEFT allows one of them"
        )
    elif is_target:
        yield Reason(field, f"{path} has rows of its own and a LoRA pair; train one of them")
    elif path == shape.head_path and shape.head_has_bias:
        yield Reason(field, f"{path} of the base model has a bias, and rows of such a head can't be replaced")
    elif tensor.shape != expected:
        message = (
            f"{name} has shape {list(tensor.shape)}; the config and the base model require {list(expected)}"
        )
        if ids is None:
            message += explain_resize(tensor, shape)
        yield Reason("shape_mismatch", message)
    elif ids is not None and max(ids) >= shape.vocab_size + MAX_ADDED_ROWS:
        message = (
            f"{field} names token {max(ids)}, but the base model has {shape.vocab_size} tokens, and an adapter adds at "
            f"most {MAX_ADDED_ROWS}"
        )
        yield Reason(field, message)


def parse_rows_name(name: str) -> str | None:
    """Returns the path of the module in the name of trained rows; None for other names."""
    match = _TOKEN_ROWS.fullmatch(name)
    return None if match is None else match["path"]


def parse_saved_part(name: str, config: PeftConfig, shape: ModelShape) -> tuple[str, str] | None:
    """Returns path and part in the name of a part of the embedding or of the head, if modules_to_save names it."""
    match = _SAVED_PART.fullmatch(name)
    if match is None or match["path"] not in (shape.embedding_path, shape.head_path):
        return None
    return (match["path"], match["part"]) if is_saved(match["path"], config) else None


def name_rows(path: str) -> str:
    """Returns the name of trained rows of the module at `path`."""
    return f"base_model.model.{path}.token_adapter.trainable_tokens_delta"


def explain_resize(tensor: Factor, shape: ModelShape) -> str:
    """Returns what a message says of a matrix of another vocabulary: the cause and the remedy. Empty for others."""
    rows = tensor.shape[0]
    if tensor.shape[1:] != (shape.hidden_size,) or rows == shape.vocab_size:
        return ""
    change = (
        f"{rows - shape.vocab_size} tokens were added to"
        if rows > shape.vocab_size
        else "rows were removed from"
    )
    return (
        f": {change} the vocabulary before training, and an adapter may add at most {MAX_ADDED_ROWS} to that of the "
        f"base model; serve the base model after resize_token_embeddings({rows}), saved with the adapter's tokenizer, "
        "or train tokens that it has with trainable_token_indices"
    )


def stands_for(name: str | None, path: str, shape: ModelShape) -> bool:
    return path == shape.embedding_path if name is None else names_module(name, path)


def is_tied_rows(trained: Mapping[str, tuple[int, ...]], shape: ModelShape) -> bool:
    """Whether PEFT uses the embedding's trained rows for the head: the base ties them, and the config does not name
    other tokens for the head.
    """
    ids = trained.get(shape.embedding_path)
    return shape.ties_head and ids is not None and trained.get(shape.head_path, ids) == ids


def _check_tying(
    config: PeftConfig, trained: Mapping[str, tuple[int, ...]], shape: ModelShape
) -> Iterable[Reason]:
    for path in (shape.embedding_path, shape.head_path):
        names = [name for name, _ in config.token_indices if stands_for(name, path, shape)]
        if len(names) > 1:
            spelled = " and ".join(map(repr, names))
            message = f"trainable_token_indices names {path} twice, as {spelled}; keep one of them"
            yield Reason("trainable_token_indices", message)
    has_tokens = bool(trained) and not is_tied_rows(trained, shape)
    if config.ensure_weight_tying and shape.ties_head and has_tokens:
        yield Reason(
            "ensure_weight_tying",
            "ensure_weight_tying is set, and the config trains rows of the embedding or the head: training tied them, "
            "which this server serves only for the same trainable_token_indices of both",
        )


def check_tied_tensors(tensors: AdapterTensors[StoredTensor], shape: ModelShape) -> Iterable[Reason]:
    """Yields a reason if the tensors of embedding and head differ. PEFT loads both into one matrix."""
    embedding, head = (
        tensors.pairs.get(module_id) for module_id in (shape.embedding_module, shape.head_module)
    )
    pairs = []
    if embedding is not None and head is not None:
        pairs = [(embedding.a.values.T, head.b.values), (embedding.b.values.T, head.a.values)]
    rows = [found.tensor.values for found in tensors.vocabulary[:2] if found is not None]
    if len(rows) == len(("embedding", "head")):
        pairs.append((rows[0], rows[1]))
    if not all(ours.dtype == theirs.dtype and np.array_equal(ours, theirs) for ours, theirs in pairs):
        yield Reason(
            "ensure_weight_tying",
            f"ensure_weight_tying is set, but the tensors of {shape.embedding_path} and {shape.head_path} differ; save "
            "the adapter again",
        )


def _check_vector(
    module: LinearShape, name: str, tensor: Factor | None, field: str, *, is_set: bool
) -> Iterable[Reason]:
    """Checks a vector that a module has exactly if a field of the config is set."""
    if tensor is None:
        if is_set:
            yield Reason("missing_tensors", f"{field} is set, but {module.path} has no {name}")
    elif not is_set:
        yield Reason(field, f"{module.path} has a {name}, but {field} is not set in {CONFIG_NAME}")
    elif tensor.shape != (module.out_width,):
        yield _refuse_vector_shape(f"{name} of {module.path}", tensor, module)


def _refuse_vector_shape(what: str, tensor: Factor, module: LinearShape) -> Reason:
    expected = [module.out_width]
    return Reason(
        "shape_mismatch", f"{what} has shape {list(tensor.shape)}; the base model requires {expected}"
    )


def _check_biases(
    config: PeftConfig, biases: Mapping[ModuleId, Factor], targets: frozenset[ModuleId], shape: ModelShape
) -> Iterable[Reason]:
    """Yields reasons to refuse the trained biases of the base model's modules."""
    biased = {module_id for module_id, module in enumerate(shape.modules) if module.has_bias}
    expected = {"none": frozenset[int](), "lora_only": targets, "all": frozenset(biased)}[
        config.bias
    ] & biased
    for module_id in sorted(biases.keys() - expected):
        tensor, path = biases[module_id], shape.modules[module_id].path
        if module_id not in biased:
            why = f"but {path} of the base model has no bias"
        elif config.bias == "none":
            why = f"but {CONFIG_NAME} says that no bias was trained (bias: none)"
        else:
            why = "but the config adapts the biases of its target modules only (bias: lora_only)"
        yield Reason("bias", f"tensor {tensor.name[:120]!r} is a trained bias, {why}")
    for module_id in sorted(expected & biases.keys()):
        tensor, module = biases[module_id], shape.modules[module_id]
        if tensor.shape != (module.out_width,):
            yield _refuse_vector_shape(f"the bias of {module.path}", tensor, module)
    if missing := frozenset(expected - biases.keys()):
        message = f"bias is {config.bias!r}, but there is no trained bias of {_some(missing, shape)}"
        yield Reason("missing_tensors", message)


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


def _sort_tensors(
    tensors: Mapping[str, AnyFactor], shape: ModelShape
) -> tuple[dict[tuple[ModuleId, Part], AnyFactor], list[Reason]]:
    found: dict[tuple[ModuleId, Part], AnyFactor] = {}
    reasons: list[Reason] = []
    for name, tensor in tensors.items():
        parsed = parse_tensor_name(name, shape)
        if parsed is None:
            reasons.append(_foreign_tensor(name))
        elif parsed in found:
            reasons.append(
                Reason(
                    "duplicate_tensor",
                    f"{name!r} and {found[parsed].name!r} name the same weight; keep one of them",
                )
            )
        else:
            found[parsed] = tensor
    return found, reasons


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


def _adapts_transpose(module: LinearShape, target: Target) -> bool:
    """PEFT takes a weight that target_parameters names for [out, in]. So of one that is [in, out], it adapts the
    transpose.
    """
    return target.is_parameter and module.is_transposed


def _check_pair(
    module: LinearShape,
    pair: tuple[Factor | None, Factor | None],
    target: Target,
    scale: float,
    limits: AdapterLimits,
) -> Iterable[Reason]:
    name, rank = module.path, target.rank
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
    num_rows, widths = rank * module.num_experts, (module.in_width, module.out_width)
    from_width, to_width = widths[::-1] if _adapts_transpose(module, target) else widths
    expected = ((num_rows, from_width), (to_width, num_rows))
    for factor, tensor, wanted in zip("AB", pair, expected, strict=True):
        if tensor is None:
            yield Reason("missing_tensors", f"{name} has no lora_{factor}")
        elif tensor.shape != wanted:
            message = (
                f"lora_{factor} of {name} has shape {list(tensor.shape)}; the config and the base "
                f"model require {list(wanted)}"
            )
            yield Reason("shape_mismatch", message)
