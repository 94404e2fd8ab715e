"""Reads what the tokens of a model's vocabulary spell, for structured output."""

from pathlib import Path

from slora.core.errors import ConfigError
from slora.grammar.token_spelling import TokenSpelling
from slora.text.tokenizer import Tokenizer

__all__ = ["read_spelling"]


def read_spelling(directory: Path, vocab_size: int) -> TokenSpelling:
    """Reads the spelling of every token. vocab_size: the model's vocabulary size, which may exceed the tokenizer's.

    Takes half a second for 128,000 tokens. Raises ConfigError if there is no tokenizer, or if its decoder does not map
    each token to bytes.
    """
    return spell_tokens(Tokenizer.from_directory(directory), vocab_size)


def spell_tokens(tokenizer: Tokenizer, vocab_size: int) -> TokenSpelling:
    pieces, not_first = [], []
    for token_id in range(vocab_size):
        first, later = (tokenizer.spell(token_id, is_first=is_first) for is_first in (True, False))
        if first is None or later is None:
            raise ConfigError(
                "the tokenizer's decoder joins tokens to text in a way that structured output does not support"
            )
        pieces.append(later)
        if first != later:
            not_first.append(token_id)
    return TokenSpelling(pieces, not_first)
