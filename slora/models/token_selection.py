"""Attention to the tokens that an indexer selects: DeepSeek V3.2, GLM-5, MiniMax M3 and classes like them.

In such a class, a small module named `indexer` scores the tokens that a query sees. Attention reads the best of them,
so many as config.json says, or the blocks of tokens with the best scores. In a sequence with no more tokens than that,
the indexer selects all that a query sees, and attention is that of a class without an indexer. This is what is served:
the model's positions end at this number (`find_selection`), and the indexer is not computed (`install_selection`).

The implementation `eager` still computes it. The check at start compares with that while the indexers select no more
tokens than the longer prompt has (`shorten_selection`), so it fails if they select fewer than `find_selection` says.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from slora.core.errors import ConfigError
from slora.models.model_spec import Selection

_EAGER = "eager"
_INDEXER = "indexer"


class AllTokens:
    """Stands for all tokens that a query sees: the answer of an indexer that is not computed, and the mask of a module
    that gets none. As a tensor of truth values, it does not change a mask.
    """

    dtype = torch.bool

    def __getitem__(self, _: object) -> "AllTokens":
        return self

    def __and__(self, other: object) -> object:
        return other

    __rand__ = __and__


ALL_TOKENS = AllTokens()
# The mask that some classes would make of what an indexer selects.
OWN_MASK = AllTokens()


@dataclass(frozen=True, slots=True)
class _Kind:
    """One way to select tokens. attributes: of the indexer, from which `count` computes the tokens that are selected.
    shorten: of a number of tokens and of these attributes, the values with which it selects no more tokens.
    """

    attributes: tuple[str, ...]
    count: Callable[..., int]
    shorten: Callable[..., tuple[int, ...]]
    fields: str


_KINDS = (
    # Pools of tokens. The tokens behind the last whole pool are always selected.
    _Kind(
        ("index_topk", "index_kpool"),
        lambda most, size: most + size - 1,
        lambda length, _, size: (length // size * size, size),
        "index_topk and index_kpool",
    ),
    _Kind(("index_topk",), lambda most: most, lambda length, _: (length,), "index_topk"),
    _Kind(
        ("topk_blocks", "block_size"),
        lambda blocks, size: blocks * size,
        lambda length, _, __: (2, -(-length // 2)),
        "index_topk_blocks and index_block_size",
    ),
    # The tokens behind the last whole block are always selected.
    _Kind(
        ("block_topk", "compress_ratio"),
        lambda blocks, size: (blocks + 1) * size - 1,
        lambda length, _, __: (length // 2, 2),
        "indexer_budget and indexer_compress_ratio",
    ),
)
# Indexers in which this attribute is false leave out the tokens behind the last whole pool.
_SELECTS_TAIL = "index_kpool_always_select_tail"
# The method of some attention modules that makes a mask of what the indexer selected.
_MAKE_MASK = "build_attention_mask_from_topk"


def find_selection(model: nn.Module) -> Selection | None:
    """Returns the selection of the indexers that select the fewest tokens. None if there are none.

    Raises ConfigError for an indexer that leaves out tokens at any length, or that selects none.
    """
    if any(getattr(module, _SELECTS_TAIL, True) is False for module in model.modules()):
        raise ConfigError(
            f"{_SELECTS_TAIL} is false in config.json, so attention leaves out tokens at any length, which this server "
            "does not compute; it serves only models that were trained with true"
        )
    found = [
        Selection(kind.count(*(getattr(indexer, name) for name in kind.attributes)), kind.fields)
        for _, indexer, kind in _find_indexers(model)
    ]
    least = min(found, key=lambda selection: selection.num_tokens, default=None)
    if least is not None and least.num_tokens < 1:
        raise ConfigError(
            f"{least.fields} in config.json: indexers select {least.num_tokens} tokens; give at least 1"
        )
    return least


def install_selection(model: nn.Module) -> None:
    """Makes indexers select all tokens without computing them, unless the implementation of attention is `eager`."""
    found = list(_find_indexers(model))
    for module, indexer, _ in found:
        module.register_forward_pre_hook(_give_mask, with_kwargs=True)
        indexer.forward = partial(_select, module.config, indexer.forward)
    # A module without an indexer takes over the selection of an earlier one.
    for module in model.modules() if found else ():
        if hasattr(module, _MAKE_MASK):
            setattr(module, _MAKE_MASK, partial(_make_mask, getattr(module, _MAKE_MASK)))


@contextmanager
def shorten_selection(model: nn.Module, length: int) -> Iterator[None]:
    """Within this context, indexers select no more tokens than a sequence of `length` tokens has."""
    before = []
    for _, indexer, kind in _find_indexers(model):
        values = [getattr(indexer, name) for name in kind.attributes]
        before += [(indexer, name, value) for name, value in zip(kind.attributes, values, strict=True)]
        for name, value in zip(kind.attributes, kind.shorten(length, *values), strict=True):
            setattr(indexer, name, value)
    try:
        yield
    finally:
        for indexer, name, value in before:
            setattr(indexer, name, value)


def _find_indexers(model: nn.Module) -> Iterator[tuple[Any, Any, _Kind]]:
    """Yields each attention module with an indexer of a known kind, the indexer, and its kind."""
    for module in model.modules():
        indexer = getattr(module, _INDEXER, None)
        if not isinstance(indexer, nn.Module):
            continue
        for kind in _KINDS:
            if all(type(getattr(indexer, name, None)) is int for name in kind.attributes):
                yield module, indexer, kind
                break


def _give_mask(module: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The modules cut the mask for the indexer even if there is none."""
    if module.config._attn_implementation == _EAGER or options.get("attention_mask") is not None:
        return None
    return args, {**options, "attention_mask": ALL_TOKENS}


def _select(config: Any, own: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return own(*args, **options) if config._attn_implementation == _EAGER else ALL_TOKENS


def _make_mask(own: Callable[..., Any], *, topk_indices: object, **options: Any) -> Any:
    return OWN_MASK if topk_indices is ALL_TOKENS else own(topk_indices=topk_indices, **options)
