"""Finds a checkpoint's tensors in its safetensors files, sharded or not. Reads only headers and unpickles nothing."""

import json
from collections.abc import Iterator
from pathlib import Path

from slora.core.errors import ConfigError
from slora.weights.safetensors_file import StoredTensor, read_header

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class Checkpoint:
    """The tensors of a model directory by name. Raises ConfigError for a missing or damaged file or tensor."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tensors: dict[str, StoredTensor] = {}
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

    def find(self, name: str, shape: tuple[int, ...] | None = None) -> StoredTensor:
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


def _locate_tensors(directory: Path) -> Iterator[StoredTensor]:
    index = directory / _INDEX
    files = [directory / _SINGLE] if not index.exists() else _shards(index)
    for path in files:
        if not path.is_file():
            raise ConfigError(f"{directory} has no {path.name}; only safetensors checkpoints are served")
        yield from read_header(path)


def _shards(index: Path) -> list[Path]:
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        outside = [name for name in names if Path(name).name != name]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{index} has no readable weight_map: {error}") from error
    if outside:
        raise ConfigError(f"{index}: {outside[0]!r} points outside the model directory")
    return sorted(index.parent / name for name in names)
