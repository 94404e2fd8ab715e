"""The bytes that each token of a model spells, for the grammar compiler."""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["TokenSpelling"]


@dataclass(frozen=True, slots=True)
class TokenSpelling:
    """The bytes of each token within a text.

    pieces: one entry for each id of the model's vocabulary. Empty for ids that no answer may contain: special tokens
        and ids without a token.
    not_first: ids that spell something else at the start of a text, where the decoder strips a space.
    """

    pieces: Sequence[bytes]
    not_first: Sequence[int] = ()
