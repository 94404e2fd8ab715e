from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slora.core.errors import ConfigError
from slora.models.weights.checkpoint import fingerprint
from tests.support.tiny_models import make_model

TENSORS = {"a": torch.arange(5000.0).view(50, 100), "b": torch.ones(4), "empty": torch.zeros(0, 3)}


def written(directory: Path, tensors: dict[str, torch.Tensor]) -> str:
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    return fingerprint(directory)


def test_equal_weights_have_one_fingerprint_however_they_are_cut_into_files(tmp_path: Path) -> None:
    model = make_model("llama")
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    (tmp_path / "shards" / "config.json").unlink()
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    assert fingerprint(tmp_path / "whole") == fingerprint(tmp_path / "shards")


def test_other_weights_names_shapes_and_dtypes_have_other_fingerprints(tmp_path: Path) -> None:
    found = [
        written(tmp_path / "same", TENSORS),
        written(tmp_path / "renamed", {"A" if name == "a" else name: t for name, t in TENSORS.items()}),
        written(tmp_path / "reshaped", TENSORS | {"a": TENSORS["a"].view(100, 50)}),
        written(tmp_path / "last number", TENSORS | {"b": torch.tensor([1.0, 1.0, 1.0, 2.0])}),
        written(tmp_path / "bfloat16", TENSORS | {"b": TENSORS["b"].bfloat16()}),
        written(tmp_path / "less", {"a": TENSORS["a"], "b": TENSORS["b"]}),
        # Merging an adapter of rank 1 changes every number a little, here by one bit of the last place.
        written(tmp_path / "moved", TENSORS | {"a": TENSORS["a"] * (1 + 2**-23)}),
    ]
    assert len(set(found)) == len(found)


def test_the_fingerprint_is_stable_across_releases(tmp_path: Path) -> None:
    expected = "9bb6c9641dbc1d6751b3c619ef0a7a696ed5217029912f9493fb34c6992a9019"
    assert written(tmp_path / "fixed", {"x": torch.arange(600, dtype=torch.int16)}) == expected


def test_a_directory_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no model.safetensors"):
        fingerprint(tmp_path)
