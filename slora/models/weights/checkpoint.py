"""A checkpoint's files: where each tensor is, and the fingerprint of all tensors.

They are safetensors files, or one GGUF file, see `slora.models.weights.gguf_tensors`. A safetensors file begins with 8
bytes, the little-endian length of the header. The header follows, and then the tensors' bytes without gaps. The
safetensors library reads and checks headers. Tensors are not read through it, because it maps the file into memory: a
caller reads a tensor's bytes from its offset directly into their final memory.

This module does not import torch.
"""

import hashlib
import json
import math
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from slora.core.errors import ConfigError
from slora.models.weights.gguf_file import read_gguf
from slora.models.weights.gguf_tensors import locate_gguf_tensors
from slora.models.weights.tensor_place import ELEMENT_BYTES, TensorPlace
from slora_adapters.peft.hub_reference import GGUF_LINK


def read_header(path: Path) -> list[TensorPlace]:
    """Reads the tensors of a file, in the order of their bytes. Raises ConfigError if the file is damaged."""
    try:
        with path.open("rb") as raw, safe_open(path, "np") as file:
            position = 8 + int.from_bytes(raw.read(8), "little")
            tensors = []
            for name in file.offset_keys():
                header = file.get_slice(name)
                tensor = TensorPlace(name, path, header.get_dtype(), tuple(header.get_shape()), position)
                if tensor.dtype not in ELEMENT_BYTES:
                    raise ConfigError(
                        f"{path}: {name} has dtype {tensor.dtype!r}; supported are {', '.join(ELEMENT_BYTES)}"
                    )
                tensors.append(tensor)
                position += tensor.num_bytes
            return tensors
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise ConfigError(f"{path} is damaged: {error}") from error


INDEX_NAME = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class Checkpoint:
    """The tensors of a model directory by name. Raises ConfigError for a missing or damaged file or tensor."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tensors: dict[str, TensorPlace] = {}
        for tensor in _locate_tensors(directory):
            other = self._tensors.setdefault(tensor.name, tensor)
            if other is not tensor:
                raise ConfigError(f"{other.path} and {tensor.path} both hold {tensor.name}")

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    @property
    def directory(self) -> Path:
        return self._directory

    @property
    def gguf_types(self) -> list[str]:
        """The quantized types of a GGUF file. Empty for safetensors files."""
        if not (self._directory / GGUF_LINK).exists():
            return []
        return sorted({tensor.dtype for tensor in self._tensors.values()} - _DTYPES.keys())

    def find(self, name: str, shape: tuple[int, ...] | None = None) -> TensorPlace:
        """Locates the tensor `name`.

        Raises ConfigError if it is missing, or if its shape differs from a given `shape`.
        """
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ConfigError(f"{self._directory} has no tensor {name!r}, which its config.json requires")
        if shape is not None and tensor.shape != shape:
            raise ConfigError(
                f"{tensor.path}: {name} has shape {list(tensor.shape)}; config.json requires {list(shape)}"
            )
        return tensor


def _locate_tensors(directory: Path) -> Iterator[TensorPlace]:
    if (directory / GGUF_LINK).exists():
        yield from locate_gguf_tensors(read_gguf(directory / GGUF_LINK))
        return
    for name in name_weight_files(directory):
        path = directory / name
        if not path.is_file():
            raise ConfigError(f"{directory} has no {name}; only safetensors checkpoints are served")
        yield from read_header(path)


def name_weight_files(directory: Path) -> list[str]:
    """Returns the names of the files that the index of a checkpoint lists, or that of the only file."""
    index = directory / INDEX_NAME
    if not index.exists():
        return [_SINGLE]
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        outside = [name for name in names if Path(name).name != name]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{index} has no readable weight_map: {error}") from error
    if outside:
        raise ConfigError(f"{index}: {outside[0]!r} points outside the model directory")
    return sorted(names)


_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def find_stored_dtype(directory: Path) -> str | None:
    """Returns the dtype of most unquantized numbers of a checkpoint, or None if its weights are not here (yet).

    It is that of a checkpoint whose config.json names none, such as those of gpt-oss. Raises ConfigError for a damaged
    file.
    """
    counts: dict[str, int] = defaultdict(int)
    for name in name_weight_files(directory):
        if (directory / name).is_file():
            for tensor in read_header(directory / name):
                if tensor.dtype in _DTYPES:
                    counts[_DTYPES[tensor.dtype]] += math.prod(tensor.shape)
    return max(counts, key=lambda dtype: counts[dtype], default=None)


_VERSION = 1
# From each tensor, 16 pieces of 64 bytes are read, evenly spread. Training changes nearly every number of a tensor, and
# 1 KiB of bfloat16 contains some 500 numbers. An 8B model needs 5000 small reads.
_NUM_PIECES = 16
_PIECE_BYTES = 64


def fingerprint(directory: Path) -> str:
    """64 lower-case hexadecimal digits: SHA-256 over every tensor's name, dtype, shape and sampled bytes.

    Raises ConfigError if there is no checkpoint. A change of a few single numbers may go undetected.
    """
    checkpoint = Checkpoint(directory)
    by_file: dict[Path, list[TensorPlace]] = defaultdict(list)
    for name in checkpoint:
        tensor = checkpoint.find(name)
        by_file[tensor.path].append(tensor)
    lines: dict[str, bytes] = {}
    for path, tensors in by_file.items():
        with path.open("rb") as file:
            lines |= {tensor.name: _line(tensor, file.fileno()) for tensor in tensors}
    sha = hashlib.sha256(json.dumps({"slora_base_fingerprint": _VERSION}).encode())
    for name in sorted(lines):
        sha.update(lines[name])
    return sha.hexdigest()


def _line(tensor: TensorPlace, file: int) -> bytes:
    """The line that is hashed for one tensor. It contains a digest of the sampled bytes instead of the bytes."""
    size = tensor.num_bytes
    last = max(0, size - _PIECE_BYTES)
    # Worked example: of 2048 bytes the pieces begin at 0, 132, 264, ..., 1984.
    starts = sorted({last * piece // (_NUM_PIECES - 1) for piece in range(_NUM_PIECES)})
    content = b"".join(os.pread(file, min(_PIECE_BYTES, size), tensor.offset + start) for start in starts)
    digest = hashlib.sha256(content).hexdigest()
    return json.dumps([tensor.name, tensor.dtype, list(tensor.shape), digest]).encode() + b"\n"
