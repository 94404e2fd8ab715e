"""An adapter that passed validation: for each adapted linear its two factors and the scale, plus what lies
beside them.

Knows no pages and no files: tensors are views over whatever memory they were read from, and keep it alive.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from slora_adapters.module_names import ModuleId
from slora_adapters.peft_config import PeftConfig
from slora_adapters.tensor_file import StoredTensor
from slora_kernels.layout import MODULES


@dataclass(frozen=True, slots=True)
class LoraPair:
    """The delta of one linear: `scale * b @ a`, with a [rank, in width] and b [out width, rank]."""

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
    """`digest` identifies the arithmetic (`digest.py`); `extras` are not part of it."""

    config: PeftConfig
    pairs: Mapping[ModuleId, LoraPair]
    digest: str
    extras: AdapterExtras

    @property
    def max_rank(self) -> int:
        return max(pair.rank for pair in self.pairs.values())

    @property
    def target_modules(self) -> tuple[str, ...]:
        """Names such as "q_proj" that at least one layer adapts, in the order of MODULES."""
        adapted = {module for _, module in self.pairs}
        return tuple(name for module, name in enumerate(MODULES) if module in adapted)

    @property
    def tensor_bytes(self) -> int:
        return sum(pair.a.values.nbytes + pair.b.values.nbytes for pair in self.pairs.values())

    def ranks(self, num_layers: int) -> list[list[int]]:
        """Rank by layer and module, 0 where not adapted: what `lay_out_adapter` takes."""
        table = [[0] * len(MODULES) for _ in range(num_layers)]
        for (layer, module), pair in self.pairs.items():
            table[layer][module] = pair.rank
        return table
