"""/v1/fanout: one prompt for several models, with the answers side by side."""

import json
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest

from slora.errors import StepFailed
from slora.request import EngineRequest, FinishReason, TokenDelta
from slora_api.request_context import current_request
from tests.adapters.hand_made import make_members, make_tensors
from tests.api.platform import ADMIN_KEY, Platform, post, running_platform
from tests.api.scripted_engine import ScriptedEngine, deltas_of

FANOUT, COMPLETIONS, CHAT = "/v1/fanout", "/v1/completions", "/v1/chat/completions"
PROMPT: dict[str, Any] = {"prompt": "hello", "max_tokens": 5}
MESSAGES: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
MODELS = ["base", "brief", "loud"]


@dataclass
class EngineOfModels(ScriptedEngine):
    """scripts: digest of an adapter, or "" for the base model -> the answer."""

    scripts: dict[str, list[TokenDelta | Exception]] = field(default_factory=dict)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[list[TokenDelta], None]:
        self.answers = [self.scripts.get(request.adapter_digests or "", deltas_of(b"other"))]
        async with aclosing(super().generate(request)) as deltas:
            async for some in deltas:
                yield some


@pytest.fixture(scope="module")
def digests() -> dict[str, str]:
    """Name of a model -> digest."""
    return {"base": ""}


@pytest.fixture(scope="module")
def engine() -> EngineOfModels:
    return EngineOfModels()


@pytest.fixture(scope="module")
def shared(
    tmp_path_factory: pytest.TempPathFactory, engine: EngineOfModels, digests: dict[str, str]
) -> Iterator[Platform]:
    directory = tmp_path_factory.mktemp("fanout")
    with running_platform(directory, engine, max_fanout_models=4, max_concurrent_per_tenant=6) as platform:
        for seed, (tenant, name) in enumerate((("acme", "brief"), ("acme", "loud"), ("rival", "secret"))):
            members = make_members(tensors=make_tensors(seed=seed))
            made = platform.upload(platform.key(tenant), name, members).raise_for_status().json()
            digests[name] = made["digest"].removeprefix("sha256:")
        yield platform


@pytest.fixture
def platform(shared: Platform, engine: EngineOfModels, digests: dict[str, str]) -> Platform:
    engine.reset()
    engine.scripts = {
        digest: [*deltas_of(name[:5].encode(), FinishReason.LENGTH)] for name, digest in digests.items()
    }
    return shared


@pytest.fixture(scope="module")
def key(shared: Platform) -> str:
    return shared.key("acme")


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    *events, last, rest = answer.text.split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def without_identity(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in ("id", "created")}


@pytest.mark.parametrize(("path", "prompt"), [(COMPLETIONS, PROMPT), (CHAT, MESSAGES)])
@pytest.mark.parametrize("fields", [{}, {"n": 2, "seed": 1, "return_token_ids": True}])
def test_each_answer_is_what_the_model_answers_alone(
    platform: Platform,
    key: str,
    engine: EngineOfModels,
    path: str,
    prompt: dict[str, Any],
    fields: dict[str, Any],
) -> None:
    if "n" in fields:
        for script in engine.scripts.values():
            script += [
                TokenDelta(one.token_ids, one.finish_reason, index=1)
                for one in script
                if isinstance(one, TokenDelta)
            ]
    made = post(platform, key, FANOUT, {"models": MODELS, **prompt, **fields})
    assert made.status_code == 200 and made.json()["id"] == made.headers["x-request-id"]
    for index, (model, answer) in enumerate(zip(MODELS, made.json()["answers"], strict=True)):
        alone = post(platform, key, path, {"model": model, **prompt, **fields})
        assert without_identity(answer["body"]) == without_identity(alone.json())
        assert (answer["index"], answer["model"], answer["status_code"]) == (index, model, 200)
        shown = {name: value for name, value in alone.headers.items() if name.startswith("x-slora")}
        assert answer["headers"] == shown and ("x-slora-adapter" in shown) == (model != "base")
        assert answer["request_id"] == f"{made.headers['x-request-id']}-{index}"


def test_the_events_of_each_answer_are_those_of_its_own_stream(platform: Platform, key: str) -> None:
    sent = MESSAGES | {"stream": True, "stream_options": {"include_usage": True}}
    events = events_of(post(platform, key, FANOUT, {"models": MODELS, **sent}))
    for index, model in enumerate(MODELS):
        first, *chunks, last = [event for event in events if event["index"] == index]
        assert (first["status_code"], first["model"]) == (200, model)
        assert last == {"index": index, "model": model, "done": True}
        alone = events_of(post(platform, key, CHAT, {"model": model, **sent}))
        assert [without_identity(event["chunk"]) for event in chunks] == [*map(without_identity, alone)]


def test_a_slow_answer_does_not_hold_up_the_events_of_the_others(
    platform: Platform, key: str, engine: EngineOfModels
) -> None:
    engine.hang, engine.scripts[""] = True, [TokenDelta((65,))]
    sent = {"models": ["base", "loud"], "stream": True, **PROMPT}
    with platform.client(key) as client, client.stream("POST", FANOUT, json=sent) as answer:
        for line in answer.iter_lines():
            if line and json.loads(line.removeprefix("data: ")) == {
                "index": 1,
                "model": "loud",
                "done": True,
            }:
                break
    wait_until(lambda: len(engine.aborted) == 1)


def test_a_failing_model_fails_only_its_answer(
    platform: Platform, key: str, engine: EngineOfModels, digests: dict[str, str]
) -> None:
    engine.scripts[digests["brief"]] = [StepFailed("the step failed")]
    made = post(platform, key, FANOUT, {"models": ["brief", "nothing", "loud"], **PROMPT}).json()
    assert [answer["status_code"] for answer in made["answers"]] == [503, 404, 200]
    broken, unknown, fine = made["answers"]
    assert broken["body"]["error"]["code"] == "step_failed" and broken["headers"]["retry-after"] == "2"
    assert unknown["body"]["error"]["code"] == "model_not_found"
    assert fine["body"]["choices"][0]["text"] == "loud"


def test_a_model_that_fails_in_a_stream_ends_only_its_answer(
    platform: Platform, key: str, engine: EngineOfModels, digests: dict[str, str]
) -> None:
    engine.scripts[digests["brief"]] = [TokenDelta((65,)), StepFailed("the step failed")]
    sent = {"models": ["brief", "nothing", "loud"], "stream": True, **PROMPT}
    events = events_of(post(platform, key, FANOUT, sent))
    broken, unknown, fine = ([event for event in events if event["index"] == at] for at in range(3))
    assert [broken[0]["status_code"], unknown[0]["status_code"], fine[0]["status_code"]] == [200, 404, 200]
    assert broken[1]["chunk"]["choices"][0]["text"] == "A"
    assert broken[-2]["chunk"]["error"]["code"] == "step_failed" and broken[-1]["done"]
    assert [event.get("chunk", {}).get("error", {}).get("code") for event in unknown] == [
        None,
        "model_not_found",
        None,
    ]
    assert "".join(event["chunk"]["choices"][0]["text"] for event in fine[1:-1]) == "loud"


def test_an_unforeseen_error_is_a_500_of_its_answer_and_is_logged_with_its_id(
    platform: Platform, key: str, engine: EngineOfModels, caplog: pytest.LogCaptureFixture
) -> None:
    engine.scripts[""] = [ZeroDivisionError("secret detail")]
    seen: list[str] = []

    def note(request: EngineRequest) -> None:
        context = current_request.get()
        assert context is not None and context.tenant == "acme"
        seen.append(context.request_id)

    engine.on_request = note
    made = post(platform, key, FANOUT, {"models": ["loud", "base"], **PROMPT})
    call_id, (fine, broken) = made.headers["x-request-id"], made.json()["answers"]
    assert (fine["status_code"], broken["status_code"]) == (200, 500) and "secret" not in made.text
    assert f"request {call_id}-1 failed" in caplog.text and "ZeroDivisionError" in caplog.text
    assert sorted(seen) == [f"{call_id}-0", f"{call_id}-1"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_of_another_tenant_answers_like_one_that_does_not_exist(
    platform: Platform, key: str, stream: bool
) -> None:
    with platform.client(key) as client:
        seen = [
            client.post(
                FANOUT,
                json={"models": [name], "stream": stream, **PROMPT},
                headers={"x-request-id": "one"},
            ).text.replace(name, "NAME")
            for name in ("secret", "nobody")
        ]
    assert seen[0] == seen[1] and '"status_code":404' in seen[0]
    assert not platform.engine.requests


def test_the_allow_list_of_a_key_holds_for_each_model(platform: Platform) -> None:
    with platform.client(ADMIN_KEY) as admin:
        made = admin.post("/admin/tenants/acme/keys", json={"models": ["loud"]}).raise_for_status().json()
    sums = {"adapters": [{"name": "loud"}]}
    answers = post(platform, made["key"], FANOUT, {"models": ["loud", "brief", "base", sums], **PROMPT})
    assert [answer["status_code"] for answer in answers.json()["answers"]] == [200, 404, 404, 404]


def test_each_answer_is_a_request_of_the_quota_and_those_beyond_it_are_refused(
    platform: Platform, key: str
) -> None:
    limited = platform.key("limited")
    with platform.client(ADMIN_KEY) as admin:
        admin.patch("/admin/tenants/limited/quota", json={"requests_per_minute": 2, "tokens_per_day": 100})
        made = post(platform, limited, FANOUT, {"models": ["base"] * 3, **PROMPT})
        used = admin.get("/admin/tenants/limited/quota").json()["used"]
    answers = sorted(made.json()["answers"], key=lambda answer: int(answer["status_code"]))
    assert [answer["status_code"] for answer in answers] == [200, 200, 429]
    assert answers[2]["body"]["error"]["code"] == "rate_limit_exceeded"
    assert int(answers[2]["headers"]["retry-after"]) > 0
    assert made.headers["x-ratelimit-remaining-requests"] == "0"
    # Each answer has five tokens of prompt and four tokens of its own.
    assert (used["requests_per_minute"], used["tokens_per_day"]) == (2, 18)


def test_each_answer_has_a_record_of_its_own(platform: Platform, digests: dict[str, str]) -> None:
    recorded = platform.key("acme")
    post(platform, recorded, FANOUT, {"models": MODELS, **PROMPT}).raise_for_status()
    assert len({request.request_id for request in platform.engine.requests}) == 3
    assert {request.adapter_digests or "" for request in platform.engine.requests} == {
        digests[model] for model in MODELS
    }
    assert {request.account for request in platform.engine.requests} == {recorded.split("_")[1]}
    assert platform.services.generator.usage.num_open == 0
    wait_until(lambda: len(platform.engine.acknowledged) >= 3)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_aborts_all_answers(
    platform: Platform, key: str, engine: EngineOfModels, stream: bool
) -> None:
    engine.hang, engine.scripts[""] = True, [TokenDelta((65,))]
    with platform.client(key) as client, pytest.raises(httpx.ReadTimeout):
        client.post(FANOUT, json={"models": ["base"] * 3, "stream": stream, **PROMPT}, timeout=0.5)
    wait_until(lambda: len(engine.aborted) == 3)
    wait_until(lambda: platform.services.generator.limiter.num_generations == 0)


def test_answers_take_as_many_permits_as_requests(
    platform: Platform, key: str, engine: EngineOfModels
) -> None:
    """Six answers of a tenant may be in progress, and each model has two."""
    engine.hang, engine.scripts[""] = True, []
    sent = {"models": ["base"] * 4, "n": 2, "stream": True, **PROMPT}
    with platform.client(key) as client, client.stream("POST", FANOUT, json=sent) as answer:
        lines = answer.iter_lines()  # collecting an iterator closes its connection
        assert json.loads(next(lines).removeprefix("data: "))["status_code"] == 429
        wait_until(lambda: platform.services.generator.limiter.num_generations == 6)
    wait_until(lambda: platform.services.generator.limiter.num_generations == 0)


def test_a_model_may_be_a_sum_of_adapters(platform: Platform, key: str, digests: dict[str, str]) -> None:
    adapters = [{"name": "brief", "weight": 0.5}, {"name": "loud"}]
    made = post(platform, key, FANOUT, {"models": [{"adapters": adapters}, {"model": "loud"}], **PROMPT})
    both, loud = made.json()["answers"]
    assert both["model"] == "default" and set(both["headers"]["x-slora-adapter"].split("+")) == {
        "brief@1",
        "loud@1",
    }
    assert loud["headers"]["x-slora-adapter"] == "loud@1"
    weights = {
        version.digest: weight for request in platform.engine.requests for version, weight in request.adapters
    }
    assert weights[digests["brief"]] == 0.5


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"models": ["base"] * 5}, "models", "`models` has 5 models; this server accepts at most 4"),
        ({"models": []}, "models", "at least 1 item"),
        ({"models": "base"}, "models", "list"),
        ({"models": [7]}, "models.0", "FanoutModel"),
        ({"models": [{"name": "loud"}]}, "models.0.name", "not a parameter"),
        ({"models": [{"adapters": [{"name": "loud"}] * 99}]}, "adapters", "has 99 adapters"),
        ({"models": ["base"], "model": "base"}, "model", "Send the list `models`"),
        ({"models": ["base"], "adapters": [{"name": "loud"}]}, "adapters", "an entry of `models`"),
        ({"models": ["base"], **MESSAGES}, "messages", "either `messages` or `prompt`"),
        ({}, "models", "`models` is missing"),
        ({"models": ["base"], "tempersture": 1}, "tempersture", "not a parameter"),
    ],
)
def test_a_call_that_no_model_can_answer_is_refused_by_name(
    platform: Platform, key: str, fields: dict[str, Any], param: str, said: str
) -> None:
    answer = post(platform, key, FANOUT, PROMPT | fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param) and said in error["message"], error
    assert not platform.engine.requests


def test_a_call_without_a_prompt_is_refused(platform: Platform, key: str) -> None:
    answer = post(platform, key, FANOUT, {"models": ["base"]})
    assert answer.status_code == 400 and "either `messages` or `prompt`" in answer.text


def test_a_key_that_is_sent_as_a_model_is_masked(platform: Platform, key: str) -> None:
    for stream in (False, True):
        assert key not in post(platform, key, FANOUT, {"models": [key], "stream": stream, **PROMPT}).text


def test_the_request_id_of_a_body_ends_with_the_position_of_the_model(platform: Platform, key: str) -> None:
    made = post(platform, key, FANOUT, {"models": ["base", "loud"], "request_id": "mine", **PROMPT}).json()
    assert [answer["body"]["id"] for answer in made["answers"]] == ["cmpl-mine-0", "cmpl-mine-1"]


def test_the_openai_package_posts_the_call_and_reads_its_stream(platform: Platform, key: str) -> None:
    client = openai.OpenAI(base_url=platform.url + "/v1", api_key=key, max_retries=0)
    sent = {"models": ["brief", "nothing"], **MESSAGES}
    whole: Any = client.post("/fanout", cast_to=object, body=sent)
    assert whole["answers"][0]["body"]["choices"][0]["message"]["content"] == "brief"
    assert whole["answers"][1]["body"]["error"]["code"] == "model_not_found"
    stream: Any = client.post(
        "/fanout", cast_to=object, body=sent | {"stream": True}, stream=True, stream_cls=openai.Stream[object]
    )
    texts = {0: "", 1: ""}
    for event in stream:
        for choice in event.get("chunk", {}).get("choices", ()):
            texts[event["index"]] += choice["delta"].get("content", "")
    assert texts == {0: "brief", 1: ""}
    with pytest.raises(openai.BadRequestError, match="at most 4"):
        client.post("/fanout", cast_to=object, body=sent | {"models": ["base"] * 5})
