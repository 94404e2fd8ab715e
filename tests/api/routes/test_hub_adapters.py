"""Adapters that the operator uploads for a tenant, and adapters that the server downloads from the hub."""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import psutil
import pytest

from slora_api.keys.key_record import DEFAULT_SCOPES, Scope
from tests.adapters.hand_made import make_members, write_directory
from tests.api.command import run_slora
from tests.api.platform import ADMIN_KEY, Platform, post
from tests.api.scripted_engine import ScriptedEngine, deltas_of
from tests.api.served import ask_and_leave, wait_until
from tests.support.child_processes import find_children
from tests.support.hub import COMMIT, Hub, running_hub

REPO, TOKEN = "org/voice", "hf_the-operators-token"
SOURCE = f"hf://{REPO}"
OTHERS = {"adapter_model.bin": b"a pickle", "train.py": b"code", "optimizer.pt": b"a pickle"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    with running_hub() as hub:
        home = tmp_path_factory.mktemp("hf")
        with patch.dict(os.environ, HF_ENDPOINT=hub.url, HF_HOME=str(home), HF_TOKEN=TOKEN):
            yield hub


@pytest.fixture
def hub(server: Hub) -> Hub:
    server.released.set()
    vars(server).update(vars(Hub(server.url, {(REPO, COMMIT): {**make_members(), **OTHERS}})))
    server.revisions[REPO, "main"] = COMMIT
    return server


@pytest.fixture(scope="module")
def platform(start_platform: Callable[..., Platform]) -> Platform:
    engine = ScriptedEngine([deltas_of(b"ok")])
    return start_platform(engine, max_upload_bytes=1 << 20, min_body_bytes_per_s=1 << 10)


def make_key(platform: Platform, tenant: str = "acme") -> str:
    """A key that may name adapters of the hub."""
    platform.key(tenant)
    scopes = {*DEFAULT_SCOPES, Scope.ADAPTERS_HUB}
    return platform.services.keys.admin.create_key(platform.tenant_id(tenant), scopes=scopes)[1].secret


def send(
    platform: Platform, key: str, path: str = "/v1/adapters", *, source: str = SOURCE, name: str = "voice"
) -> httpx.Response:
    form: Any = {"name": (None, name), "source": (None, source)}
    return platform.api(key).post(path, files=form)


def test_an_operator_uploads_an_adapter_for_a_tenant_and_the_tenants_limits_apply(platform: Platform) -> None:
    key, path = platform.key("served"), "/admin/tenants/served/adapters"
    pushed = platform.upload(ADMIN_KEY, "voice", path=path)
    assert (pushed.status_code, pushed.json()["version"]) == (201, 1)
    assert platform.upload(ADMIN_KEY, "voice", path="/admin/tenants/nobody/adapters").status_code == 404
    assert platform.upload(ADMIN_KEY, "default", path=path).json()["error"]["param"] == "name"
    too_large = platform.upload(ADMIN_KEY, "big", {"adapter_model.safetensors": bytes(1 << 21)}, path=path)
    assert too_large.status_code == 413 and "max_upload_bytes" in too_large.text
    answer = post(platform, key, "/v1/completions", {"model": "voice", "prompt": "x"})
    assert answer.headers["x-slora-adapter"] == "voice@1"
    assert platform.upload(key, "voice", path=path).status_code == 403


def test_a_key_downloads_an_adapter_only_if_the_operator_permits_it(platform: Platform, hub: Hub) -> None:
    refused = send(platform, platform.key("acme"))
    assert (refused.status_code, hub.asked) == (403, [])
    assert "`adapters:hub`" in refused.json()["error"]["message"]
    key = make_key(platform)
    pushed = send(platform, key)
    assert pushed.status_code == 201, pushed.text
    assert pushed.json()["source"] == f"{SOURCE}@{COMMIT}"
    again = send(platform, key, source=f"{SOURCE}@{COMMIT}").json()
    assert (again["version"], again["new_version"]) == (1, False)
    # Neither pickles nor code were asked for, and the token of the environment was never sent.
    assert not any(name in path for name in OTHERS for path in hub.asked)
    assert hub.tokens == {None}
    assert not any((platform.directory / "quarantine").iterdir())


def test_the_token_of_a_file_reads_an_adapter_in_a_folder_of_a_private_repository(
    platform: Platform, hub: Hub, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("hf_of-the-file", encoding="utf-8")
    files = {f"runs/best/{name}": raw for name, raw in make_members().items()}
    hub.revisions[REPO, "v2"] = later = COMMIT[::-1]
    hub.files[REPO, later] = {**files, "adapter_config.json": b"{}"}
    key = make_key(platform, "private")
    with patch.dict(os.environ, HF_TOKEN_PATH=str(tmp_path / "token")):
        pushed = send(platform, key, source=f"{SOURCE}@v2/runs/best")
    assert (pushed.status_code, pushed.json()["source"]) == (201, f"{SOURCE}@{later}/runs/best")
    assert hub.tokens == {"Bearer hf_of-the-file"}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("hf://org/other", "no repository org/other, or the repository is private.*HF_TOKEN_PATH"),
        pytest.param(f"{SOURCE}@v9", "no revision 'v9'", marks=pytest.mark.soak),
        pytest.param(f"{SOURCE}/elsewhere", "no adapter_config.json", marks=pytest.mark.soak),
        ("org/voice", "hf://ORG/REPO"),
        ("https://huggingface.co/org/voice", "hf://ORG/REPO"),
        ("file:///etc/passwd", "hf://ORG/REPO"),
        ("hf://../..", "hf://ORG/REPO"),
        ("", "hf://ORG/REPO"),
    ],
)
def test_a_source_that_names_no_adapter_is_refused(
    platform: Platform, hub: Hub, source: str, message: str
) -> None:
    hub.failing["org/other"] = (404, "RepoNotFound")
    refused = send(platform, make_key(platform), source=source)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "source"), refused.text
    assert re.search(message, error["message"]), error["message"]


def test_a_source_replaces_the_files_and_a_wrong_name_costs_no_download(platform: Platform, hub: Hub) -> None:
    key = make_key(platform)
    both = platform.upload(key, "voice", source=SOURCE)
    assert (both.status_code, "not both" in both.text) == (400, True)
    assert send(platform, key, name="default").json()["error"]["param"] == "name"
    assert send(platform, key, name="two words").json()["error"]["code"] == "invalid_name"
    assert hub.asked == []


def test_an_adapter_over_the_limit_is_refused_before_it_is_downloaded(platform: Platform, hub: Hub) -> None:
    hub.files[REPO, COMMIT]["adapter_model.safetensors"] = bytes(2 << 20)
    refused = send(platform, make_key(platform))
    assert refused.status_code == 422
    (reason,) = refused.json()["error"]["reasons"]
    assert reason["code"] == "too_large" and "max_upload_bytes" in reason["message"]
    assert not any("/resolve/" in path for path in hub.asked[:-2]) or hub.tokens == {None}


def test_a_hub_that_fails_is_unavailable_and_its_words_stay_in_the_log(
    platform: Platform, hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    hub.failing[REPO] = (500, "")
    failed = send(platform, make_key(platform))
    assert (failed.status_code, failed.json()["error"]["code"]) == (503, "hub_unavailable")
    assert "127.0.0.1" not in failed.text
    assert [record for record in caplog.records if "hub" in record.getMessage()]


def test_a_download_ends_with_its_client(platform: Platform, hub: Hub) -> None:
    hub.stalling = {"adapter_model.safetensors"}
    key = make_key(platform)

    form: Any = {"name": (None, "voice"), "source": (None, SOURCE)}

    def downloads() -> list[psutil.Process]:
        return find_children("slora_adapters.peft.hub")

    def has_begun() -> bool:
        return any(path.endswith(".safetensors") for path in hub.asked) and bool(downloads())

    ask_and_leave(platform.api(key), "/v1/adapters", has_begun, files=form)
    wait_until(lambda: not downloads())
    wait_until(lambda: not any((platform.directory / "quarantine").iterdir()))


def test_the_command_pushes_for_a_tenant_and_lets_the_server_download(
    platform: Platform, hub: Hub, tmp_path: Path
) -> None:
    platform.key("pushed")
    operator = {"SLORA_ADMIN_KEY": ADMIN_KEY}
    directory = write_directory(tmp_path / "local", make_members())
    pushed = run_slora(platform.url, "adapter", "push", str(directory), "--tenant", "pushed", **operator)
    assert pushed.startswith("local@1  new version")
    by_server = ("adapter", "push", SOURCE, "--by-server")
    shown = run_slora(platform.url, *by_server, "--tenant", "pushed", **operator)
    assert shown.startswith("voice@1  new version") and f"downloaded from {SOURCE}@{COMMIT}" in shown
    refused = run_slora(platform.url, "adapter", "push", str(directory), "--by-server", code=1, **operator)
    assert "needs hf://ORG/REPO" in refused


def test_vllms_route_downloads_for_the_operator(platform: Platform, hub: Hub) -> None:
    key = platform.key("only")
    body = {"lora_name": "voice", "lora_path": SOURCE, "tenant": "only"}
    loaded = post(platform, ADMIN_KEY, "/v1/load_lora_adapter", body)
    assert (loaded.status_code, "voice@1" in loaded.text) == (200, True), loaded.text
    answer = post(platform, key, "/v1/completions", {"model": "voice", "prompt": "x"})
    assert answer.headers["x-slora-adapter"] == "voice@1"
    wrong = post(
        platform, ADMIN_KEY, "/v1/load_lora_adapter", {**body, "lora_name": "v", "lora_path": "hf://org"}
    )
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "lora_path")
