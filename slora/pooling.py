"""How the hidden states of a prompt become its embedding. Names and meanings are vLLM's, where it has the option.

`slora.engine.request_check` checks what depends on the model.
"""

from dataclasses import dataclass
from enum import StrEnum

from slora.errors import RequestRefused

__all__ = ["Pooling", "PoolingKind"]


class PoolingKind(StrEnum):
    """Which hidden states of the last layer, after its norm, make the embedding.

    LAST: that of the last token, which attends to all others. MEAN: the mean over all tokens of the prompt.
    """

    LAST = "last"
    MEAN = "mean"


@dataclass(frozen=True, slots=True)
class Pooling:
    """The parameters of an embedding. Raises RequestRefused, which names the field, for a value out of range.

    dimensions: length of the vector; its further components are dropped. None keeps all `hidden_size` components.
    normalize: whether the vector, once shortened, is divided by its L2 norm. A vector of zeros stays as it is.
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
