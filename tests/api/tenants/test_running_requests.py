"""Requests in progress end when their key is revoked or their tenant is suspended, in every process."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from slora_api.keys.key_record import PEPPER_BYTES
from tests.api.platform import ADMIN_KEY, Platform, post, running_platform
from tests.api.scripted_engine import ScriptedEngine, deltas_of
from tests.api.served import wait_for

COMPLETIONS = "/v1/completions"
PROMPT = {"model": "base", "prompt": "hello"}
REVOKED = "The API key of this request was revoked, so the request was ended."


@pytest.fixture(params=["sqlite", "postgresql"], scope="module")
def servers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Platform, Platform]]:
    """Two servers that share a database. The answers of the second one do not end."""
    folder = tmp_path_factory.mktemp("hosts")
    settings = {"store": str(folder / "store")}
    if request.param == "postgresql":
        settings["database"] = request.getfixturevalue("shared_postgresql").make_database()
    with ExitStack() as stack:
        platforms = []
        for number in range(2):
            host = folder / (f"host{number}" if request.param == "postgresql" else "host")
            host.mkdir(exist_ok=True)
            (host / "pepper").write_bytes(b"p" * PEPPER_BYTES)
            engine = ScriptedEngine([deltas_of(b"ok" * 100)[:3]], hang=True)
            platforms.append(stack.enter_context(running_platform(host, engine, follows=True, **settings)))
        yield platforms[0], platforms[1]


@dataclass
class Stream:
    """A stream in progress. ended_at: the monotonic time of its end."""

    events: list[Any] = field(default_factory=list)
    ended_at: float = 0.0


@contextmanager
def streaming(platform: Platform, key: str) -> Iterator[Stream]:
    """Reads a stream on a thread from its first event on."""
    stream, started = Stream(), threading.Event()

    def read() -> None:
        body = {**PROMPT, "stream": True, "max_tokens": 50}
        with platform.client(key) as client, client.stream("POST", COMPLETIONS, json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: "):
                    stream.events.append(json.loads(line.removeprefix("data: ")))
                    started.set()
        stream.ended_at = time.monotonic()

    reader = threading.Thread(target=read)
    reader.start()
    assert started.wait(300)
    yield stream
    reader.join(300)
    assert not reader.is_alive(), "the stream has not ended"


def test_a_revocation_at_one_server_ends_the_streams_of_another(
    servers: tuple[Platform, Platform], report: Callable[[str], None]
) -> None:
    first, second = servers
    key, other = first.key("acme"), first.key("acme")
    num_aborted = len(second.engine.aborted)
    with streaming(second, key) as stream, streaming(second, other) as unharmed:
        revoked_at = time.monotonic()
        with first.client(ADMIN_KEY) as admin:
            admin.delete(f"/admin/keys/{key.split('_')[1]}").raise_for_status()
        wait_for(lambda: stream.ended_at or None)
        report(f"revocation at another server to the end of a stream: {stream.ended_at - revoked_at:.2f} s")
        error = stream.events[-1]["error"]
        assert (error["message"], error["type"], error["code"]) == (
            REVOKED,
            "authentication_error",
            "invalid_api_key",
        )
        wait_for(lambda: len(second.engine.aborted) == num_aborted + 1 or None)
        assert not unharmed.ended_at
        assert post(second, key, COMPLETIONS, PROMPT).status_code == 401
        first.services.keys.admin.revoke_key(other.split("_")[1])
    wait_for(lambda: not len(second.services.keys.running) or None)


def test_a_request_without_a_stream_is_answered_401_when_its_key_is_revoked(
    servers: tuple[Platform, Platform],
) -> None:
    first, second = servers
    key = first.key("acme")
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(post(second, key, COMPLETIONS, PROMPT)))
    num_requests = len(second.engine.requests)
    asking.start()
    wait_for(lambda: len(second.engine.requests) > num_requests or None)
    first.services.keys.admin.revoke_key(key.split("_")[1])
    asking.join(300)
    (answer,) = answers
    assert (answer.status_code, answer.json()["error"]["message"]) == (401, REVOKED)
    assert second.engine.requests[-1].request_id in second.engine.aborted


def test_a_suspension_ends_the_streams_of_the_tenants_keys(servers: tuple[Platform, Platform]) -> None:
    first, second = servers
    key, other = first.key("paused"), first.key("running")
    with streaming(second, other) as unharmed:
        with streaming(second, key) as stream:
            first.services.tenant_store.suspend(first.tenant_id("paused"))
        assert stream.events[-1]["error"]["code"] == "tenant_suspended"
        assert not unharmed.ended_at
        first.services.keys.admin.revoke_key(other.split("_")[1])


def test_a_change_of_the_tenants_share_ends_no_stream(servers: tuple[Platform, Platform]) -> None:
    first, second = servers
    key = first.key("changed")
    with streaming(second, key) as stream:
        with first.client(ADMIN_KEY) as admin:
            admin.patch("/admin/tenants/changed", json={"weight": 2}).raise_for_status()
        key_id = key.split("_")[1]
        keys = second.services.keys.store
        wait_for(lambda: ((record := keys.find_key(key_id)) and record.share.weight == 2) or None)
        assert not stream.ended_at
        first.services.keys.admin.revoke_key(key_id)


def test_a_key_in_the_revocation_journal_ends_its_streams(servers: tuple[Platform, Platform]) -> None:
    """A revocation that the database does not have yet, because its disk is full."""
    _, second = servers
    key = second.key("journalled")
    with streaming(second, key) as stream:
        second.services.keys.store.journal.add(key.split("_")[1])
    assert stream.events[-1]["error"]["message"] == REVOKED


def test_the_openai_client_raises_an_error_when_its_key_is_revoked(
    servers: tuple[Platform, Platform],
) -> None:
    first, second = servers
    key = first.key("sdk")
    client = second.sdk(key)
    with pytest.raises(openai.APIError, match="was revoked"):
        for number, _ in enumerate(client.completions.create(**PROMPT, stream=True, max_tokens=50)):  # type: ignore
            if number == 0:
                first.services.keys.admin.revoke_key(key.split("_")[1])
    with pytest.raises(openai.AuthenticationError):
        client.models.list()
    narrow = first.services.keys.admin.create_key(first.tenant_id("sdk"), scopes=frozenset())[1].secret
    with pytest.raises(openai.PermissionDeniedError):
        client.with_options(api_key=narrow).models.list()


def test_an_expired_key_finishes_its_stream(tmp_path: Path) -> None:
    now = [time.time()]
    engine = ScriptedEngine([deltas_of(b"ok" * 20)])
    with running_platform(tmp_path, engine, follows=True) as platform:
        platform.services.keys.store.wall_clock = lambda: now[0]
        platform.key("acme")
        key = platform.services.keys.admin.create_key(
            platform.tenant_id("acme"), expires_at=int(now[0]) + 60
        )[1].secret
        engine.on_request = lambda _: now.__setitem__(0, now[0] + 120)
        body = {**PROMPT, "max_tokens": 40, "stream": True}
        answer = post(platform, key, COMPLETIONS, body)
        assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")
        assert post(platform, key, COMPLETIONS, body).status_code == 401
