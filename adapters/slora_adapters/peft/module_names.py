"""Parses the tensor names of PEFT files into modules of a base model. The base model's shape lists the modules."""

import re
from collections.abc import Mapping
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
_COPY = re.compile(rf"{_PREFIX}(?P<path>.+?)(?:\.base_layer)?\.(?P<parameter>weight|bias)", re.DOTALL)


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


@cache
def _linears_by_path(shape: ModelShape) -> Mapping[str, ModuleId]:
    return {module.path: m for m, module in enumerate(shape.modules) if m != shape.embedding_module}
