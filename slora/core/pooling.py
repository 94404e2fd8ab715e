"""How the hidden states of a prompt become its embedding. Options that vLLM also has work as in vLLM.

`slora.core.request_check` checks what depends on the model.
"""

from dataclasses import dataclass
from enum import StrEnum

from slora.core.errors import RequestRefused

__all__ = ["Pooling", "PoolingKind"]


class PoolingKind(StrEnum):
    """Which hidden states of the last layer, after its norm, make the embedding.

    LAST: the state of the last token, which attends to all other tokens. MEAN: the mean over all tokens of the prompt.
    """

    LAST = "last"
    MEAN = "mean"


@dataclass(frozen=True, slots=True)
class Pooling:
    """The parameters of an embedding. Raises RequestRefused, which names the field, for a value out of range.

    dimensions: number of components to keep. None keeps all `hidden_size` components.
    normalize: whether the shortened vector is divided by its L2 norm. A vector of zeros stays as it is.
    """

    kind: PoolingKind = PoolingKind.LAST
    dimensions: int | None = None
    normalize: bool = True

    def __post_init__(self) -> None:
        if self.kind not in list(PoolingKind):
            raise RequestRefused(f"pooling is {self.kind!r:.80}; it must be last or mean", "pooling")
        object.__setattr__(self, "kind", PoolingKind(self.kind))
        if self.dimensions is not None and self.dimensions < 1:
            raise RequestRefused(f"dimensions is {self.dimensions}; it must be at least 1", "dimensions")
