"""Copies of the base model's embedding or head inside an adapter: accepted if they are the base's own numbers.

PEFT saves both matrices beside an adapter that targets either (`save_embedding_layers="auto"`), trained or not. When
it loads the adapter, they take the place of the base's: where they differ, the adapter was trained on another base,
or with tokens added, and would need a matrix of its own. So they are compared with the checkpoint, in the dtype that
they were saved in, and then have served their purpose: they are neither part of the digest nor stored.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from slora_adapters.errors import Reason
from slora_adapters.file_mapping import map_file
from slora_adapters.module_names import parse_copy_name
from slora_adapters.number_format import convert
from slora_adapters.tensor_file import StoredTensor, read_first
from slora_kernels.layout import ModelShape

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# The names of the three formats as files have them, and as conversions take them.
_SERVED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Rows compared at a time, so that a conversion takes little memory and the first difference ends it.
_ROWS = 1024


def find_copies(tensors: Mapping[str, StoredTensor], shape: ModelShape) -> frozenset[str]:
    """The names of those tensors that are called like the base's embedding or head."""
    return frozenset(name for name in tensors if parse_copy_name(name, shape) is not None)


def refuse_other_matrices(
    copies: Iterable[StoredTensor], shape: ModelShape, base_directory: Path | None
) -> Iterable[Reason]:
    """A reason for each copy that is not the matrix in the base's checkpoint, or cannot be compared with it."""
    for tensor in copies:
        why = _compare(tensor, shape, base_directory)
        if why is not None:
            yield Reason("embeddings", f"tensor {tensor.name[:120]!r} {why}")


def _compare(tensor: StoredTensor, shape: ModelShape, base_directory: Path | None) -> str | None:
    path = parse_copy_name(tensor.name, shape)
    if path is None or base_directory is None:
        return "holds a whole matrix, which cannot be compared with the base model's here"
    try:
        own = _read_base(base_directory, path, shape)
    except (OSError, ValueError, KeyError) as error:
        return f"cannot be compared with the base model's: {error}"
    if tensor.shape != own.shape:
        return (
            f"has shape {list(tensor.shape)}, the base model's is {list(own.shape)}; "
            "adapters with resized embeddings are not served"
        )
    if not _equal(tensor, own):
        return (
            "differs from the base model's: the adapter was trained with another embedding matrix, which would have to "
            "be served in place of the base's, or it belongs to another base"
        )
    return None


def _read_base(directory: Path, path: str, shape: ModelShape) -> StoredTensor:
    """The matrix in the checkpoint; a head that is not there is tied to the embedding."""
    names = (f"{path}.weight", f"{shape.embedding_path}.weight")
    index = directory / _INDEX
    if index.is_file():
        shards = json.loads(index.read_text())["weight_map"]
        name = next((name for name in names if name in shards), names[0])
        return read_first(map_file(directory / Path(shards[name]).name), [name])
    return read_first(map_file(directory / _SINGLE), names)


def _equal(tensor: StoredTensor, own: StoredTensor) -> bool:
    for start in range(0, own.shape[0], _ROWS):
        expected = convert(own.values[start : start + _ROWS], own.dtype, _SERVED[tensor.dtype])
        if not np.array_equal(tensor.values[start : start + _ROWS], expected):
            return False
    return True
