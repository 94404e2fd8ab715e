import gzip
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from slora.core.request import EngineRequest, TokenDelta
from slora.models.weights.checkpoint import fingerprint
from slora_adapters.inspection.inspection_process import inspect
from slora_adapters.peft.adapter import AdapterLimits
from slora_api.adapters.publisher import InspectionBounds
from slora_api.adapters.quarantine import Quarantine
from slora_api.http.body_limit import BodyLimits
from slora_api.serve import app
from slora_kernels.layout import lay_out_adapter
from tests.adapters.hand_made import SHAPE, make_config, make_members, make_tensors, write_directory
from tests.api.adapters.hostile_uploads import make_tar, make_zip
from tests.api.platform import ADMIN_KEY, Platform, post, running_platform
from tests.api.scripted_engine import ScriptedEngine, deltas_of, trial_of
from tests.api.served import wait_until
from tests.support.file_limit import largest_file

MAX_UPLOAD = 300_000


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    directory = tmp_path_factory.mktemp("data")
    engine = ScriptedEngine([deltas_of(b"ok")])
    with running_platform(directory, engine, max_upload_bytes=MAX_UPLOAD, max_lora_rank=8) as running:
        yield running


def kept_files(platform: Platform) -> set[Path]:
    """All files that an upload could leave behind. The server itself writes the store's claim once, so it is
    excluded."""
    store = platform.directory / "adapters"
    places = (store / "blobs", store / "tmp", platform.directory / "quarantine")
    return {path for place in places for path in place.rglob("*") if path.is_file()}


def test_an_upload_answers_201_with_a_certificate(platform: Platform) -> None:
    answer = platform.upload(platform.key("first"), "shout")
    body = answer.json()
    assert answer.status_code == 201
    assert (body["name"], body["rank"], body["target_modules"]) == ("shout", 2, ["q_proj", "down_proj"])
    assert len(body["digest"]) == 64
    assert body["bytes"] == sum(tensor.nbytes for tensor in make_tensors().values())
    assert (body["version"], body.pop("new_version"), body.pop("aliases")) == (1, True, {"latest": 100})
    certificate, source = body.pop("certificate"), body.pop("source")
    assert source is None and (certificate["modules_adapted"], certificate["modules_total"]) == (
        4,
        SHAPE.num_modules,
    )
    assert set(certificate["modules"]) == {"q_proj", "down_proj"} and certificate["base"] == "unverified"
    assert certificate["modules"]["q_proj"].keys() == {"adapted", "total", "min_rank", "max_rank", "max_norm"}
    ranks = [2, 0, 0, 0, 0, 0, 2] * 2
    num_bytes = lay_out_adapter(SHAPE, [*ranks, 0, 0]).num_bytes
    assert certificate["pool_bytes"] == num_bytes
    # The scripted engine's paces: 1 ns per byte into the pool, and 4 ns per byte from a file.
    predicted = {"host": 1e-6 * num_bytes, "file": 5e-6 * num_bytes}
    assert certificate["predicted_load_ms"] == pytest.approx(predicted, rel=0.01)
    client = platform.api(platform.key("first"))
    assert client.get("/v1/adapters").json()["data"] == [body]
    assert client.get("/v1/adapters/shout").json() == body


@pytest.mark.covering(1)
@pytest.mark.parametrize("folder", ["", "shout/"])
@pytest.mark.parametrize("name", ["a.zip", "a.tar", "a.tar.gz"])
def test_an_archive_is_uploaded_like_its_files(platform: Platform, name: str, folder: str) -> None:
    members = {folder + file: raw for file, raw in make_members(chat_template_dot_jinja="{{ x }}").items()}
    tar = make_tar(list(members.items()))
    raw = {"a.zip": make_zip(members), "a.tar": tar, "a.tar.gz": gzip.compress(tar)}[name]
    key = platform.key("archives")
    client = platform.api(key)
    answer = client.post("/v1/adapters", data={"name": "packed"}, files={"archive": (name, raw)})
    assert answer.status_code == 201, answer.text
    client.delete("/v1/adapters/packed")
    assert answer.json()["digest"] == platform.upload(key, "plain").json()["digest"]
    assert answer.json()["chat_template"] is True


def upload_for(platform: Platform, base_name: str | None, **fields: str) -> httpx.Response:
    config = make_config() if base_name is None else make_config(base_model_name_or_path=base_name)
    return platform.upload(platform.key("bases"), "x", make_members(config), **fields)


def test_the_certificate_says_whether_the_base_is_verified_or_matched_by_name(platform: Platform) -> None:
    directory = platform.directory / "base"
    directory.mkdir()
    save_file({"w": np.arange(64, dtype=np.float32)}, directory / "model.safetensors")
    own = fingerprint(directory)
    for base_name in (None, "elsewhere/Other-7B"):
        assert upload_for(platform, base_name).json()["certificate"]["base"] == "unverified"
        verified = upload_for(platform, base_name, base_fingerprint=own)
        assert verified.json()["certificate"]["base"] == "verified"
    assert upload_for(platform, "/models/Tiny-Base/").json()["certificate"]["base"] == "name-matched"
    other = upload_for(platform, "tiny-base", base_fingerprint="0" * 64)
    error = other.json()["error"]
    assert (other.status_code, error["reasons"][0]["code"]) == (422, "other_base")
    assert "0" * 64 in error["message"] and own in error["message"]
    for text in ("", "0" * 63, "G" * 64, "0" * 64 + "\n"):
        odd = upload_for(platform, None, base_fingerprint=text)
        assert (odd.status_code, odd.json()["error"]["param"]) == (400, "base_fingerprint")


def test_a_tenant_may_not_exceed_its_version_quota(tmp_path: Path) -> None:
    engine = ScriptedEngine([deltas_of(b"ok")])
    with running_platform(tmp_path, engine, max_versions_per_tenant=2) as platform:
        key = platform.key("many")
        other = make_members(tensors=make_tensors(seed=3))
        assert [platform.upload(key, "a", members).status_code for members in (None, other)] == [201, 201]
        before = kept_files(platform)
        for name in ("a", "b"):
            third = platform.upload(key, name)
            error = third.json()["error"]
            assert (third.status_code, error["type"]) == (409, "conflict_error")
            assert error["code"] == "quota_exceeded" and third.headers["x-should-retry"] == "false"
            assert "has 2 adapter versions, and the limit is 2 (adapter_versions)" in error["message"]
        assert kept_files(platform) == before
        # Pushing the newest version again makes no new version. Another tenant gets its own version.
        assert platform.upload(key, "a", other).status_code == 201
        assert platform.upload(platform.key("other"), "c").status_code == 201
        platform.api(key).delete("/v1/adapters/a@1")
        assert platform.upload(key, "b").status_code == 201


def blob_bytes(directory: Path) -> int:
    """The bytes that a store uses for an adapter of `make_members`."""
    source = write_directory(directory / "source", make_members())
    scratch = write_directory(directory / "scratch", {})
    return inspect(source, scratch, SHAPE, AdapterLimits()).blob_bytes


def test_a_tenant_may_not_exceed_its_storage_quota(tmp_path: Path) -> None:
    size = blob_bytes(tmp_path / "one")
    engine = ScriptedEngine([deltas_of(b"ok")])
    with running_platform(tmp_path, engine, max_adapter_bytes_per_tenant=2 * size) as platform:
        key = platform.key("large")
        members = [make_members(tensors=make_tensors(seed=seed)) for seed in range(3)]
        # Pushing the same weights again uses no storage.
        for name, number in (("a", 0), ("b", 1), ("c", 1), ("a", 1)):
            assert platform.upload(key, name, members[number]).status_code == 201
        for name in ("a", "d"):
            error = platform.upload(key, name, members[2]).json()["error"]
            assert error["code"] == "quota_exceeded"
            assert f"would take {3 * size} bytes, including chat templates" in error["message"]
            assert f"The limit is {2 * size} (stored_bytes)" in error["message"]
        platform.api(key).delete("/v1/adapters/a@1")
        assert platform.upload(key, "a", members[2]).status_code == 201


def test_chat_templates_and_generation_configs_count_for_the_quota_of_each_version(tmp_path: Path) -> None:
    """Born from a bug: extras did not count, so 160 versions with 80 MB of extras counted as 14 KB."""
    size = blob_bytes(tmp_path / "one")
    engine = ScriptedEngine([deltas_of(b"ok")])
    with running_platform(tmp_path, engine, max_adapter_bytes_per_tenant=size + 25_000) as platform:
        key = platform.key("wordy")
        for number, status in ((1, 201), (2, 201), (3, 409)):
            template = f"{{# {number}{'x' * 10_000} #}}"
            answer = platform.upload(key, "a", make_members(chat_template_dot_jinja=template))
            assert answer.status_code == status
        assert answer.json()["error"]["code"] == "quota_exceeded"
        assert "With the 10007 bytes of `a`" in answer.json()["error"]["message"]
        versions = platform.api(key).get("/v1/adapters/a/versions").json()["data"]
        assert [one["stored_bytes"] for one in versions] == [size + 10_007] * 2


def test_concurrent_uploads_through_two_processes_do_not_exceed_the_quota(tmp_path: Path) -> None:
    """Born from a bug: each process checked the quota, ran the canary, and made its version without a second check."""
    both_counted = threading.Barrier(2)

    def wait_for_the_other(request: EngineRequest) -> list[TokenDelta]:
        if request.adapters:
            both_counted.wait(60)
        return trial_of(request)

    with ExitStack() as stack:
        platforms = []
        for _ in range(2):
            engine = ScriptedEngine([deltas_of(b"ok")])
            engine.canary = wait_for_the_other
            running = running_platform(tmp_path, engine, max_versions_per_tenant=1)
            platforms.append(stack.enter_context(running))
        key = platforms[0].key("racing")
        uploads = [(platforms[0], "a", make_tensors(seed=1)), (platforms[1], "b", make_tensors(seed=2))]
        with ThreadPoolExecutor(2) as pool:
            answers = list(
                pool.map(lambda one: one[0].upload(key, one[1], make_members(tensors=one[2])), uploads)
            )
        assert sorted(answer.status_code for answer in answers) == [201, 409]
        with platforms[0].client(key) as client:
            assert len(client.get("/v1/adapters").json()["data"]) == 1
        assert len(list((tmp_path / "adapters" / "blobs").glob("*/*"))) == 1, "the refused weights are gone"


def test_an_uploaded_adapter_answers_in_the_next_request_and_a_deleted_one_does_not(
    platform: Platform,
) -> None:
    key = platform.key("quick")
    body = {"model": "now", "prompt": "x"}
    assert post(platform, key, "/v1/completions", body).status_code == 404
    platform.upload(key, "now")
    assert post(platform, key, "/v1/completions", body).status_code == 200
    client = platform.api(key)
    assert client.delete("/v1/adapters/now").json() == {"name": "now", "object": "adapter", "deleted": True}
    assert client.delete("/v1/adapters/now").status_code == 404
    assert post(platform, key, "/v1/completions", body).status_code == 404


def test_two_tenants_may_use_the_same_name_for_different_adapters(platform: Platform) -> None:
    one, two = platform.key("same-one"), platform.key("same-two")
    digests = {
        platform.upload(one, "mine").json()["digest"],
        platform.upload(two, "mine", make_members(tensors=make_tensors(seed=5))).json()["digest"],
    }
    assert len(digests) == 2
    platform.api(one).delete("/v1/adapters/mine")
    assert platform.api(two).get("/v1/adapters/mine").status_code == 200


def test_an_upload_does_not_reveal_whether_another_tenant_has_the_same_weights(tmp_path: Path) -> None:
    trials: list[EngineRequest] = []

    def trial(request: EngineRequest) -> list[TokenDelta]:
        trials.append(request)
        return trial_of(request)

    engine = ScriptedEngine([deltas_of(b"ok")], canary=trial)
    with running_platform(tmp_path, engine) as platform:
        keys = [platform.key(tenant) for tenant in ("first", "second")]
        seen = []
        for key in keys:
            answer = platform.upload(key, "mine")
            body = {
                name: value for name, value in answer.json().items() if name not in ("created", "updated")
            }
            prompts = [(not request.adapters, request.prompt_token_ids) for request in trials]
            trials.clear()
            headers = {name for name in answer.headers if name != "date"}
            seen.append((answer.status_code, headers, body, prompts, len(engine.forgotten)))
        assert seen[0][0] == 201 and len(seen[0][3]) == 2 and seen[0][4] == 1
        assert seen[1] == (*seen[0][:4], 2), "the second is tried out, and forgotten, like the first"
        body = {"model": "mine", "prompt": "x"}
        platform.api(keys[0]).delete("/v1/adapters/mine").raise_for_status()
        assert post(platform, keys[0], "/v1/completions", body).status_code == 404
        assert post(platform, keys[1], "/v1/completions", body).status_code == 200
        assert len(kept_files(platform)) == 2, "of the second, who has what was stored for both"
        platform.api(keys[1]).delete("/v1/adapters/mine").raise_for_status()
        assert not kept_files(platform)


def test_uploading_the_same_adapter_keeps_the_version_and_another_one_adds_a_version(
    platform: Platform,
) -> None:
    key = platform.key("again")
    other = make_members(tensors=make_tensors(seed=9))
    answers = [platform.upload(key, "twice", members) for members in (None, None, other)]
    assert [answer.status_code for answer in answers] == [201, 201, 201]
    first, again, next_one = (answer.json() for answer in answers)
    assert [(one["version"], one["new_version"]) for one in (first, again, next_one)] == [
        (1, True),
        (1, False),
        (2, True),
    ]
    assert first["digest"] == again["digest"] != next_one["digest"]
    client = platform.api(key)
    assert client.get("/v1/adapters/twice").json()["digest"] == next_one["digest"]
    assert client.get("/v1/adapters/twice@1").json()["digest"] == first["digest"]


@pytest.mark.parametrize("name", ["", "Upper", "a b", "../x", "a/b", "-a", "x" * 129, "base", "default", "ü"])
def test_an_invalid_name_is_refused(platform: Platform, name: str) -> None:
    answer = platform.upload(platform.key("names"), name)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "name")


# tests/adapters/inspection has all that an inspection refuses. The template and the sampling are checked afterwards.
BAD_ADAPTERS = {
    "weights that are cut": make_members() | {"adapter_model.safetensors": b"\0" * 7},
    "template that is none": make_members(chat_template_dot_jinja="{% for"),
    "sampling that is not honoured": make_members(generation_config_dot_json='{"num_beams": 4}'),
}


@pytest.mark.parametrize("members", BAD_ADAPTERS.values(), ids=BAD_ADAPTERS)
def test_a_bad_adapter_is_a_422_with_reasons_and_leaves_nothing_behind(
    platform: Platform, members: dict[str, bytes]
) -> None:
    before = kept_files(platform)
    key = platform.key("bad")
    answer = platform.upload(key, "bad", members)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (422, "adapter_invalid"), answer.text
    assert error["reasons"] and all(set(reason) == {"code", "message"} for reason in error["reasons"])
    assert kept_files(platform) == before
    assert platform.api(key).get("/v1/adapters").json()["data"] == []


MULTIPART = {"Content-Type": "multipart/form-data; boundary=b"}


def part(name: str, content: bytes, file_name: str = "") -> bytes:
    file = f'; filename="{file_name}"' if file_name else ""
    return f'--b\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'.encode() + content + b"\r\n"


NAME, CONFIG = part("name", b"x"), part("config", b"{}", "c")
# hostile_uploads.py has more of them.
BAD_FORMS: dict[str, tuple[dict[str, str], bytes, str | None]] = {
    "not multipart": ({"Content-Type": "application/json"}, b"{}", None),
    "empty": (MULTIPART, b"", None),
    "no name": (MULTIPART, CONFIG + part("weights", b"w", "w") + b"--b--\r\n", "name"),
    "name too large": (MULTIPART, part("name", b"x" * 300) + b"--b--\r\n", "name"),
}


@pytest.mark.parametrize(("headers", "body", "param"), BAD_FORMS.values(), ids=BAD_FORMS)
def test_a_form_that_is_not_an_upload_is_a_400(
    platform: Platform, headers: dict[str, str], body: bytes, param: str | None
) -> None:
    answer = platform.api(platform.key("forms")).post("/v1/adapters", content=body, headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param), (
        answer.text
    )
    assert not any((platform.directory / "quarantine").iterdir())


def test_an_upload_whose_client_disconnects_leaves_nothing(platform: Platform) -> None:
    before, quarantine = kept_files(platform), platform.directory / "quarantine"

    def body() -> Iterator[bytes]:
        yield NAME + CONFIG
        wait_until(lambda: any(quarantine.iterdir()))
        raise RuntimeError("the client dies")

    with platform.client(platform.key("gone")) as client, pytest.raises(RuntimeError):
        client.post("/v1/adapters", content=body(), headers=MULTIPART)
    wait_until(lambda: not any(quarantine.iterdir()))
    assert kept_files(platform) == before


def test_slow_uploads_are_aborted_and_release_their_permits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Born from a bug: four uploads of one byte every 20 s blocked all other uploads."""
    impatient = partial(BodyLimits, grace_s=0.5)
    monkeypatch.setattr(app, "BodyLimits", impatient)
    engine = ScriptedEngine([deltas_of(b"ok")])
    with running_platform(tmp_path, engine, max_concurrent_uploads=4) as platform, ExitStack() as sockets:
        host, port = platform.url.removeprefix("http://").split(":")
        keys = [platform.key(tenant) for tenant in ("one", "two", "three", "four")]
        slow = [sockets.enter_context(socket.create_connection((host, int(port)), timeout=60)) for _ in keys]
        for connection, key in zip(slow, keys, strict=True):
            head = f"POST /v1/adapters HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
            head += "Content-Type: multipart/form-data; boundary=b\r\nContent-Length: 100000\r\n\r\n"
            connection.sendall(head.encode() + NAME)
        for connection in slow:
            answer = b""
            while not answer.endswith(b"}}"):
                answer += connection.recv(10_000)
            assert answer.startswith(b"HTTP/1.1 408") and b"request_too_slow" in answer
        assert platform.upload(platform.key("honest"), "x").status_code == 201
        assert not any((platform.directory / "quarantine").iterdir())


def test_quarantined_uploads_of_a_killed_server_are_deleted_at_the_next_start(tmp_path: Path) -> None:
    (tmp_path / "quarantine" / "old").mkdir(parents=True)
    (tmp_path / "quarantine" / "old" / "file").write_text("x", encoding="utf-8")
    Quarantine(tmp_path / "quarantine")
    assert list((tmp_path / "quarantine").iterdir()) == []


def test_uploads_over_the_concurrency_limit_are_told_to_retry(tmp_path: Path) -> None:
    with running_platform(tmp_path, ScriptedEngine([deltas_of(b"ok")]), max_concurrent_uploads=1) as platform:
        key = platform.key("many")
        with platform.services.generator.limiter.admit_upload("somebody"):
            busy = platform.upload(key, "x")
        with platform.services.generator.limiter.admit_upload(platform.tenant_id("many")):
            own = platform.upload(key, "x")
        assert (busy.status_code, busy.json()["error"]["code"]) == (503, "server_busy")
        assert (own.status_code, own.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert platform.upload(key, "x").status_code == 201


def test_a_full_disk_is_a_507_that_names_the_operator(tmp_path: Path) -> None:
    (tmp_path / "lora").mkdir()
    large = make_members() | {"adapter_model.safetensors": bytes(3 << 20)}
    write_directory(tmp_path / "lora" / "large", large)
    engine = ScriptedEngine([deltas_of(b"ok")])
    with running_platform(tmp_path, engine, InspectionBounds(), lora_root=str(tmp_path / "lora")) as platform:
        key = platform.key("t")
        files = {"archive": ("x.tar.gz", gzip.compress(make_tar(list(large.items()))))}
        assert len(files["archive"][1]) < 1 << 20, "it is to be received, and not to be unpacked"
        with largest_file(1 << 20), platform.client(key) as client, platform.client(ADMIN_KEY) as operator:
            answers = [
                platform.upload(key, "x", large),
                client.post("/v1/adapters", data={"name": "x"}, files=files),
                operator.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "large"}),
            ]
        for answer in answers:
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (507, "disk_full"), answer.text
            assert answer.headers["x-should-retry"] == "false"
        of_tenants, of_operator = answers[:2], answers[2]
        for answer in of_tenants:
            message = answer.json()["error"]["message"]
            assert "after the operator has freed space in the data directory" in message
            assert str(tmp_path) not in message
        assert f"the disk of {tmp_path} is full" in of_operator.json()["error"]["message"]
        assert not kept_files(platform)
        assert platform.upload(key, "x").status_code == 201
