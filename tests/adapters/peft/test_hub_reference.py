"""Adapters from the Hugging Face hub, through its real client. The snapshot cache and the server are test doubles."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from slora_adapters.errors import AdapterNotFound, StoreUnavailable
from slora_adapters.peft.hub import download
from slora_adapters.peft.hub_reference import HubReference
from tests.support.hub import COMMIT, Hub, hub_client, lay_out_snapshot, running_hub

REPO = "org/my-adapter"
FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights" * 1000}
OTHERS = {"README.md": b"# hello", "adapter_model.bin": b"pickle", "optimizer.pt": b"pickle"}


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    """The client's snapshot cache. The client is offline."""
    with hub_client(tmp_path / "hub"):
        yield tmp_path / "hub"


@pytest.fixture
def hub(cache: Path) -> Iterator[Hub]:
    """A hub server that the client can reach."""
    with running_hub() as hub, hub_client(cache, hub.url):
        hub.revisions[REPO, "main"] = COMMIT
        hub.files[REPO, COMMIT] = {**FILES, **OTHERS}
        yield hub


def parse(text: str) -> HubReference:
    reference = HubReference.parse(text)
    assert reference is not None
    return reference


@pytest.mark.parametrize(
    ("text", "reference", "name"),
    [
        ("hf://org/repo", HubReference("org/repo"), "repo"),
        ("hf://Org-1/my_repo.v2@v1.0", HubReference("Org-1/my_repo.v2", "v1.0"), "my_repo.v2"),
        ("hf://org/repo@refs%2Fpr%2F1", HubReference("org/repo", "refs/pr/1"), "repo"),
        (f"hf://org/repo@{COMMIT}/a/b-1", HubReference("org/repo", COMMIT, "a/b-1"), "b-1"),
        ("hf://org/repo/last/checkpoint", HubReference("org/repo", None, "last/checkpoint"), "checkpoint"),
    ],
)
def test_a_reference_names_a_repository_a_revision_and_a_folder(
    text: str, reference: HubReference, name: str
) -> None:
    assert parse(text) == reference
    assert (str(reference), reference.name) == (text, name)


@pytest.mark.parametrize(
    "text",
    [
        "hf://", "hf://repo", "hf://org/", "hf://org/repo@", "hf://org/repo@a b", "hf://../repo", "hf://org/..",
        "hf://org/repo/../x", "hf://org/repo/a//b", "hf://org/repo@..%2F..%2Fx", "hf://org/repo@%2Fetc", "hf://org/re*",
        "hf://user:pw@org/repo", "hf://org/repo@a..b", "hf://org/repo\n", "hf://org/repo@x@y",
    ],
)  # fmt: skip
def test_a_malformed_reference_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape("hf://ORG/REPO[@REVISION][/FOLDER]")):
        HubReference.parse(text)


def test_a_path_is_not_parsed_as_a_reference() -> None:
    assert [HubReference.parse(text) for text in ("a/b", "/hf://a/b", "hf:/org/repo", "")] == [None] * 4


@pytest.mark.parametrize("revision", [None, "main", COMMIT, "refs/pr/1"])
def test_a_snapshot_on_this_machine_needs_no_network_and_names_its_commit(
    cache: Path, revision: str | None
) -> None:
    snapshot = lay_out_snapshot(cache, REPO, {**FILES, **OTHERS})
    lay_out_snapshot(cache, REPO, {}, ref="refs/pr/1")
    found = download(HubReference(REPO, revision))
    assert found.directory == snapshot
    assert str(found.reference) == f"hf://{REPO}@{COMMIT}"
    assert (found.directory / "adapter_model.safetensors").read_bytes() == FILES["adapter_model.safetensors"]


def test_a_folder_of_a_snapshot_is_an_adapter_too(cache: Path) -> None:
    snapshot = lay_out_snapshot(cache, REPO, {f"last/one/{name}": content for name, content in FILES.items()})
    found = download(parse(f"hf://{REPO}/last/one"))
    assert found.directory == snapshot / "last" / "one"
    assert str(found.reference) == f"hf://{REPO}@{COMMIT}/last/one"
    with pytest.raises(AdapterNotFound, match=r"has no adapter_config.json and no adapter_model"):
        download(parse(f"hf://{REPO}"))


def test_a_repository_with_only_a_pickle_is_refused(cache: Path) -> None:
    lay_out_snapshot(cache, REPO, {"adapter_config.json": b"{}", **OTHERS})
    with pytest.raises(AdapterNotFound, match=rf"hf://{REPO}@{COMMIT} has no adapter_model.safetensors"):
        download(parse(f"hf://{REPO}"))


def test_a_repository_missing_in_the_cache_is_unavailable_without_a_network(cache: Path) -> None:
    lay_out_snapshot(cache, REPO, FILES)
    for text in ("hf://org/other", f"hf://{REPO}@v2", f"hf://{REPO}@{COMMIT[::-1]}"):
        with pytest.raises(StoreUnavailable, match=f"cannot be reached.*{text}: .*offline mode"):
            download(parse(text))


def test_a_download_fetches_only_the_files_of_an_adapter(hub: Hub, cache: Path) -> None:
    found = download(parse(f"hf://{REPO}"))
    assert {path.name: path.read_bytes() for path in found.directory.iterdir()} == FILES
    assert found.reference.revision == COMMIT
    assert not any(name in path for name in OTHERS for path in hub.asked)


def test_a_moved_branch_is_downloaded_again_and_a_known_commit_is_not(hub: Hub) -> None:
    first = download(parse(f"hf://{REPO}"))
    hub.revisions[REPO, "main"] = later = COMMIT[::-1]
    hub.files[REPO, later] = {**FILES, "adapter_config.json": b'{"r": 8}'}
    second = download(parse(f"hf://{REPO}"))
    assert second.reference.revision == later
    assert (second.directory / "adapter_config.json").read_bytes() == b'{"r": 8}'
    hub.asked.clear()
    assert download(first.reference) == first and hub.asked == []


@pytest.mark.parametrize(
    ("failure", "error", "message"),
    [
        ((403, "GatedRepo"), AdapterNotFound, "is gated: request access .*HF_TOKEN"),
        ((404, "RepoNotFound"), AdapterNotFound, f"no repository {REPO}, or the repository is private.*HF_TOKEN"),
        ((401, ""), StoreUnavailable, "could not be downloaded from the hub: .*401 Unauthorized"),
        ((404, "RevisionNotFound"), AdapterNotFound, "no revision 'v2'"),
        ((400, ""), StoreUnavailable, "cannot be reached.*BadRequest"),
    ],
)  # fmt: skip
def test_a_refusal_of_the_hub_is_explained(
    hub: Hub, failure: tuple[int, str], error: type[Exception], message: str
) -> None:
    hub.failing[REPO] = failure
    with pytest.raises(error, match=message):
        download(parse(f"hf://{REPO}@v2"))


def test_a_hub_that_does_not_answer_is_unavailable(tmp_path: Path) -> None:
    with hub_client(tmp_path, "http://127.0.0.1:9"):
        with pytest.raises(StoreUnavailable, match=r"cannot be reached.*Connect"):
            download(parse(f"hf://{REPO}"))
        snapshot = lay_out_snapshot(tmp_path, REPO, FILES)
        assert download(parse(f"hf://{REPO}")).directory == snapshot
