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
from slora_adapters.peft.file_mapping import map_file
from slora_adapters.peft.module_names import parse_copy_name
from slora_adapters.peft.number_format import convert
from slora_adapters.peft.tensor_file import StoredTensor, read_shaped
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
    if tensor.shape != (shape.vocab_size, shape.hidden_size):
        return (
            f"has shape {list(tensor.shape)}, the base model's is {[shape.vocab_size, shape.hidden_size]}; "
            "adapters with resized embeddings are not served"
        )
    try:
        own = _read_base(base_directory, path, shape)
    except (OSError, ValueError, KeyError) as error:
        return f"cannot be compared with the base model's: {error}"
    if not _equal(tensor, own):
        return (
            "differs from the base model's: the adapter was trained with another embedding matrix, which would have to "
            "be served in place of the base's, or it belongs to another base"
        )
    return None


def _read_base(directory: Path, path: str, shape: ModelShape) -> StoredTensor:
    """The matrix of the embedding or the head. Raises ValueError if the checkpoint does not hold it."""
    found: dict[str, StoredTensor] = {}
    for file in _list_files(directory):
        found |= read_shaped(map_file(file), (shape.vocab_size, shape.hidden_size))
    embedding, head = _pick(found, shape.embedding_path), _pick(found, shape.head_path)
    if path == shape.head_path:
        # Some heads are saved under a name of old; one that is not there at all is tied to the embedding.
        others = [matrix for matrix in found.values() if matrix is not embedding]
        own = head or (others[0] if len(others) == 1 else embedding)
    else:
        own = embedding
    if own is None:
        raise ValueError(f"{directory} has no tensor {path}.weight {[shape.vocab_size, shape.hidden_size]}")
    return own


def _pick(found: Mapping[str, StoredTensor], path: str) -> StoredTensor | None:
    """Some checkpoints, GPT-2's among them, begin names behind the first dot: what a class without a head saves."""
    return found.get(f"{path}.weight") or found.get(f"{path.partition('.')[2]}.weight")


def _list_files(directory: Path) -> Iterable[Path]:
    index = directory / _INDEX
    if not index.is_file():
        return [directory / _SINGLE]
    shards = set(json.loads(index.read_text())["weight_map"].values())
    return [directory / Path(shard).name for shard in sorted(shards)]


def _equal(tensor: StoredTensor, own: StoredTensor) -> bool:
    for start in range(0, own.shape[0], _ROWS):
        expected = convert(own.values[start : start + _ROWS], own.dtype, _SERVED[tensor.dtype])
        if not np.array_equal(tensor.values[start : start + _ROWS], expected):
            return False
    return True
