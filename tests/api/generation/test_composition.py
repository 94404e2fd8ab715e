"""Requests with `adapters`: how names, weights and limits are checked, and what the engine and the client get."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from slora_api.completions.services import AnswerServices
from slora_api.keys.key_admin import KeyAdmin
from tests.adapters.hand_made import make_members, make_tensors
from tests.api.platform import ADMIN_KEY, Platform, post, running_platform
from tests.api.scripted_engine import ScriptedEngine

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEMPLATE = b'{"chat_template": "{% for message in messages %}<{{ message.content }}>{% endfor %}"}'


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    with running_platform(tmp_path_factory.mktemp("sums"), ScriptedEngine()) as platform:
        key = platform.key("acme")
        for seed, name in enumerate(("formal", "brief", "loud")):
            members = make_members(tensors=make_tensors(seed=seed))
            if name == "loud":
                members |= {"tokenizer_config.json": TEMPLATE}
            platform.upload(key, name, members).raise_for_status()
        yield platform


def ask(platform: Platform, key: str, adapters: Any, **fields: Any) -> httpx.Response:
    body = {"model": "default", "prompt": "hello", "adapters": adapters, **fields}
    return post(platform, key, COMPLETIONS, body)


def error_of(answer: httpx.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["message"]


def digest_of(platform: Platform, key: str, name: str) -> str:
    digest: str = platform.api(key).get(f"/v1/adapters/{name}").json()["digest"]
    return digest


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/responses"])
def test_the_engine_gets_every_adapter_with_its_weight_and_the_headers_name_the_versions(
    platform: Platform, key: str, path: str
) -> None:
    prompts = {COMPLETIONS: {"prompt": "hi"}, CHAT: {"messages": [{"role": "user", "content": "hi"}]}}
    adapters = [{"name": "formal", "weight": 0.5}, {"name": "brief@1", "weight": -2}]
    answer = post(
        platform, key, path, {"model": "base", "adapters": adapters} | prompts.get(path, {"input": "hi"})
    )
    assert answer.status_code == 200 and answer.json()["model"] == "base"
    (request,) = platform.engine.requests
    digests = {name: digest_of(platform, key, name) for name in ("formal", "brief")}
    assert {version.digest: weight for version, weight in request.adapters} == {
        digests["formal"]: 0.5,
        digests["brief"]: -2.0,
    }
    assert all(version.tenant == platform.tenant_id("acme") for version in request.versions)
    names = {digests["formal"]: "formal@1", digests["brief"]: "brief@1"}
    in_order = [version.digest for version in request.versions]
    assert answer.headers["x-slora-adapter"] == "+".join(names[digest] for digest in in_order)
    assert answer.headers["x-slora-adapter-digest"] == "+".join(in_order)


def test_the_same_sum_is_the_same_request_in_any_order_and_weights_of_one_version_are_added(
    platform: Platform, key: str
) -> None:
    formal, brief = {"name": "formal", "weight": 0.5}, {"name": "brief"}
    unused = {"name": "loud", "weight": 0}
    sums = [
        [formal, brief],
        [brief, formal],
        [{"name": "formal", "weight": 0.25}, brief, {"name": "formal@1", "weight": 0.25}],
    ]
    for adapters in (*sums, [formal, brief, unused]):
        assert ask(platform, key, adapters).status_code == 200
    first, *others = [request.adapters for request in platform.engine.requests]
    assert len(first) == 2 and all(other == first for other in others)
    assert ask(platform, key, [unused]).headers.get("x-slora-adapter") is None
    assert platform.engine.requests[-1].adapters == ()


@pytest.mark.parametrize(
    ("adapters", "param", "said"),
    [
        ([{"name": "formal"}] * 1000, "adapters", "has 1000 adapters; this server accepts at most 4"),
        ([{"name": "formal", "weight": 1e5}], "adapters.0.weight", "must be a number from -10000 to 10000"),
        ([{"name": "formal", "weight": "1"}], "adapters.0.weight", "number"),
        ([{"name": "formal", "weight": None}], "adapters.0.weight", "number"),
        ([{"weight": 1}], "adapters.0.name", "is missing"),
        ([{"name": "formal", "scale": 1}], "adapters.0.scale", "scale"),
        (["formal"], "adapters.0", "should be an object"),
        ({"name": "formal"}, "adapters", "list"),
        ([{"name": "brief"}, {"name": "base"}], "adapters.1.name", "not an adapter's name"),
        ([{"name": "default"}], "adapters.0.name", "not an adapter's name"),
        ([{"name": "formal", "weight": 9_000}, {"name": "formal@1", "weight": 9_000}], "adapters", "18000"),
    ],
)
def test_what_is_no_sum_of_adapters_is_refused_by_name(
    platform: Platform, key: str, adapters: Any, param: str, said: str
) -> None:
    status, named, message = error_of(ask(platform, key, adapters))
    assert (status, named) == (400, param) and said in message
    assert not platform.engine.requests


def test_a_quota_limits_the_adapters_of_one_request(platform: Platform) -> None:
    key = platform.key("acme")
    admin = platform.api(ADMIN_KEY)
    quota = f"/admin/keys/{key.split('_')[1]}/quota"
    assert admin.patch(quota, json={"composed_adapters": 1}).json()["limits"]["composed_adapters"] == 1
    assert admin.patch(quota, json={"composed_adapters": 17}).status_code == 400
    two = [{"name": "formal"}, {"name": "brief"}]
    status, param, message = error_of(ask(platform, key, two))
    assert (status, param) == (400, "adapters")
    assert "combines 2 adapters; the limit of this API key is 1 in one request (composed_adapters)" in message
    refused = post(platform, key, "/v1/embeddings", {"model": "base", "input": "a", "adapters": two})
    assert error_of(refused)[:2] == (400, "adapters")
    assert 'slora_quota_refusals_total{quota="composed_adapters"} 2.0' in admin.get("/metrics").text
    assert ask(platform, key, [two[0], two[1] | {"weight": 0}]).status_code == 200
    assert ask(platform, platform.key("acme"), two).status_code == 200


@pytest.mark.parametrize("weight", ["NaN", "Infinity", "1e400"])
def test_a_weight_that_is_no_finite_number_is_refused(platform: Platform, key: str, weight: str) -> None:
    body = f'{{"model": "base", "prompt": "a", "adapters": [{{"name": "formal", "weight": {weight}}}]}}'
    answer = platform.api(key).post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and not platform.engine.requests


def test_an_adapter_in_model_and_in_adapters_is_refused(platform: Platform, key: str) -> None:
    status, param, message = error_of(ask(platform, key, [{"name": "brief"}], model="formal"))
    assert (status, param) == (400, "model") and "'formal'" in message and "`adapters`" in message


def test_an_empty_list_asks_for_nothing(platform: Platform, key: str) -> None:
    for adapters in ([], None):
        assert ask(platform, key, adapters, model="formal").headers["x-slora-adapter"] == "formal@1"


def test_adapters_of_another_tenant_are_answered_like_names_that_do_not_exist(
    platform: Platform, key: str
) -> None:
    other = platform.key("rival")
    platform.upload(other, "secret").raise_for_status()
    answers = [ask(platform, key, [{"name": "formal"}, {"name": name}]) for name in ("secret", "nobody")]
    assert [answer.status_code for answer in answers] == [404, 404]
    texts = [
        answer.text.replace(name, "X") for answer, name in zip(answers, ("secret", "nobody"), strict=True)
    ]
    assert texts[0] == texts[1] and not platform.engine.requests


def test_a_key_with_an_allow_list_needs_every_adapter_and_the_base_model(platform: Platform) -> None:
    store, catalog = platform.services.keys.store, platform.find(AnswerServices).catalog

    def key_for(*models: str) -> str:
        allowed = catalog.read_allow_list(platform.tenant_id("acme"), models, None)
        return KeyAdmin(store).create_key(platform.tenant_id("acme"), None, models=allowed)[1].secret

    adapters = [{"name": "formal"}, {"name": "brief"}]
    assert ask(platform, key_for("base", "formal", "brief"), adapters).status_code == 200
    for models in (("base", "formal"), ("formal", "brief")):
        assert ask(platform, key_for(*models), adapters).status_code == 404


def test_adapters_with_different_chat_templates_complete_but_do_not_chat(
    platform: Platform, key: str
) -> None:
    adapters = [{"name": "formal"}, {"name": "loud"}]
    chat = {"model": "base", "messages": [{"role": "user", "content": "hi"}], "adapters": adapters}
    status, param, message = error_of(post(platform, key, CHAT, chat))
    assert (status, param) == (400, "adapters") and "different chat templates" in message
    assert ask(platform, key, adapters).status_code == 200
    assert post(platform, key, CHAT, chat | {"adapters": adapters[1:]}).status_code == 200
    assert bytes(platform.engine.requests[-1].prompt_token_ids[:4]) == b"<hi>"


def test_the_journal_has_the_digests_of_a_sum(platform: Platform, key: str) -> None:
    ask(platform, key, [{"name": "formal"}, {"name": "brief", "weight": 0.5}]).raise_for_status()
    (request,) = platform.engine.requests
    lines = b"".join(
        path.read_bytes() for path in (platform.directory / "usage").rglob("*") if path.is_file()
    )
    assert "+".join(version.digest for version in request.versions).encode() in lines


def test_the_limit_is_shown(platform: Platform, key: str) -> None:
    assert platform.api(key).get("/v1/limits").json()["adapters"] == 4
