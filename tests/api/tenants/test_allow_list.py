"""A key with an allow-list uses and sees only the models in it. All others answer as if they did not exist."""

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.adapters.hand_made import make_config, make_members, make_tensors
from tests.api.platform import ADMIN_KEY, Platform, post, running_platform
from tests.api.scripted_engine import ScriptedEngine, deltas_of
from tests.api.tenants.test_authentication import walk_routes

PROMPT = {"prompt": "hi", "max_tokens": 1}
# Each adapter has the versions 1 and 2 and the alias `prod`, which serves version 1.
ADAPTERS = ("hidden", "voice", "writer")


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    with running_platform(tmp_path_factory.mktemp("data"), ScriptedEngine([deltas_of(b"ok")])) as running:
        full = running.key("acme")
        for at, name in enumerate(ADAPTERS):
            for seed in (2 * at, 2 * at + 1):
                members = make_members(make_config(r=2), make_tensors(2, seed))
                assert running.upload(full, name, members).status_code == 201
            with running.client(full) as client:
                path = f"/v1/adapters/{name}/aliases/prod"
                client.put(path, json={"versions": {"1": 100}}).raise_for_status()
        yield running


def create(platform: Platform, **body: Any) -> httpx.Response:
    return platform.api(ADMIN_KEY).post("/admin/tenants/acme/keys", json=body)


def key_with(platform: Platform, *models: str, **body: Any) -> str:
    answer = create(platform, models=list(models), **body)
    assert answer.status_code == 201 and answer.json()["models"] == sorted(models)
    key: str = answer.json()["key"]
    return key


def usable(platform: Platform, key: str, *models: str) -> list[str]:
    """Those of the models with which a completion succeeds. The others are a 404 that does not tell why."""
    found = []
    for model in models:
        answer = post(platform, key, "/v1/completions", {"model": model, **PROMPT})
        if answer.status_code == 200:
            found.append(model)
        else:
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "model_not_found"
    return found


EVERY = (
    "base", "voice", "voice@latest", "voice@prod", "voice@1", "voice@2", "hidden", "hidden@prod", "hidden@1",
)  # fmt: skip


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        (["voice"], ["voice", "voice@latest", "voice@prod", "voice@1", "voice@2"]),
        (["voice@prod"], ["voice@prod"]),
        (["voice@latest"], ["voice", "voice@latest"]),
        (["base"], ["base"]),
        (["base", "hidden@prod"], ["base", "hidden@prod"]),
    ],
)
def test_only_the_models_of_the_allow_list_answer(
    platform: Platform, models: list[str], expected: list[str]
) -> None:
    assert usable(platform, key_with(platform, *models), *EVERY) == expected


def test_the_default_model_is_checked_like_any_other(platform: Platform) -> None:
    assert usable(platform, key_with(platform, "voice", adapter="voice@prod"), "default") == ["default"]
    assert usable(platform, key_with(platform, "voice"), "default") == [], "the base model is not permitted"
    assert usable(platform, key_with(platform, "base"), "default") == ["default"]


def test_a_forbidden_model_answers_like_one_that_does_not_exist(platform: Platform) -> None:
    key = key_with(platform, "voice")
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    prompts: dict[str, dict[str, Any]] = {
        "/v1/completions": PROMPT,
        "/v1/chat/completions": chat,
        "/v1/responses": {"input": "hi"},
        "/v1/responses/input_tokens": {"input": "hi"},
        "/v1/messages": {**chat, "max_tokens": 1},
        "/v1/messages/count_tokens": chat,
        "/v1/classify": {"input": "a"},
        "/v1/score": {"text_1": "a", "text_2": "a"},
        "/v1/rerank": {"query": "a", "documents": ["a"]},
    }
    for path, prompt in prompts.items():
        forbidden = post(platform, key, path, {"model": "hidden", **prompt})
        unknown = post(platform, key, path, {"model": "nothing", **prompt})
        assert forbidden.status_code == unknown.status_code == 404
        texts = [re.sub("req_[0-9a-f]+", "", answer.text) for answer in (forbidden, unknown)]
        assert texts[0] == texts[1].replace("nothing", "hidden")
    # A parameter of the query does not change the model.
    bypass = platform.api(key).post("/v1/completions?model=voice", json={"model": "hidden", **PROMPT})
    assert bypass.status_code == 404


def test_no_route_with_the_name_of_a_model_answers_for_a_forbidden_one(platform: Platform) -> None:
    key = key_with(platform, "voice")
    checked = 0
    bodies = {"PUT": {"versions": {"1": 100}}}
    for route in walk_routes(platform):
        if route.path.startswith("/admin") or not any(
            part in route.path for part in ("{name}", "{reference}", "{model:path}")
        ):
            continue
        for method in route.methods:
            answers = []
            for name in ("hidden", "nothing"):
                path = route.path.replace("{model:path}", "{name}").format(
                    name=name, reference=name, alias="prod"
                )
                answers.append(platform.api(key).request(method, path, json=bodies.get(method)))
            assert [answer.status_code for answer in answers] == [404, 404], (method, route.path)
            assert answers[0].text == answers[1].text.replace("nothing", "hidden")
            checked += 1
    assert checked >= 10
    assert platform.api(platform.key("acme")).get("/v1/adapters/hidden").json()["version"] == 2, (
        "nothing was changed"
    )


def test_lists_have_only_what_the_key_may_use(platform: Platform) -> None:
    def listed(key: str, path: str, **params: Any) -> list[str]:
        field = "id" if path == "/v1/models" else "name"
        client = platform.api(key)
        found: list[str] = []
        while True:
            page = client.get(path, params=params).raise_for_status().json()
            found += [one[field] for one in page["data"]]
            if not page["has_more"]:
                return found
            params["after"] = page["last_id"]

    mixed = key_with(platform, "base", "writer", "voice@prod")
    for limit in ({}, {"limit": 1}, {"limit": 2}):
        models = listed(mixed, "/v1/models", **limit)
        assert models == ["base", "voice@prod", "writer", "writer@prod"]
        assert usable(platform, mixed, *models) == models
        assert listed(mixed, "/v1/adapters", **limit) == ["writer"]
    assert listed(key_with(platform, "voice", "writer"), "/v1/adapters", limit=1) == ["voice", "writer"]
    client = platform.api(mixed)
    assert client.get("/v1/models/voice@prod").status_code == 200
    assert client.get("/v1/models/voice").status_code == 404
    assert client.get("/v1/adapters/voice/aliases/prod").status_code == 200
    assert client.get("/v1/adapters/voice/aliases").status_code == 404


def test_a_key_changes_only_adapters_that_it_has_as_a_whole(platform: Platform) -> None:
    key = key_with(platform, "writer", "voice@prod")
    members = make_members(make_config(r=2), make_tensors(2, 9))
    assert platform.upload(key, "writer", members).status_code == 201
    for name in ("voice", "brand-new"):
        refused = platform.upload(key, name, members)
        assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")
        assert f"does not contain `{name}`" in refused.json()["error"]["message"]
    client = platform.api(key)
    move = {"versions": {"2": 100}}
    assert client.put("/v1/adapters/voice/aliases/prod", json=move).status_code == 404
    assert client.put("/v1/adapters/writer/aliases/prod", json=move).status_code == 200


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        ({"models": []}, "models", "has 0 entries"),
        ({"models": ["voice"] * 101}, "models", "has 101 entries"),
        (
            {"models": ["voice", "nothing"]},
            "models",
            "'nothing', which is neither the base model nor an adapter",
        ),
        ({"models": ["voice@nothing"]}, "models", "'voice@nothing'"),
        ({"models": ["voice@1"]}, "models", "Name an adapter as `name` or `name@alias`"),
        ({"models": ["default"]}, "models", "'default'"),
        ({"models": ["No Name"]}, "models", "'No Name'"),
        ({"models": ["voice"], "adapter": "writer"}, "adapter", "which `models` does not permit"),
        ({"models": ["voice@prod"], "adapter": "voice"}, "adapter", "which `models` does not permit"),
    ],
)
def test_an_invalid_allow_list_is_refused_by_field(
    platform: Platform, body: dict[str, Any], param: str, reason: str
) -> None:
    num_keys = len(platform.services.keys.admin.list_keys(platform.tenant_id("acme")))
    refused = create(platform, **body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert reason in refused.json()["error"]["message"]
    assert len(platform.services.keys.admin.list_keys(platform.tenant_id("acme"))) == num_keys


def test_another_tenants_adapter_is_not_accepted_in_an_allow_list(platform: Platform) -> None:
    platform.key("stranger")
    admin = platform.api(ADMIN_KEY)
    refused = admin.post("/admin/tenants/stranger/keys", json={"models": ["voice"]})
    assert refused.status_code == 400
    assert admin.post("/admin/tenants/nobody/keys", json={"models": ["voice"]}).status_code == 404


def test_an_unknown_model_is_answered_with_a_near_name_that_the_key_may_use(platform: Platform) -> None:
    keys = {name: platform.key(name) for name in ("near", "elsewhere")}
    for name in ("greeter", "llama-3.2_sql.lora"):
        platform.upload(keys["near"], name).raise_for_status()
    platform.upload(keys["elsewhere"], "greeter-two").raise_for_status()
    only = (
        platform.api(ADMIN_KEY)
        .post("/admin/tenants/near/keys", json={"models": ["greeter@latest"]})
        .json()["key"]
    )

    def ask(key: str, model: str) -> list[str]:
        client = platform.api(key)
        body = {"model": model, "prompt": "x"}
        answers = [client.post("/v1/completions", json=body), client.get(f"/v1/models/{model}")]
        assert {answer.status_code for answer in answers} == {404}
        return [answer.json()["error"]["message"].partition(" does not exist.")[2] for answer in answers]

    for asked, near in (
        ("Greter", "greeter"),
        ("greeter@7", "greeter"),
        ("Llama-3.2_SQL.LoRA", "llama-3.2_sql.lora"),
        ("greeter-two", "greeter"),
    ):
        assert ask(keys["near"], asked) == [f" Did you mean `{near}`?"] * 2
    assert ask(keys["near"], "nothing like it") == ["", ""]
    assert ask(only, "llama-3.2_sql.lora") == ask(only, "llama-3.2_sql.lor") == ["", ""]
    assert ask(only, "greeter@1") == [" Did you mean `greeter`?"] * 2
