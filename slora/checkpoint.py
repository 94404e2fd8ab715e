"""Reads a checkpoint's tensors from safetensors files, sharded or not. Never unpickles anything."""

import json
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from slora.errors import ConfigError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class Checkpoint:
    """The tensors of a model directory by name. Raises ConfigError for whatever is missing or damaged."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[str, Path] = dict(_locate_tensors(directory))

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor `name`, mapped from its file; its shape must be `shape`."""
        path = self._files.get(name)
        if path is None:
            raise ConfigError(f"{self._directory} has no tensor {name!r}, which its config.json calls for")
        with safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        if not tensor.is_floating_point():
            raise ConfigError(f"{path}: {name} is {tensor.dtype}; only floating-point weights are served")
        if tuple(tensor.shape) != shape:
            raise ConfigError(
                f"{path}: {name} has shape {list(tensor.shape)}; config.json calls for {list(shape)}"
            )
        return tensor


def _locate_tensors(directory: Path) -> Iterator[tuple[str, Path]]:
    index = directory / _INDEX
    files = sorted({directory / _SINGLE}) if not index.exists() else _shards(index)
    for path in files:
        if not path.is_file():
            raise ConfigError(f"{directory} has no {path.name}; only safetensors checkpoints are served")
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                    yield name, path
        except SafetensorError as error:
            raise ConfigError(f"{path} is damaged: {error}") from error


def _shards(index: Path) -> list[Path]:
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
        outside = [name for name in names if Path(name).name != name]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{index} has no readable weight_map: {error}") from error
    if outside:
        raise ConfigError(f"{index}: {outside[0]!r} points outside the model directory")
    return sorted(index.parent / name for name in names)
