"""Parses the tensor names of PEFT files into modules of a base model. The base model's shape lists the modules."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache

from slora_kernels.layout import ModelShape

# Index of an adaptable module in `ModelShape.modules`, and in every table with a module axis.
ModuleId = int

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
