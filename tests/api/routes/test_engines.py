"""Operators list and restart the engines of a host, over HTTP and with `slora engine`."""

import json
from functools import partial

import httpx
import pytest
from jsonschema import Draft202012Validator

from tests.api.command import run_command, run_slora
from tests.api.platform import ADMIN_KEY, Platform
from tests.api.scripted_engine import deltas_of

NAMES = ("engine-0", "engine-1")


@pytest.fixture
def admin(platform: Platform) -> httpx.Client:
    platform.engine.reset(deltas_of(b"ok"))
    platform.engine.names = NAMES
    platform.services.generator.metrics.restarts.clear()
    return platform.api(ADMIN_KEY)


def restart(admin: httpx.Client, name: str, **body: bool) -> httpx.Response:
    return admin.post(f"/admin/engines/{name}/restart", json=body)


def refusal(answer: httpx.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["message"]


def test_engines_are_listed_with_what_they_compute_or_why_they_do_not(
    platform: Platform, admin: httpx.Client
) -> None:
    platform.engine.lost["engine-1"] = "it is starting"
    platform.services.generator.metrics.restarts["engine-1"] = 3
    first, second = admin.get("/admin/engines").raise_for_status().json()["data"]
    assert (first["name"], first["serving"], first["detail"], first["restarts"]) == (
        "engine-0",
        True,
        None,
        0,
    )
    assert (first["device"], first["num_pages"], first["used_pages"], first["running"]) == ("cpu", 100, 40, 1)
    assert (second["serving"], second["detail"], second["restarts"]) == (False, "it is starting", 3)
    assert (second["num_pages"], second["steps_per_s"]) == (None, None)


def test_only_an_operator_sees_and_restarts_engines(platform: Platform, admin: httpx.Client) -> None:
    scraper = admin.post("/admin/keys", json={"name": "scraper", "scopes": ["metrics:read"]}).json()["key"]
    for key in (platform.key("acme"), scraper):
        client = platform.api(key)
        assert client.get("/admin/engines").status_code == 403
        assert restart(client, "engine-0").status_code == 403
    assert platform.engine.lost == {}


def test_a_restart_is_begun_as_the_openapi_document_says_and_is_in_the_audit_log(
    platform: Platform, admin: httpx.Client
) -> None:
    answer = restart(admin, "engine-0")
    assert answer.status_code == 202 and platform.engine.lost.keys() == {"engine-0"}
    document = admin.get("/openapi.json").json()
    operation = document["paths"]["/admin/engines/{name}/restart"]["post"]
    schema = operation["responses"]["202"]["content"]["application/json"]["schema"]
    Draft202012Validator(schema | {"components": document["components"]}).validate(answer.json())
    assert (answer.json()["name"], answer.json()["serving"]) == ("engine-0", False)
    (entry,) = admin.get("/admin/audit", params={"action": "engine.restart", "limit": 1}).json()["data"]
    assert (entry["target"], entry["actor"], entry["tenant"]) == ("engine-0", "bootstrap", "")
    assert entry["details"] == {"allow_outage": False}
    assert entry["request_id"] == answer.headers["x-request-id"]


def test_the_last_engine_that_serves_is_restarted_only_if_the_operator_accepts_the_outage(
    platform: Platform, admin: httpx.Client
) -> None:
    assert restart(admin, "engine-0").status_code == 202
    status, code, message = refusal(restart(admin, "engine-1"))
    assert (status, code) == (409, "engine_conflict")
    assert "no other engine serves" in message and "pause for up to 120 s" in message
    assert platform.engine.lost.keys() == {"engine-0"}
    assert restart(admin, "engine-1", allow_outage=True).status_code == 202
    assert platform.engine.lost.keys() == {"engine-0", "engine-1"}


def test_an_engine_that_stops_already_is_not_restarted_again(admin: httpx.Client) -> None:
    assert restart(admin, "engine-0").status_code == 202
    status, code, message = refusal(restart(admin, "engine-0", allow_outage=True))
    assert (status, code) == (409, "engine_conflict") and "it stops, and is then started again" in message


def test_an_unknown_engine_is_not_found(admin: httpx.Client) -> None:
    status, _, message = refusal(restart(admin, "engine-2"))
    assert status == 404 and "The engines of this server are engine-0, engine-1." in message


def test_the_command_restarts_one_engine_after_the_other(
    platform: Platform, admin: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = partial(run_slora, platform.url, "engine", SLORA_ADMIN_KEY=ADMIN_KEY)
    stopped: list[str] = []

    def start_again(_seconds: float) -> None:
        """Stands for the time between two looks at the engines, in which the supervisor starts the engine again."""
        (name,) = platform.engine.lost
        stopped.append(name)
        platform.engine.lost.clear()
        platform.services.generator.metrics.restarts[name] += 1

    monkeypatch.setattr("slora_api.operations.command.time.sleep", start_again)
    said = engine("restart", "--rolling").splitlines()
    assert stopped == list(NAMES)
    assert [line.split(" after ")[0] for line in said[1::2]] == [f"{name} serves again" for name in NAMES]
    assert [one["restarts"] for one in json.loads(engine("list", "--json"))] == [1, 1]
    heading, *rows = engine("list").splitlines()
    assert heading.startswith("ENGINE    STATE") and [row.split()[:3] for row in rows] == [
        [name, "serving", "cpu"] for name in NAMES
    ]


def test_the_command_stops_at_an_engine_that_does_not_come_back(
    platform: Platform, admin: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slora_api.operations.command.POLL_S", 1.01)
    command = ("engine", "restart", "--rolling", "--timeout", "1s")
    refused = run_slora(platform.url, *command, code=1, SLORA_ADMIN_KEY=ADMIN_KEY)
    assert platform.engine.lost.keys() == {"engine-0"}
    assert "engine-0 does not serve 1 s after its restart began" in refused


@pytest.mark.parametrize("arguments", [[], ["engine-0", "--rolling"]])
def test_the_command_needs_one_name_or_rolling(arguments: list[str]) -> None:
    ended = run_command("engine", "restart", *arguments, SLORA_ADMIN_KEY=ADMIN_KEY)
    assert ended.returncode == 1 and "name one engine, or give --rolling" in ended.stderr
