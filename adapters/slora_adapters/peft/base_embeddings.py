"""Checks copies of the base model's embedding or head inside an adapter. Only exact copies are accepted.

PEFT saves both modules with an adapter that targets either of them (`save_embedding_layers="auto"`), trained or not. A
head such as Phi's or CTRL's has a bias, which is saved too. When PEFT loads the adapter, the copies replace the base
model's parameters. A copy that differs means that the adapter was trained on another base model or with added tokens.
Such an adapter would need its own embedding matrix, which is not supported.

Each copy is compared with the checkpoint in the dtype that is served, in which PEFT would use it. An accepted copy is
neither part of the digest nor stored.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from slora_adapters.errors import Reason
from slora_adapters.peft.module_names import list_spellings, parse_copy_name
from slora_adapters.peft.number_format import convert
from slora_adapters.peft.tensor_file import StoredTensor, map_file, read_shaped
from slora_kernels.layout import ModelShape

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# Safetensors dtype name -> the name that `convert` expects.
_SERVED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_STORED = {served: stored for stored, served in _SERVED.items()}
# Rows compared at a time, so that a conversion needs little memory and stops at the first difference.
_ROWS = 1024


def find_copies(tensors: Mapping[str, StoredTensor], shape: ModelShape) -> frozenset[str]:
    """Returns the names of the tensors that have the name of the base model's embedding or head."""
    return frozenset(name for name in tensors if parse_copy_name(name, shape) is not None)


def refuse_other_copies(
    copies: Iterable[StoredTensor], shape: ModelShape, base_directory: Path | None, served_dtype: str | None
) -> Iterable[Reason]:
    """Yields a reason to refuse the adapter for each copy of a base parameter that differs or cannot be compared.

    served_dtype: None stands for the dtype of the checkpoint.
    """
    for tensor in copies:
        why = _compare(tensor, shape, base_directory, served_dtype)
        if why is not None:
            code = "bias" if _is_bias(tensor.name) else "embeddings"
            yield Reason(code, f"tensor {tensor.name[:120]!r} {why}")


def _is_bias(name: str) -> bool:
    return name.endswith(".bias")


def _compare(
    tensor: StoredTensor, shape: ModelShape, base_directory: Path | None, served_dtype: str | None
) -> str | None:
    name = parse_copy_name(tensor.name, shape)
    if name is None or base_directory is None:
        return "holds a whole parameter, and the base model is not available here to compare it with"
    expected = (shape.vocab_size,) if _is_bias(name) else (shape.vocab_size, shape.hidden_size)
    if tensor.shape != expected:
        return (
            f"has shape {list(tensor.shape)}, but the base model's has {list(expected)}; adapters "
            "with resized embeddings are not served"
        )
    try:
        own = _read_base(base_directory, name, expected, shape)
    except (OSError, ValueError, KeyError) as error:
        return f"cannot be compared with the base model's: {error}"
    served = served_dtype or _SERVED[own.dtype]
    if _equal(tensor, own, served):
        return None
    for rounded in _SERVED.values():
        if _equal(tensor, own, served, rounded):
            return (
                f"is the base model's rounded to {rounded}, which PEFT would use in place of the base model's own in "
                f"{served}; save the adapter with save_pretrained(..., save_embedding_layers=False) to use the base "
                "model's own"
            )
    if _is_bias(name):
        return "differs from the base model's: a trained bias is not supported, or the adapter belongs to another base"
    return (
        "differs from the base model's: the adapter was trained with another embedding matrix, which "
        "this server cannot use instead of the base model's, or it belongs to another base"
    )


def _read_base(directory: Path, name: str, expected: tuple[int, ...], shape: ModelShape) -> StoredTensor:
    """Returns a parameter of the embedding or the head. Raises ValueError if the checkpoint does not have it."""
    found: dict[str, StoredTensor] = {}
    for file in _list_files(directory):
        found |= read_shaped(map_file(file), expected)
    own = _pick(found, name)
    if name == f"{shape.head_path}.weight":
        # Some checkpoints save the head under an older name. If the checkpoint has no head, the head is tied to the
        # embedding.
        embedding = _pick(found, f"{shape.embedding_path}.weight")
        others = [matrix for matrix in found.values() if matrix is not embedding]
        own = own or (others[0] if len(others) == 1 else embedding)
    if own is None:
        raise ValueError(f"{directory} has no tensor {name} {list(expected)}")
    return own


def _pick(found: Mapping[str, StoredTensor], name: str) -> StoredTensor | None:
    """Finds a tensor by one of its names, or by its name without the first part. Checkpoints saved from a class without
    a head, such as GPT-2's, lack that part.
    """
    names = [*list_spellings(name), name.partition(".")[2]]
    return next((found[spelling] for spelling in names if spelling in found), None)


def _list_files(directory: Path) -> Iterable[Path]:
    index = directory / _INDEX
    if not index.is_file():
        return [directory / _SINGLE]
    shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return [directory / Path(shard).name for shard in sorted(shards)]


def _equal(tensor: StoredTensor, own: StoredTensor, served: str, rounded: str | None = None) -> bool:
    """Returns whether the copy is the base's parameter in the dtype `served`. rounded: a dtype to which the parameter
    is rounded before it is compared.
    """
    for start in range(0, own.shape[0], _ROWS):
        expected, dtype = own.values[start : start + _ROWS], own.dtype
        if rounded is not None:
            expected, dtype = convert(expected, dtype, rounded), _STORED[rounded]
        copy = convert(tensor.values[start : start + _ROWS], tensor.dtype, served)
        if not np.array_equal(copy, convert(expected, dtype, served)):
            return False
    return True
