"""What a run of a transformers model reveals: its masks, its use of batch indices, and its lengths.

Masks. transformers builds no mask for an attention function that is registered without a mask function, because it
assumes that such a function masks by itself. Paged attention implements the causal mask, and the causal mask within a
sliding window. A model with other masks, or whose attention calls do not pass their window, would get wrong answers.
The model is therefore run a second time with a mask function that records the mask of each layer, and the two are
compared.

Batch indices. A step holds tokens of many sequences, so a token's batch index has no meaning for its sequence. Short
prompts may not show a model that uses it: Llama 4 scales queries by index, but only from the 8,192nd token on. So the
model's arithmetic is traced. Llama 4 adds the number of tokens in its cache to the index. `TokenCounter` takes the
place of the cache and gives each token the number that makes the sum its position.

Lengths. A model may change its arithmetic at windows, chunks and floors. A test with prompts shorter than such a length
proves nothing about longer prompts.

In bfloat16 the logits alone do not reveal these faults: rounding hides both the scale of Llama 4 and a window of 40
tokens in a prompt of 49.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig

from slora.models.token_selection import AllTokens

# Returns whether a query sees a key. The arguments are the indices of batch, head, query and key, as tensors.
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# Distances at which a mask may change, in addition to the lengths in the config.
_COMMON_DISTANCES = tuple(1 << exponent for exponent in range(21))


class MaskRecord:
    """Records which mask function built which mask in one forward pass on the meta device.

    given: the mask of each attention call, in order.
    """

    def __init__(self) -> None:
        self.given: list[Tensor | AllTokens | None] = []
        self._made: list[tuple[Tensor, MaskFunction]] = []

    def make_mask(self, *, q_length: int, kv_length: int, mask_function: MaskFunction, **_: Any) -> Tensor:
        """transformers' mask interface: returns a mask [1, 1, q_length, kv_length] without data."""
        mask = torch.empty(1, 1, q_length, kv_length, dtype=torch.bool, device="meta")
        self._made.append((mask, mask_function))
        return mask

    def attend(
        self,
        _: nn.Module,
        query: Tensor,
        __: Tensor,
        value: Tensor,
        attention_mask: Tensor | AllTokens | None = None,
        **___: Any,
    ) -> tuple[Tensor, None]:
        """transformers' attention interface."""
        self.given.append(attention_mask)
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3]), None

    def find_function(self, mask: object) -> MaskFunction | None:
        """The function that built the mask. None if the model built the mask itself, or changed it."""
        return next((function for made, function in self._made if made is mask), None)


def describe_mask_difference(
    function: MaskFunction,
    window: int | None,
    lengths: Iterable[int],
    max_positions: int,
    chunk: int | None = None,
    constants: "ConstantTrace | None" = None,
) -> str | None:
    """Describes how `function` differs from the causal mask within `window` tokens, or returns None if it does not.

    window: None means that a token sees all earlier tokens. chunk: a token sees only tokens of its own chunk, which
    begins at a multiple of this length. The masks are compared at tokens just before and after each of `lengths`, at
    multiples of each length, and at powers of two. constants: was active in the run in which the function was made.
    """
    steps = {*lengths, *_COMMON_DISTANCES} | ({window} if window is not None else set())
    edges = {factor * step + offset for step in steps for factor in (1, 2, 3) for offset in (-1, 0, 1)}
    points = torch.tensor(sorted(edge for edge in {0, *edges} if 0 <= edge < max_positions))
    queries, keys = points.repeat_interleave(len(points)), points.repeat(len(points))
    # Add the pairs just inside and just outside a window, which the points above do not contain.
    shifted = queries - keys
    queries, keys = torch.cat((queries, queries)), torch.cat((keys, shifted.clamp(min=0)))
    expected = keys <= queries
    if window is not None:
        expected &= keys > queries - window
    if chunk is not None:
        expected &= keys // chunk == queries // chunk
    zero = torch.zeros((), dtype=torch.int64)
    with _WithoutPadding(constants or ConstantTrace(), int(points[-1]) + 1):
        seen = function(zero, zero, queries, keys).expand(queries.shape)
    different = (seen != expected).nonzero()
    if not len(different):
        return None
    query, key = int(queries[different[0, 0]]), int(keys[different[0, 0]])
    difference = f"shows token {key} to" if seen[different[0, 0]] else f"hides token {key} from"
    told = "no window" if window is None else f"a window of {window} tokens"
    return f"its attention call has {told}, but the model's own mask {difference} token {query}"


class ConstantTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that records tensors without data that are filled with one number, such as -1 for "in no image"."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # By their storage, so that views are found, too. Tensors are kept alive, so that storages are not reused.
        self._values: dict[int, tuple[Tensor, float]] = {}

    def fill(self, tensor: Tensor, length: int) -> Tensor:
        """The tensor with data, as if it had been made for `length` tokens. It is 0 if it has not been recorded."""
        _, value = self._values.get(_find_storage(tensor), (None, None))
        if value is None or not tensor.dim():
            return torch.zeros_like(tensor, device="cpu")
        number = torch.tensor(value, dtype=tensor.dtype)
        return number.expand(*tensor.shape[:-1], max(length, tensor.shape[-1]))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is _aten.full.default and _has_no_data(result):
            self._values[_find_storage(result)] = result, args[1]
        elif func._schema.is_mutable and _has_no_data(args[0]):
            self._values.pop(_find_storage(args[0]), None)
        return result


def _find_storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _WithoutPadding(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which tensors without data have it: see `ConstantTrace.fill`. So counts of padding tokens are 0."""

    def __init__(self, constants: ConstantTrace, length: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._constants, self._length = constants, length

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        known = [self._constants.fill(x, self._length) if _has_no_data(x) else x for x in args]
        return func(*known, **(kwargs or {}))


class WithoutHits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which tensors without data have no element other than zero. So no expert of a mixture is chosen."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is _aten.nonzero.default and _has_no_data(args[0]):
            return torch.empty(0, args[0].dim(), dtype=torch.int64, device="meta")
        return func(*args, **(kwargs or {}))


def _has_no_data(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_meta


_aten = torch.ops.aten
_NUMBERINGS = (_aten.arange.default, _aten.arange.start, _aten.arange.start_step)
# Operations whose indices select rows but do not enter the values. For example, a mixture of experts numbers its tokens
# to sort them by expert.
_SELECTIONS = frozenset(
    {
        _aten.index,
        _aten.index_add,
        _aten.index_add_,
        _aten.index_copy_,
        _aten.index_put,
        _aten.index_put_,
        _aten.index_select,
        _aten.gather,
        _aten.scatter,
        _aten.scatter_,
        _aten.scatter_add,
        _aten.scatter_add_,
    }
)


class BatchIndexTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that records every tensor computed from a numbering of `num_tokens` tokens."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._num_tokens = num_tokens
        # Stands for the positions in the sequences, minus the indexes in the batch.
        self.offsets = torch.empty(num_tokens, dtype=torch.int64, device="meta")
        self._numberings: dict[int, Tensor] = {}
        # Traced tensors are kept alive, so that their ids are not reused.
        self._traced: dict[int, Tensor] = {}

    def is_traced(self, tensor: Tensor) -> bool:
        return id(tensor) in self._traced

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        is_copy = func is _aten.detach.default and id(args[0]) in self._numberings
        if func in _NUMBERINGS or is_copy:
            is_traced = result.shape == (self._num_tokens,)
            self._numberings |= {id(result): result} if is_traced else {}
        elif func is _aten.add.Tensor and id(args[0]) in self._numberings and args[1] is self.offsets:
            is_traced = False
        elif func.overloadpacket in _SELECTIONS:
            is_traced = self.is_traced(args[0]) or (
                len(args) > 3 and any(map(self.is_traced, _tensors(args[3])))
            )
        else:
            is_traced = any(map(self.is_traced, _tensors((args, kwargs or {}))))
        if is_traced:
            self._traced |= {id(tensor): tensor for tensor in _tensors(result)}
        return result


class TokenCounter:
    """Takes the place of a cache in an attention module that adds the number of tokens in it to indexes in the batch.

    offsets: int64 [T], the positions of the step's tokens minus their indexes.
    """

    def __init__(self, offsets: Tensor) -> None:
        self._offsets = offsets

    def get_seq_length(self, _: int = 0) -> Tensor:
        return self._offsets

    def update(self, key: Tensor, value: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        return key, value


def install_counter(module: nn.Module, find: Callable[[], TokenCounter | None]) -> RemovableHandle:
    """Gives a counter to each call of the module for which `find` returns one, until the handle is removed."""

    def give(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        counter = find()
        return None if counter is None else (args, {**options, "cache": counter})

    return module.register_forward_pre_hook(give, with_kwargs=True)


class ReadTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that records which of some tensors the arithmetic reads."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watched = list(tensors)
        self.are_read = [False] * len(self._watched)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        read = list(_tensors((args, kwargs or {})))
        for index, watched in enumerate(self._watched):
            self.are_read[index] |= any(tensor is watched for tensor in read)
        return func(*args, **(kwargs or {}))


def _tensors(value: object) -> Iterator[Tensor]:
    """All tensors in nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


# The field of a config with the tokens of a chunk, if layers have chunked attention.
CHUNK_FIELD = "attention_chunk_size"
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
