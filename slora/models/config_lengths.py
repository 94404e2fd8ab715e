"""Finds the lengths in tokens at which a transformers model may change its arithmetic: windows, chunks and floors.

A test with prompts shorter than such a length proves nothing about longer prompts.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

__all__ = ["find_lengths", "shorten_lengths"]

# In all classes of transformers, the name of a field with such a length contains one of these words.
_LENGTH_WORDS = ("window", "chunk", "floor")
_NOT_LENGTHS = ("max_window_layers", "chunk_size_feed_forward")


def find_lengths(config: PreTrainedConfig) -> dict[str, int]:
    """Returns the lengths in tokens that the text model's config contains, by field name: attention windows and
    chunks, and the interval after which the temperature of attention changes (`floor_scale`).
    """
    return dict(_lengths(config.get_text_config()))


@contextmanager
def shorten_lengths(model: nn.Module, longest: int, short: int) -> Iterator[None]:
    """Within this context, each length above `longest` is set to `short` in the model's configs and modules.

    A module may store a length under another name, such as `window_size` for `sliding_window`. Attributes are therefore
    found by the words that such names contain, and by their value.
    """
    owners = list(_find_owners(model))
    configs = [owner for owner in owners if isinstance(owner, PreTrainedConfig)]
    lengths = {length for config in configs for _, length in _lengths(config) if length > longest}
    found = [(owner, name, value) for owner in owners for name, value in _lengths(owner) if value in lengths]
    for owner, name, _ in found:
        setattr(owner, name, short)
    try:
        yield
    finally:
        for owner, name, value in found:
            setattr(owner, name, value)


def _find_owners(model: nn.Module) -> Iterable[Any]:
    """Returns the modules of a model and all configs that they refer to, without duplicates."""
    owners: dict[int, Any] = {}
    for module in model.modules():
        owners[id(module)] = module
        configs = [value for value in vars(module).values() if isinstance(value, PreTrainedConfig)]
        configs += [config.get_text_config() for config in configs]
        owners |= {id(config): config for config in configs}
    return owners.values()


def _lengths(owner: object) -> Iterator[tuple[str, int]]:
    """Yields the attributes whose name and value look like a length. A value of 1 is not a length."""
    for name, value in vars(owner).items():
        if (
            name in _NOT_LENGTHS
            or name.endswith("_pattern")
            or not any(word in name for word in _LENGTH_WORDS)
        ):
            continue
        if (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and value > 1
            and value == int(value)
        ):
            yield name, int(value)
