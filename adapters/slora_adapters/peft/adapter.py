"""An adapter that passed validation: for each adapted linear its two factors and the scale, plus what lies
beside them.

Knows no pages and no files: tensors are views over whatever memory they were read from, and keep it alive.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from slora_adapters.peft.module_names import ModuleId
from slora_adapters.peft.peft_config import PeftConfig
from slora_adapters.peft.tensor_file import StoredTensor
from slora_kernels.layout import ModelShape


class Factor(Protocol):
    """What is known of a tensor before its bytes are there. dtype: as files name it."""

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


AnyFactor = TypeVar("AnyFactor", bound=Factor)


@dataclass(frozen=True, slots=True)
class LoraPair(Generic[AnyFactor]):
    """The delta of one linear: `scale * b @ a`, with a [rank, in width] and b [out width, rank].

    path: of the module, from the model's root, as PEFT's patterns see it.
    """

    path: str
    a: AnyFactor
    b: AnyFactor
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class AdapterExtras:
    """Texts that travel with an adapter without changing its arithmetic: a Jinja chat template; JSON of
    sampling defaults.
    """

    chat_template: str | None = None
    generation_config: str | None = None


@dataclass(frozen=True, slots=True)
class Adapter:
    """`digest` identifies the arithmetic (`digest.py`); `extras` are not part of it.

    has_copies: whether its file holds the base's own embedding or head, too, which nobody needs any more.
    is_sorted: whether the tensors lie in that file in the order of their names.
    """

    config: PeftConfig
    pairs: Mapping[ModuleId, LoraPair[StoredTensor]]
    digest: str
    extras: AdapterExtras
    has_copies: bool = False
    is_sorted: bool = True

    @property
    def max_rank(self) -> int:
        return max(pair.rank for pair in self.pairs.values())

    @property
    def target_modules(self) -> tuple[str, ...]:
        """Names such as "q_proj" that at least one layer adapts, in the model's order."""
        names = (self.pairs[module_id].path.rpartition(".")[2] for module_id in sorted(self.pairs))
        return tuple(dict.fromkeys(names))

    @property
    def tensor_bytes(self) -> int:
        return sum(pair.a.values.nbytes + pair.b.values.nbytes for pair in self.pairs.values())

    def ranks(self, shape: ModelShape) -> list[int]:
        """Rank of each module of the base, 0 where not adapted: what `lay_out_adapter` takes."""
        return list_ranks(self.pairs, shape)


def list_ranks(pairs: Mapping[ModuleId, LoraPair[Any]], shape: ModelShape) -> list[int]:
    """Rank of each module of the base, 0 where not adapted."""
    return [pair.rank if (pair := pairs.get(m)) else 0 for m in range(shape.num_modules)]
