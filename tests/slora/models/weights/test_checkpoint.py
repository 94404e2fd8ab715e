import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slora.core.errors import ConfigError
from slora.models.weights.checkpoint import Checkpoint, fingerprint
from slora.models.weights.weight_reader import WeightReader
from tests.support.tiny_models import make_model

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4), "c": torch.zeros(2, dtype=torch.bfloat16)}


def write_shards(directory: Path, files: dict[str, list[str]], **index: object) -> None:
    """files: the tensors of each file. index: fields of the index file."""
    for file, names in files.items():
        save_file({name: TENSORS[name] for name in names}, directory / file)
    weight_map = {name: file for file, names in files.items() for name in names}
    text = json.dumps({"metadata": {}, "weight_map": weight_map, **index})
    (directory / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def read(directory: Path, expected: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All tensors in float32. Their shapes must equal those of `expected`."""
    reader = WeightReader(Checkpoint(directory), torch.float32, torch.device("cpu"))
    tensors = {}
    for name, tensor in expected.items():
        shape = tuple(tensor.shape)
        tensors[name] = reader.matrix(name, *shape) if len(shape) == 2 else reader.vector(name, *shape)
    reader.read()
    return tensors


def check_all_there(directory: Path, expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in read(directory, expected).items():
        assert torch.equal(tensor, expected[name].float()), name


def test_tensors_come_from_a_single_file(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    check_all_there(tmp_path, TENSORS)
    assert "a" in Checkpoint(tmp_path) and "d" not in Checkpoint(tmp_path)


def test_shards_as_transformers_saves_them_hold_every_tensor(tmp_path: Path) -> None:
    model = make_model("llama")
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    check_all_there(tmp_path, model.state_dict())


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("d", (1,), r"has no tensor 'd', which its config\.json requires"),
        ("a", (3, 2), r"a has shape \[2, 3\]; config\.json requires \[3, 2\]"),
    ],
)
def test_a_tensor_that_is_missing_or_has_another_shape_is_named(
    tmp_path: Path, name: str, shape: tuple[int, ...], message: str
) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        Checkpoint(tmp_path).find(name, shape)


def test_a_tensor_of_whole_numbers_is_refused(tmp_path: Path) -> None:
    """Born from a bug: the integers of a quantized checkpoint were served as if they were weights."""
    save_file({"a": torch.ones(2, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"a is I8; only floating-point weights"):
        read(tmp_path, {"a": torch.ones(2)})


def test_a_directory_without_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(
        ConfigError, match=r"has no model\.safetensors; only safetensors checkpoints are served"
    ):
        fingerprint(tmp_path)


def test_a_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path, {"one.safetensors": ["a"], "two.safetensors": ["b"]})
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has no two\.safetensors"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 30, -1, "pickle"])
def test_a_file_that_is_cut_short_or_a_pickle_is_refused_by_name(tmp_path: Path, keep: int | str) -> None:
    path = tmp_path / "model.safetensors"
    if isinstance(keep, str):
        torch.save(TENSORS, path)
    else:
        save_file(TENSORS, path)
        path.write_bytes(path.read_bytes()[:keep])
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
    ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": ["b"]}}'],
)
def test_an_index_without_a_readable_weight_map_is_refused(tmp_path: Path, text: str) -> None:
    """Born from bugs: an index that was a list, or that named a file by a number, raised TypeError."""
    (tmp_path / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"index\.json has no readable weight_map"):
        Checkpoint(tmp_path)


def test_a_tensor_that_two_shards_hold_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path, {"one.safetensors": ["a", "b"], "two.safetensors": ["b", "c"]})
    with pytest.raises(ConfigError, match=r"one\.safetensors and .*two\.safetensors both hold b"):
        Checkpoint(tmp_path)


def write_raw(path: Path, header: str, body: int) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(body))


ENTRY = '{"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}'


@pytest.mark.parametrize(
    ("header", "body"),
    [
        ('{"a": ' + ENTRY + "}", 12),
        ('{"a": ' + ENTRY.replace("0, 8", "4, 12") + "}", 12),
        ('{"a": ' + ENTRY + ', "b": ' + ENTRY + "}", 8),
        ('{"a": ' + ENTRY.replace("[2]", "[3]") + "}", 8),
        ('{"a": ' + ENTRY.replace("[2]", "[-2]") + "}", 8),
        ('{"a": ' + ENTRY.replace("[0, 8]", "8") + "}", 8),
        ('{"a": [1, 2]}', 8),
        ('["a"]', 8),
    ],
)
def test_a_header_that_does_not_describe_its_file_is_refused(tmp_path: Path, header: str, body: int) -> None:
    write_raw(tmp_path / "model.safetensors", header, body)
    with pytest.raises(ConfigError, match=r"model\.safetensors is damaged: "):
        Checkpoint(tmp_path)


def test_metadata_and_scalars_are_accepted(tmp_path: Path) -> None:
    save_file({"a": torch.tensor(3.0)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert Checkpoint(tmp_path).find("a").shape == ()


WEIGHTS = {"a": torch.arange(5000.0).view(50, 100), "b": torch.ones(4), "empty": torch.zeros(0, 3)}


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
        written(tmp_path / "same", WEIGHTS),
        written(tmp_path / "renamed", {"A" if name == "a" else name: t for name, t in WEIGHTS.items()}),
        written(tmp_path / "reshaped", WEIGHTS | {"a": WEIGHTS["a"].view(100, 50)}),
        written(tmp_path / "last number", WEIGHTS | {"b": torch.tensor([1.0, 1.0, 1.0, 2.0])}),
        written(tmp_path / "bfloat16", WEIGHTS | {"b": WEIGHTS["b"].bfloat16()}),
        written(tmp_path / "less", {"a": WEIGHTS["a"], "b": WEIGHTS["b"]}),
        # Merging an adapter of rank 1 changes every number a little, here by one bit of the last place.
        written(tmp_path / "moved", WEIGHTS | {"a": WEIGHTS["a"] * (1 + 2**-23)}),
    ]
    assert len(set(found)) == len(found)


def test_the_fingerprint_is_stable_across_releases(tmp_path: Path) -> None:
    expected = "9bb6c9641dbc1d6751b3c619ef0a7a696ed5217029912f9493fb34c6992a9019"
    assert written(tmp_path / "fixed", {"x": torch.arange(600, dtype=torch.int16)}) == expected
