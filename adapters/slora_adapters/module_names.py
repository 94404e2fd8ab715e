"""What the linears of a Llama-family model are called, in transformers and in PEFT's files."""

import re
from collections.abc import Iterator

from slora_kernels.layout import MODULES

# One adaptable linear: (layer, index into MODULES).
ModuleId = tuple[int, int]

_PARENTS = ("self_attn",) * 4 + ("mlp",) * 3
MODULE_PATHS = tuple(f"{parent}.{module}" for parent, module in zip(_PARENTS, MODULES, strict=True))

# Modules of the base that PEFT could adapt or train and that this server does not.
EMBEDDING_NAMES = ("model.embed_tokens", "lm_head")

# PEFT writes the first form. It also loads the adapter's name, "default", before `.weight`; transformers' own
# integration loads names without the prefix.
_FACTOR = re.compile(
    r"(?:base_model\.model\.)?model\.layers\.(?P<layer>0|[1-9][0-9]{0,4})\.(?P<path>"
    + "|".join(re.escape(path) for path in MODULE_PATHS)
    + r")\.lora_(?P<factor>[AB])(?:\.default)?\.weight"
)


def module_name(module_id: ModuleId) -> str:
    """`(3, 0)` -> "model.layers.3.self_attn.q_proj", the name that PEFT's patterns are matched against."""
    layer, module = module_id
    return f"model.layers.{layer}.{MODULE_PATHS[module]}"


def all_modules(num_layers: int) -> Iterator[ModuleId]:
    """Every adaptable linear of a model, layer by layer."""
    return ((layer, module) for layer in range(num_layers) for module in range(len(MODULES)))


def parse_factor_name(tensor_name: str) -> tuple[ModuleId, str] | None:
    """Which module a tensor belongs to, and whether it is "A" or "B"; None if the name is unknown."""
    match = _FACTOR.fullmatch(tensor_name)
    if match is None:
        return None
    return (int(match["layer"]), MODULE_PATHS.index(match["path"])), match["factor"]
