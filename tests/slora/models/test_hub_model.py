"""Base models from the Hugging Face hub, through its real client. The hub is a server on the loopback interface."""

import json
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path

import pytest

from slora.core.engine_config import EngineConfig
from slora.core.errors import ConfigError
from slora.models.model_spec import find_model
from slora_adapters.peft.hub_reference import HubReference
from tests.support.gguf_files import write_gguf
from tests.support.hub import COMMIT, Hub, adapter_files, hub_client, lay_out_snapshot, running_hub
from tests.support.tiny_models import write_model

REPO = "org/My-Model.v2"
# What a repository also has, and slora never reads.
OTHERS = {
    "README.md": b"# hello",
    "pytorch_model.bin": b"pickle",
    "modeling_mine.py": b"raise SystemExit",
    "consolidated.safetensors": b"the same weights again",
    "original/model.safetensors": b"and again",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    directory = tmp_path_factory.mktemp("model")
    write_model(directory, "llama")
    return adapter_files(directory)


@pytest.fixture
def hub(tmp_path: Path, files: dict[str, bytes]) -> Iterator[Hub]:
    with running_hub() as hub, hub_client(tmp_path / "hub", hub.url):
        hub.revisions[REPO, "main"] = COMMIT
        hub.files[REPO, COMMIT] = {**files, **OTHERS}
        yield hub


def fetched(hub: Hub) -> set[str]:
    """The files that were asked for, and not only listed."""
    return {path.split("/resolve/")[1].split("/", 1)[1] for path in hub.asked if "/resolve/" in path}


@pytest.mark.parametrize("name", [REPO, f"hf://{REPO}", f"{REPO}@main", f"hf://{REPO}@{COMMIT}"])
def test_a_model_is_downloaded_by_its_name_without_the_files_that_are_not_read(
    hub: Hub, files: dict[str, bytes], name: str
) -> None:
    told: list[str] = []
    directory = find_model(Path(name), tell=told.append)
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == files
    assert fetched(hub) == set(files)
    assert len(told) == 1 and f"hf://{REPO}@{COMMIT}" in told[0]
    assert str(HubReference.of_model(directory)) == f"hf://{REPO}@{COMMIT}"
    assert EngineConfig(directory).served_name == EngineConfig(Path(name)).served_name == REPO
    hub.asked.clear()
    assert find_model(Path(f"{REPO}@{COMMIT}"), tell=told.append) == directory
    assert not fetched(hub) and len(told) == 1


def test_the_weights_are_left_out_where_they_are_not_needed(hub: Hub, files: dict[str, bytes]) -> None:
    find_model(Path(REPO))
    assert fetched(hub) == set(files) - {"model.safetensors"}


def test_only_the_shards_of_the_index_are_downloaded(hub: Hub, files: dict[str, bytes]) -> None:
    shards = {f"model-0000{n}-of-00002.safetensors": b"%d" % n for n in (1, 2)}
    index = {"weight_map": {f"tensor {n}": name for n, name in enumerate(shards)}}
    kept = {**files, "model.safetensors.index.json": json.dumps(index).encode(), **shards}
    hub.files[REPO, COMMIT] = {**OTHERS, **kept}
    find_model(Path(REPO), tell=lambda _: None)
    assert fetched(hub) == set(kept) - {"model.safetensors"}


def test_a_shard_outside_of_the_repository_is_refused(hub: Hub) -> None:
    index = b'{"weight_map": {"a": "../../other/model.safetensors"}}'
    hub.files[REPO, COMMIT]["model.safetensors.index.json"] = index
    with pytest.raises(ConfigError, match="points outside"):
        find_model(Path(REPO), tell=lambda _: None)


def test_a_model_that_is_not_served_is_refused_before_its_weights_are_downloaded(
    hub: Hub, files: dict[str, bytes]
) -> None:
    config = json.loads(files["config.json"]) | {"architectures": ["LlamaForSequenceClassification"]}
    hub.files[REPO, COMMIT]["config.json"] = json.dumps(config).encode()
    with pytest.raises(ConfigError, match="head for classification"):
        find_model(Path(REPO), tell=lambda _: None)
    assert not any(name.endswith(".safetensors") for name in fetched(hub))


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ({"adapter_config.json": b"{}"}, f"is an adapter.*slora adapter push hf://{REPO}"),
        ({"model.gguf": b"GGUF"}, f"has no config.json.*name one of them, as in {REPO}/FILE.gguf"),
        (("config.json", "tokenizer.json"), "has no model.safetensors.*pickles"),
    ],
)
def test_a_repository_without_a_model_is_refused_with_the_reason(
    hub: Hub, files: dict[str, bytes], kept: dict[str, bytes] | tuple[str, ...], message: str
) -> None:
    own = kept if isinstance(kept, dict) else {name: files[name] for name in kept if name in files}
    hub.files[REPO, COMMIT] = {**OTHERS, **own}
    with pytest.raises(ConfigError, match=message):
        find_model(Path(REPO), tell=lambda _: None)


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ((403, "GatedRepo"), "is gated: request access .*HF_TOKEN"),
        ((404, "RepoNotFound"), f"no repository {REPO}.*no directory {REPO} either"),
        ((500, ""), "cannot be reached"),
    ],
)
def test_a_refusal_of_the_hub_is_explained(hub: Hub, failure: tuple[int, str], message: str) -> None:
    hub.failing[REPO] = failure
    with pytest.raises(ConfigError, match=message):
        find_model(Path(REPO), tell=lambda _: None)


def test_weights_that_do_not_fit_on_the_disk_are_not_downloaded(hub: Hub) -> None:
    hub.sizes[REPO, "model.safetensors"] = 1 << 60
    with pytest.raises(ConfigError, match=r"have .*, but the disk of .*HF_HOME"):
        find_model(Path(REPO), tell=lambda _: None)


def test_a_model_of_the_cache_needs_no_network(files: dict[str, bytes], tmp_path: Path) -> None:
    with hub_client(tmp_path / "hub"):
        snapshot = lay_out_snapshot(tmp_path / "hub", REPO, files)
        assert find_model(Path(REPO), tell=lambda _: None) == snapshot


@pytest.mark.parametrize("name", ["tiny.gguf", "Q4_K_M/tiny.gguf"])
def test_a_gguf_file_is_downloaded_by_its_name(
    hub: Hub, tmp_path: Path, set_variables: Callable[..., None], name: str
) -> None:
    set_variables(XDG_CACHE_HOME=str(tmp_path / "own"))
    write_gguf(tmp_path / "tiny.gguf", "llama", num_hidden_layers=1)
    hub.files[REPO, COMMIT] = {**OTHERS, name: (tmp_path / "tiny.gguf").read_bytes(), "other.gguf": b"GGUF"}
    told: list[str] = []
    model = Path(f"hf://{REPO}@main/{name}")
    directory = find_model(model, tell=told.append)
    assert fetched(hub) == {name} and len(told) == 1
    assert str(HubReference.of_model(directory)) == f"hf://{REPO}@{COMMIT}/{name}"
    assert EngineConfig(directory).served_name == EngineConfig(model).served_name == REPO
    assert find_model(Path(f"{REPO}/{name}")) == directory and len(told) == 1
    with pytest.raises(ConfigError, match=f"hf://{REPO} has no file missing.gguf"):
        find_model(Path(f"{REPO}/missing.gguf"))


def test_a_directory_is_never_looked_up_on_the_hub(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / REPO).mkdir(parents=True)
    with chdir(tmp_path):
        for model in (Path(REPO), tmp_path / "missing", Path("missing"), Path("a/b/c"), Path("../org/name")):
            assert find_model(model) == model
    assert hub.asked == []
