"""How PEFT's files name the modules of a base model. Which modules there are, the base model's shape says."""

import re
from collections.abc import Mapping
from functools import cache

from slora_kernels.layout import ModelShape

# One adaptable module: its row in tables with a module axis, and in `ModelShape.modules`.
ModuleId = int

# PEFT writes the first form. It also loads the adapter's name, "default", before `.weight`; transformers' own
# integration loads names without the prefix.
_FACTOR = re.compile(
    r"(?:base_model\.model\.)?(?P<path>.+)\.lora_(?P<factor>[AB])(?:\.default)?\.weight", re.DOTALL
)


def parse_factor_name(tensor_name: str, shape: ModelShape) -> tuple[ModuleId, str] | None:
    """Which module a tensor belongs to, and whether it is "A" or "B"; None if the name is unknown."""
    match = _FACTOR.fullmatch(tensor_name)
    if match is None:
        return None
    module_id = _linears_by_path(shape).get(match["path"])
    return None if module_id is None else (module_id, match["factor"])


@cache
def _linears_by_path(shape: ModelShape) -> Mapping[str, ModuleId]:
    return {module.path: m for m, module in enumerate(shape.modules[: shape.embedding_module])}
