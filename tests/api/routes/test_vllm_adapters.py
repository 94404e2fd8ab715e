"""vLLM's two routes for adapters. They reach only paths below the directory that the operator configured."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from slora.core.errors import ConfigError
from slora_api.adapters.quarantine import LocalAdapters, Quarantine
from tests.adapters.hand_made import make_members, make_tensors, write_directory
from tests.api.platform import ADMIN_KEY, Platform, post, running_platform
from tests.api.scripted_engine import ScriptedEngine, deltas_of, trial_of


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "allowed"
    for seed, name in enumerate(("voice", "newer")):
        write_directory(root / name, make_members(tensors=make_tensors(seed=seed)))
    write_directory(tmp_path / "outside", make_members())
    (tmp_path / "data").mkdir()
    return root


@pytest.fixture
def platform(tmp_path: Path, root: Path) -> Iterator[Platform]:
    engine = ScriptedEngine([deltas_of(b"ok")])
    with running_platform(tmp_path / "data", engine, lora_root=str(root)) as running:
        yield running


def send(platform: Platform, what: str, key: str = ADMIN_KEY, **body: Any) -> httpx.Response:
    return post(platform, key, f"/v1/{what}_lora_adapter", body)


def test_a_loaded_adapter_answers_and_loading_over_it_adds_a_version(platform: Platform, root: Path) -> None:
    key = platform.key("only")

    def served() -> str | None:
        answer = post(platform, key, "/v1/completions", {"model": "voice", "prompt": "x"})
        return answer.headers.get("x-slora-adapter")

    loaded = send(platform, "load", lora_name="voice", lora_path=str(root / "voice"))
    said = "Success: the adapter voice@1 of tenant only was loaded successfully."
    assert (loaded.status_code, loaded.text) == (200, said)
    assert served() == "voice@1"
    for fields in ({}, {"load_inplace": False}):
        taken = send(platform, "load", lora_name="voice", lora_path="newer", **fields)
        assert (taken.status_code, taken.json()["error"]["param"]) == (400, "lora_name")
        assert "has already been loaded" in taken.text and served() == "voice@1"
    again = send(platform, "load", lora_name="voice", lora_path="newer", load_inplace=True)
    assert again.status_code == 200 and served() == "voice@2"
    assert send(platform, "unload", lora_name="voice", lora_int_id=7).status_code == 200 and served() is None
    assert send(platform, "unload", lora_name="voice").status_code == 404
    assert send(platform, "load", lora_name="voice", lora_path="voice").status_code == 200
    assert not any((platform.directory / "quarantine").iterdir())


def test_many_loads_at_once_wait_for_their_turn(platform: Platform) -> None:
    """A tenant may have two uploads in progress."""
    platform.key("only")
    with ThreadPoolExecutor(6) as pool:
        names = [f"voice-{number}" for number in range(6)]
        answers = pool.map(lambda name: send(platform, "load", lora_name=name, lora_path="voice"), names)
        assert [answer.status_code for answer in answers] == [200] * 6


def test_loading_needs_the_admin_key_and_a_tenant_if_there_are_several(platform: Platform) -> None:
    key = platform.key("one")
    assert send(platform, "load", key, lora_name="voice", lora_path="voice").status_code == 403
    assert send(platform, "unload", key, lora_name="voice").status_code == 403
    platform.key("two")
    unsaid = send(platform, "load", lora_name="voice", lora_path="voice")
    assert (unsaid.status_code, unsaid.json()["error"]["param"]) == (400, "tenant")
    assert send(platform, "load", lora_name="voice", lora_path="voice", tenant="two").status_code == 200
    assert send(platform, "load", lora_name="voice", lora_path="voice", tenant="three").status_code == 404
    assert platform.api(key).get("/v1/adapters").json()["data"] == []
    assert send(platform, "unload", lora_name="voice", tenant="one").status_code == 404
    assert send(platform, "unload", lora_name="voice", tenant="two").status_code == 200


def test_no_path_leads_out_of_the_directory_that_the_operator_named(platform: Platform, root: Path) -> None:
    platform.key("only")
    outside = root.parent / "outside"
    (root / "link").symlink_to(outside)
    (root / "chain").symlink_to(root / "link")
    write_directory(root / "linked-file", make_members())
    (root / "linked-file" / "adapter_config.json").unlink()
    (root / "linked-file" / "adapter_config.json").symlink_to(outside / "adapter_config.json")
    write_directory(root.parent / "allowed-too", make_members())
    paths = ["../outside", str(outside), "link", "chain", "voice/../../outside", "linked-file", "../allowed-too",
             "/", "/etc/passwd", "nowhere", "voice/adapter_config.json", "a" * 5000, "voice\0"]  # fmt: skip
    for path in paths:
        answer = send(platform, "load", lora_name="voice", lora_path=path)
        assert answer.status_code == 404 and "`lora_path` is" in answer.text, path
    texts = {
        send(platform, "load", lora_name="voice", lora_path=path).text.replace(path, "") for path in paths[:9]
    }
    assert len(texts) == 1, "it tells what is there from what is not"
    (root / "inner").symlink_to(root / "voice")
    assert send(platform, "load", lora_name="voice", lora_path="inner").status_code == 200
    assert not any((platform.directory / "quarantine").iterdir())


def test_a_pipe_among_the_files_is_refused_without_blocking(platform: Platform, root: Path) -> None:
    platform.key("only")
    (root / "voice" / "adapter_config.json").unlink()
    os.mkfifo(root / "voice" / "adapter_config.json")
    assert send(platform, "load", lora_name="voice", lora_path="voice").status_code == 404


def test_a_file_beyond_the_limit_of_uploads_is_not_copied_whole(tmp_path: Path, root: Path) -> None:
    size = (root / "voice" / "adapter_model.safetensors").stat().st_size
    for limit, status in ((size, 200), (size - 1, 400)):
        data = tmp_path / str(limit)
        data.mkdir()
        engine = ScriptedEngine([deltas_of(b"ok")])
        with running_platform(data, engine, lora_root=str(root), max_upload_bytes=limit) as platform:
            platform.key("only")
            answer = send(platform, "load", lora_name="voice", lora_path="voice")
            assert answer.status_code == status
            assert not any((data / "quarantine").iterdir())
    assert "max_upload_bytes" in answer.json()["error"]["message"]


def test_what_is_loaded_is_checked_like_an_upload(platform: Platform, root: Path) -> None:
    platform.key("only")
    (root / "voice" / "adapter_model.safetensors").write_bytes(b"\x80\x04pickle")
    refused = send(platform, "load", lora_name="voice", lora_path="voice")
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "adapter_invalid")
    assert send(platform, "load", lora_name="base", lora_path="newer").status_code == 400
    platform.engine.canary = lambda request: trial_of(request, -1.0)
    untrained = send(platform, "load", lora_name="voice", lora_path="newer")
    assert (untrained.status_code, untrained.json()["error"]["reasons"][0]["code"]) == (422, "no_effect")
    assert not any((platform.directory / "quarantine").iterdir())
    assert send(platform, "load", lora_name="voice", lora_path="newer", revision="x").status_code == 400


def test_without_a_root_loading_is_refused_and_a_missing_root_is_refused_at_start(
    tmp_path: Path, root: Path
) -> None:
    with running_platform(tmp_path / "data", ScriptedEngine()) as platform:
        platform.key("only")
        off = send(platform, "load", lora_name="voice", lora_path=str(root / "voice"))
    assert off.status_code == 403 and "--lora-root" in off.json()["error"]["message"]
    with pytest.raises(ConfigError, match="not a directory"):
        LocalAdapters(tmp_path / "missing", Quarantine(tmp_path / "quarantine"), 1)
