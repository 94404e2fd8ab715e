"""Streams whose first token takes long: the head goes out, comments keep the connection, and errors are events."""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Callable
from typing import Any

import openai
import pytest
from starlette.types import Message

from slora.core.errors import EngineUnavailable
from slora.core.request import FinishReason
from slora_api.http import sse
from tests.api.platform import Platform, post
from tests.api.scripted_engine import ScriptedEngine, deltas_of
from tests.api.served import ask_and_leave, wait_until

STREAM = {"model": "base", "stream": True}
ROUTES = [
    ("/v1/chat/completions", STREAM | {"messages": [{"role": "user", "content": "hello"}]}),
    ("/v1/completions", STREAM | {"prompt": "hello"}),
    ("/v1/completions", STREAM | {"prompt": ["hello", "you"], "echo": True}),
    ("/v1/responses", STREAM | {"input": "hello"}),
]
ON_ALL_ROUTES = pytest.mark.parametrize(("path", "body"), ROUTES)


@pytest.fixture(scope="module")
def shared(start_platform: Callable[..., Platform]) -> Platform:
    return start_platform(ScriptedEngine(), follows=True)


@pytest.fixture
def gate(platform: Platform, hold_heads: Callable[..., None]) -> threading.Event:
    """The answers begin when the event is set. The head is held, and comments come, for shorter than on a server."""
    hold_heads()
    platform.engine.reset(deltas_of(b"Hi!", FinishReason.STOP))
    platform.engine.gate = threading.Event()
    return platform.engine.gate


@ON_ALL_ROUTES
def test_the_head_and_comments_precede_a_late_first_token(
    platform: Platform, key: str, gate: threading.Event, path: str, body: dict[str, Any]
) -> None:
    with platform.client(key) as client, client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200 and "x-slora-timing" not in answer.headers
        lines = answer.iter_lines()
        waited = [next(lines) for _ in range(4)]
        assert waited == [": keep-alive", ""] * 2
        gate.set()
        rest = [line for line in lines if line.startswith("data: {")]
    texts = post(platform, key, path, body).text.splitlines()
    assert len(rest) == len([line for line in texts if line.startswith("data: {")])


def test_comments_come_while_a_stream_pauses_between_tokens(
    platform: Platform, key: str, hold_heads: Callable[..., None]
) -> None:
    hold_heads(60.0)
    platform.engine.reset(deltas_of(b"Hi!")[:1])
    platform.engine.hang = True
    path, body = ROUTES[1]
    with platform.client(key) as client, client.stream("POST", path, json=body) as answer:
        lines = filter(None, answer.iter_lines())
        assert json.loads(next(lines)[6:])["choices"][0]["text"] == "H"
        assert [next(lines) for _ in range(3)] == [": keep-alive"] * 3


@ON_ALL_ROUTES
def test_the_head_does_not_wait_for_the_time_between_comments(
    platform: Platform,
    key: str,
    gate: threading.Event,
    hold_heads: Callable[..., None],
    path: str,
    body: dict[str, Any],
) -> None:
    """The server joins the head and the first part of the body. So the head left with the first comment, 10 s late."""
    hold_heads(keep_alive_s=600.0)
    with platform.client(key) as client, client.stream("POST", path, json=body) as answer:
        assert next(answer.iter_lines()) == ": keep-alive"
        gate.set()


def test_the_openai_package_skips_the_comments(platform: Platform, key: str, gate: threading.Event) -> None:
    with platform.sdk(key).chat.completions.create(**ROUTES[0][1]) as chunks:
        gate.set()
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hi!"


@ON_ALL_ROUTES
def test_an_error_after_the_head_is_an_event(
    platform: Platform, key: str, gate: threading.Event, path: str, body: dict[str, Any]
) -> None:
    platform.engine.answers = [[EngineUnavailable("the engine died")]]
    with platform.client(key) as client, client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        assert next(lines) == ": keep-alive"
        gate.set()
        found = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "the engine died" in json.dumps(found)
    assert platform.services.generator.limiter.num_generations == 0


def test_the_openai_package_raises_an_error_after_the_head(
    platform: Platform, key: str, gate: threading.Event
) -> None:
    platform.engine.answers = [[EngineUnavailable("the engine died")]]
    with platform.sdk(key).chat.completions.create(**ROUTES[0][1]) as chunks:
        gate.set()
        with pytest.raises(openai.APIError, match="the engine died"):
            list(chunks)


@ON_ALL_ROUTES
def test_an_error_while_the_head_is_held_keeps_its_status(
    platform: Platform,
    key: str,
    gate: threading.Event,
    path: str,
    body: dict[str, Any],
    hold_heads: Callable[..., None],
) -> None:
    hold_heads(60.0)
    gate.set()
    platform.engine.answers = [[EngineUnavailable("the engine died")]]
    answer = post(platform, key, path, body)
    assert (answer.status_code, answer.headers["content-type"]) == (503, "application/json")


@pytest.mark.parametrize("hold_s", [0.01, 60.0])
@ON_ALL_ROUTES
def test_a_client_that_leaves_before_the_first_token_aborts_its_request(
    platform: Platform,
    key: str,
    gate: threading.Event,
    path: str,
    body: dict[str, Any],
    hold_s: float,
    hold_heads: Callable[..., None],
) -> None:
    hold_heads(hold_s)
    engine, prompt = platform.engine, body.get("prompt")
    num_prompts = len(prompt) if isinstance(prompt, list) else 1
    ask_and_leave(platform.api(key), path, lambda: len(engine.requests) == num_prompts, json=body)
    wait_until(lambda: len(engine.aborted) == num_prompts)
    wait_until(lambda: platform.services.generator.limiter.num_generations == 0)


def test_a_revoked_key_ends_a_stream_that_waits_for_its_first_token(
    platform: Platform, gate: threading.Event
) -> None:
    key = platform.key("revoked")
    with platform.client(key) as client, client.stream("POST", ROUTES[0][0], json=ROUTES[0][1]) as answer:
        lines = answer.iter_lines()
        assert next(lines) == ": keep-alive"
        platform.services.keys.admin.revoke_key(key.split("_")[1])
        events = [line for line in lines if line.startswith("data: ")]
    assert "was revoked" in events[-1]
    wait_until(lambda: len(platform.engine.aborted) == 1)


def test_a_comment_never_divides_an_event(hold_heads: Callable[..., None]) -> None:
    """A long event is sent in several writes, and the second one may come later than a comment is due."""
    hold_heads(0.001, 0.001)
    sent: list[bytes] = []

    async def wait_for_comment() -> None:
        num_sent = len(sent)
        while sse.KEEP_ALIVE not in sent[num_sent:]:
            await asyncio.sleep(0.001)

    async def events() -> AsyncGenerator[bytes, None]:
        await wait_for_comment()
        yield b"data: be"
        await asyncio.sleep(0.02)
        yield b"gin\n\n"
        await wait_for_comment()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            sent.append(message["body"])

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def stream() -> None:
        response = sse.EventStream(events(), lambda error: (), {})
        await response({"state": {"request_id": "1"}}, receive, send)

    asyncio.run(stream())
    before, event, after = b"".join(sent).partition(b"data: begin\n\n")
    assert event and set(before.split(sse.KEEP_ALIVE)) == set(after.split(sse.KEEP_ALIVE)) == {b""}
