"""An adapter that passed validation: for each adapted linear its two factors and the scale, plus what lies
beside them.

Knows no pages and no files: tensors are views over whatever memory they were read from, and keep it alive.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from slora_adapters.module_names import ModuleId
from slora_adapters.peft_config import PeftConfig
from slora_adapters.tensor_file import StoredTensor
from slora_kernels.layout import ModelShape


@dataclass(frozen=True, slots=True)
class LoraPair:
    """The delta of one linear: `scale * b @ a`, with a [rank, in width] and b [out width, rank].

    path: of the module, from the model's root, as PEFT's patterns see it.
    """

    path: str
    a: StoredTensor
    b: StoredTensor
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
    """

    config: PeftConfig
    pairs: Mapping[ModuleId, LoraPair]
    digest: str
    extras: AdapterExtras
    has_copies: bool = False

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
        return [pair.rank if (pair := self.pairs.get(m)) else 0 for m in range(shape.num_modules)]
