"""A validated adapter: the two factors and the scale of each adapted linear, and its extras.

An adapter is independent of pages and files. Its tensors are views of the memory that they were read from, and keep
this memory alive.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from slora_adapters.peft.module_names import ModuleId
from slora_adapters.peft.peft_config import PeftConfig
from slora_adapters.peft.tensor_file import Factor, StoredTensor
from slora_kernels.layout import ModelShape


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """Limits of one server."""

    max_lora_rank: int = 64  # the greatest rank of any module
    # The greatest |alpha / r| (with rslora |alpha / sqrt(r)|). Far larger scales make the outputs overflow.
    max_scale: float = 10_000.0
    max_tensor_bytes: int = 4 << 30  # the largest size of the safetensors file, in bytes
    # The largest size of the chat template and of the generation config, in bytes each.
    max_text_bytes: int = 256 << 10
    # If set ("float32", "float16", "bfloat16"), values that overflow in this dtype are refused.
    served_dtype: str | None = None
    vocab_size: int | None = None  # if set, an adapter's tokenizer must not define token ids at or above it
    # Directory of the base model. If set, an adapter may include copies of the base model's embedding and head, as PEFT
    # saves them, and tokens of an adapter's tokenizer are compared with the base's.
    base_directory: Path | None = None
    # Digests of the tokenizers that an adapter may have, which are the base's as it is saved and as it is served; see
    # `digest_tokenizer`. Empty if tokenizers are not compared.
    tokenizer_digests: tuple[str, ...] = ()


AnyFactor = TypeVar("AnyFactor", bound=Factor)


@dataclass(frozen=True, slots=True)
class LoraPair(Generic[AnyFactor]):
    """The delta of one linear: `scale * b @ a`, with a [rank, in width] and b [out width, rank]."""

    path: str  # path of the module from the model's root, as PEFT's patterns match it
    a: AnyFactor
    b: AnyFactor
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class AdapterExtras:
    """Texts of an adapter that do not change its arithmetic: a Jinja chat template, and sampling defaults as JSON."""

    chat_template: str | None = None
    generation_config: str | None = None
    # What these texts were made from, for people. It is known only when the files are read.
    uses: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Adapter:
    """A validated adapter. `digest` identifies its arithmetic (`digest.py`), and does not cover `extras`."""

    config: PeftConfig
    pairs: Mapping[ModuleId, LoraPair[StoredTensor]]
    digest: str
    extras: AdapterExtras
    # Whether the uploaded file also has copies of the base model's embedding or head, or factors of the part that reads
    # images. Stores do not keep these tensors.
    has_unused: bool = False
    # Whether the tensors in the uploaded file have the names of the base model's modules and are in name order.
    is_sorted: bool = True

    @property
    def max_rank(self) -> int:
        return max(pair.rank for pair in self.pairs.values())

    @property
    def target_modules(self) -> tuple[str, ...]:
        """The module names, such as "q_proj", that are adapted in at least one layer, in the model's order."""
        names = (self.pairs[module_id].path.rpartition(".")[2] for module_id in sorted(self.pairs))
        return tuple(dict.fromkeys(names))

    @property
    def tensor_bytes(self) -> int:
        return sum(pair.a.values.nbytes + pair.b.values.nbytes for pair in self.pairs.values())

    def ranks(self, shape: ModelShape) -> list[int]:
        """Returns the rank of each module of the base model, as `lay_out_adapter` expects; 0 for modules that are not
        adapted.
        """
        return list_ranks(self.pairs, shape)


def list_ranks(pairs: Mapping[ModuleId, LoraPair[Any]], shape: ModelShape) -> list[int]:
    """Returns the rank of each module of the base model, 0 where not adapted."""
    return [pair.rank if (pair := pairs.get(m)) else 0 for m in range(shape.num_modules)]
