import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slora.checkpoint import Checkpoint
from slora.errors import ConfigError
from tests.support.tiny_models import make_model, write_model

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4), "c": torch.zeros(2, dtype=torch.bfloat16)}


def write_shards(directory: Path, files: dict[str, list[str]], **index: object) -> None:
    """`files`: the tensors of each file. `index`: fields of the index file."""
    for file, names in files.items():
        save_file({name: TENSORS[name] for name in names}, directory / file)
    weight_map = {name: file for file, names in files.items() for name in names}
    text = json.dumps({"metadata": {}, "weight_map": weight_map, **index})
    (directory / "model.safetensors.index.json").write_text(text)


def test_tensors_come_from_a_single_file(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    for name, tensor in TENSORS.items():
        assert name in checkpoint
        assert torch.equal(checkpoint.tensor(name, tuple(tensor.shape)), tensor)
    assert "d" not in checkpoint


def test_tensors_come_from_the_shard_that_has_them(tmp_path: Path) -> None:
    write_shards(tmp_path, {"one.safetensors": ["a"], "two.safetensors": ["b", "c"]})
    checkpoint = Checkpoint(tmp_path)
    for name, tensor in TENSORS.items():
        assert torch.equal(checkpoint.tensor(name, tuple(tensor.shape)), tensor)


def test_shards_as_transformers_saves_them_hold_every_tensor(tmp_path: Path) -> None:
    model = make_model("llama")
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    checkpoint = Checkpoint(tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(checkpoint.tensor(name, tuple(tensor.shape)), tensor)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"has no tensor 'd', which its config\.json calls for"):
        Checkpoint(tmp_path).tensor("d", (1,))


def test_a_tensor_of_another_shape_is_refused_with_both(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"a has shape \[2, 3\]; config\.json calls for \[3, 2\]"):
        Checkpoint(tmp_path).tensor("a", (3, 2))


def test_a_tensor_of_whole_numbers_is_refused(tmp_path: Path) -> None:
    """Born from a bug: the integers of a quantized checkpoint were served as if they were weights."""
    save_file({"a": torch.ones(2, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"a is torch\.int8; only floating-point weights are served"):
        Checkpoint(tmp_path).tensor("a", (2,))


def test_a_directory_without_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(
        ConfigError, match=r"has no model\.safetensors; only safetensors checkpoints are served"
    ):
        Checkpoint(tmp_path)


def test_a_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path, {"one.safetensors": ["a"], "two.safetensors": ["b"]})
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has no two\.safetensors"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 30, -1])
def test_a_file_that_is_cut_short_is_refused_by_name(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ConfigError, match=r"model\.safetensors is damaged"):
        Checkpoint(tmp_path)


def test_a_pickle_under_a_safetensors_name_is_refused(tmp_path: Path) -> None:
    torch.save(TENSORS, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.safetensors is damaged"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/passwd", "sub/one.safetensors", "..", ".", ""]
)
def test_an_index_that_points_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    save_file({"a": TENSORS["a"]}, tmp_path / "outside.safetensors")
    write_shards(directory, {"one.safetensors": ["b"]}, weight_map={"a": name, "b": "one.safetensors"})
    with pytest.raises(ConfigError):
        Checkpoint(directory)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": ["b"]}}',
        "3",
    ],
)
def test_an_index_without_a_readable_weight_map_is_refused(tmp_path: Path, text: str) -> None:
    """Born from bugs: an index that was a list, or named a file by a number, raised TypeError."""
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ConfigError, match=r"index\.json has no readable weight_map"):
        Checkpoint(tmp_path)


def test_a_model_in_bfloat16_is_read_in_bfloat16(tmp_path: Path) -> None:
    model = write_model(tmp_path, "qwen2", dtype=torch.bfloat16)
    name = "model.layers.0.self_attn.q_proj.bias"
    tensor = Checkpoint(tmp_path).tensor(name, (64,))
    assert tensor.dtype == torch.bfloat16
    assert torch.equal(tensor, model.state_dict()[name])
