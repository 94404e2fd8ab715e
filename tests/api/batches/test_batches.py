"""Batches over HTTP with the openai client, on a scripted engine."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from slora.core.request import FinishReason
from slora_api.batches import batch_run, batch_runner
from slora_api.usage.usage_shipper import UsageShipper
from tests.api.command import run_command
from tests.api.platform import ADMIN_KEY, Platform, running_platform
from tests.api.scripted_engine import ScriptedEngine, deltas_of
from tests.api.served import wait_until

PATH = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch notices every 2 s that it was cancelled, or that it may go on."""
    monkeypatch.setattr(batch_run, "RENEW_S", 0.1)


@pytest.fixture
def platform(tmp_path: Path) -> Iterator[Platform]:
    engine = ScriptedEngine([deltas_of(b"hi", FinishReason.STOP)])
    with running_platform(tmp_path, engine, runs_batches=True) as platform:
        yield platform


def line_of(custom_id: str, **changes: Any) -> dict[str, Any]:
    body = {"model": "default", "max_tokens": 4, "messages": [{"role": "user", "content": custom_id}]}
    return {"custom_id": custom_id, "method": "POST", "url": PATH, "body": body} | changes


def write_lines(lines: list[Any]) -> bytes:
    return b"".join((one if isinstance(one, bytes) else json.dumps(one).encode()) + b"\n" for one in lines)


def submit(client: openai.OpenAI, lines: list[Any]) -> Any:
    file = client.files.create(file=("input.jsonl", write_lines(lines)), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=PATH, completion_window="24h")


def wait_for(client: openai.OpenAI, batch_id: str, *statuses: str) -> Any:
    wait_until(lambda: client.batches.retrieve(batch_id).status in statuses)
    return client.batches.retrieve(batch_id)


def read_answers(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def test_the_openai_client_runs_a_batch_whose_broken_line_fails_alone(platform: Platform) -> None:
    client = platform.sdk(platform.key("acme"))
    broken = line_of("broken")
    broken["body"]["temperature"] = "warm"
    lines = [line_of("first"), broken, line_of("stream"), line_of("last")]
    lines[2]["body"]["stream"] = True
    file = client.files.create(file=("input.jsonl", write_lines(lines)), purpose="batch")
    assert (file.bytes, file.filename, file.purpose) == (len(write_lines(lines)), "input.jsonl", "batch")
    created = client.batches.create(
        input_file_id=file.id, endpoint=PATH, completion_window="24h", metadata={"run": "7"}
    )
    batch = wait_for(client, created.id, "completed")
    assert batch.request_counts is not None and batch.metadata == {"run": "7"}
    assert batch.request_counts.to_dict() == {"total": 4, "completed": 2, "failed": 2}
    answers = read_answers(client, batch.output_file_id)
    assert [(one["custom_id"], one["line"], one["error"]) for one in answers] == [
        ("first", 1, None),
        ("last", 4, None),
    ]
    response = answers[0]["response"]
    assert response["status_code"] == 200 and response["request_id"]
    assert response["body"]["choices"][0]["message"]["content"] == "hi"
    errors = read_answers(client, batch.error_file_id)
    assert [(one["custom_id"], one["line"]) for one in errors] == [("broken", 2), ("stream", 3)]
    assert errors[0]["response"]["status_code"] == 400
    assert errors[0]["response"]["body"]["error"]["param"] == "temperature"
    assert "`stream` is true" in errors[1]["error"]["message"]
    assert all(request.is_background for request in platform.engine.requests)
    check_usage(platform, client.api_key)
    assert {one.id for one in client.batches.list()} == {created.id}
    assert [one.purpose for one in client.files.list()] == ["batch_output", "batch_output", "batch"]
    assert [one.id for one in client.files.list(purpose="batch")] == [file.id]
    first, second = client.files.list(limit=1), client.files.list(limit=2, order="asc")
    assert first.has_next_page() and second.data[0].id == file.id
    client.files.delete(file.id)
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


def check_usage(platform: Platform, key: str) -> None:
    """The usage of the two computed lines is that of a batch, at half the price."""
    prompt_tokens = sum(len(request.prompt_token_ids) for request in platform.engine.requests)
    platform.find(UsageShipper).ship()
    http = platform.api(key)
    ((result,),) = [bucket["results"] for bucket in http.get("/v1/usage?limit=1").json()["data"]]
    assert (result["num_model_requests"], result["num_batch_requests"]) == (2, 2)
    assert result["batch_input_tokens"] == result["input_tokens"] == prompt_tokens
    assert result["batch_output_tokens"] == result["output_tokens"] == 6
    assert (result["billed_input_tokens"], result["billed_output_tokens"]) == (prompt_tokens / 2, 3)


def test_each_broken_line_fails_alone_with_its_number(platform: Platform) -> None:
    client = platform.sdk(platform.key("acme"))
    lines = [
        line_of("a"),
        b"no json",
        b"",
        line_of("a"),
        line_of("b", url="/v1/completions"),
        line_of("c", method="GET"),
        {"custom_id": 7},
        line_of("d", body=[]),
        b"[]",
        b'{"custom_id": "e' + b"e" * (1 << 20) + b'"}',
    ]
    platform.engine.answers = [deltas_of(b"hi")]
    batch = wait_for(client, submit(client, lines).id, "completed")
    counts = batch.request_counts
    assert counts is not None and (counts.total, counts.completed, counts.failed) == (9, 1, 8)
    (answered,) = read_answers(client, batch.output_file_id)
    assert (answered["custom_id"], answered["line"]) == ("a", 1)
    failed = sorted(read_answers(client, batch.error_file_id), key=lambda one: one["line"])
    assert [(one["error"]["code"], one["line"], one["custom_id"]) for one in failed] == [
        ("invalid_json_line", 2, None),
        ("duplicate_custom_id", 4, None),
        ("invalid_url", 5, "b"),
        ("invalid_method", 6, "c"),
        ("invalid_custom_id", 7, None),
        ("invalid_body", 8, "d"),
        ("invalid_json_line", 9, None),
        ("line_too_long", 10, None),
    ]
    assert "in line 1 and in line 4" in failed[1]["error"]["message"]
    assert len(platform.engine.requests) == 1


def test_a_cancelled_batch_keeps_its_answers_and_aborts_its_lines(platform: Platform) -> None:
    client = platform.sdk(platform.key("acme"))
    platform.engine.hang = True
    platform.engine.answers = [deltas_of(b"hi")[:1]]
    batch = submit(client, [line_of(str(number)) for number in range(3)])
    wait_for(client, batch.id, "in_progress")
    with pytest.raises(openai.ConflictError, match="is the input of the batch"):
        client.files.delete(batch.input_file_id)
    wait_until(lambda: len(platform.engine.requests) == 3)
    assert client.batches.cancel(batch.id).status == "cancelling"
    ended = wait_for(client, batch.id, "cancelled")
    assert ended.output_file_id is None and ended.cancelled_at and ended.cancelling_at
    wait_until(lambda: len(platform.engine.aborted) == 3)
    with pytest.raises(openai.ConflictError, match="is cancelled, so it cannot be cancelled"):
        client.batches.cancel(batch.id)


def test_another_tenant_sees_neither_files_nor_batches(platform: Platform) -> None:
    owner, other = platform.sdk(platform.key("acme")), platform.sdk(platform.key("rival"))
    batch = wait_for(owner, submit(owner, [line_of("a")]).id, "completed")
    for call in (
        lambda: other.files.retrieve(batch.input_file_id),
        lambda: other.files.content(batch.output_file_id or ""),
        lambda: other.files.delete(batch.input_file_id),
        lambda: other.batches.retrieve(batch.id),
        lambda: other.batches.cancel(batch.id),
        lambda: other.batches.create(
            input_file_id=batch.input_file_id, endpoint=PATH, completion_window="24h"
        ),
    ):
        with pytest.raises(openai.NotFoundError):
            call()
    assert not other.files.list().data and not other.batches.list().data


@pytest.mark.parametrize(
    ("form", "file", "status", "words"),
    [
        ({}, b"{}", 400, "`purpose` is missing"),
        ({"purpose": "fine-tune"}, b"{}", 400, "`purpose` is 'fine-tune'; this server accepts `batch`"),
        ({"purpose": "batch"}, None, 400, "`file` is missing"),
        ({"purpose": "batch"}, b"", 400, "`file` is empty"),
        ({"purpose": "batch", "colour": "red"}, b"{}", 400, "`colour` is not a multipart field"),
        ({"purpose": "batch", "expires_after[seconds]": "7"}, b"{}", 400, "needs `anchor`"),
        (
            {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "7"},
            b"{}",
            400,
            "it must be a whole number from 3600 to 2592000",
        ),
        ({"purpose": "batch" + "h" * 300}, b"{}", 400, "`purpose` is larger than 256 bytes"),
        ({"purpose": "batch"}, b"x" * 5000, 413, "larger than 4096 bytes"),
    ],
)
def test_a_bad_upload_is_refused_with_its_field(
    small: Platform, form: dict[str, str], file: bytes | None, status: int, words: str
) -> None:
    files = {"nothing": b""} if file is None and not form else {} if file is None else {"file": file}
    client = small.api(small.key("acme"))
    if file is None:
        boundary = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n'
        headers = {"Content-Type": "multipart/form-data; boundary=b"}
        answer = client.post("/v1/files", content=boundary, headers=headers)
    else:
        answer = client.post("/v1/files", data=form, files=files)
    assert (answer.status_code, words in answer.text) == (status, True), answer.text


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """A platform with low limits."""
    limits = {
        "max_file_bytes": 4096,
        "max_files_per_tenant": 2,
        "max_file_bytes_per_tenant": 5000,
        "max_batches_per_tenant": 1,
    }
    engine = ScriptedEngine([deltas_of(b"hi")])
    with running_platform(tmp_path_factory.mktemp("small"), engine, **limits) as platform:
        yield platform


def upload(client: httpx.Client, content: bytes = b"{}") -> httpx.Response:
    return client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", content)})


def test_a_tenants_files_and_batches_are_limited(small: Platform) -> None:
    client = small.api(small.key("limited"))
    file_id = upload(client, b"x" * 3000).json()["id"]
    answer = upload(client, b"x" * 3000)
    assert answer.status_code == 409 and "max_file_bytes_per_tenant" in answer.text
    assert upload(client).status_code == 200
    answer = upload(client)
    assert answer.status_code == 409 and "max_files_per_tenant" in answer.text
    body = {"input_file_id": file_id, "endpoint": PATH, "completion_window": "24h"}
    assert client.post("/v1/batches", json=body).status_code == 200
    answer = client.post("/v1/batches", json=body)
    assert answer.status_code == 409 and "max_batches_per_tenant" in answer.text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"input_file_id": 7}, "input_file_id"),
        ({"metadata": {str(number): "" for number in range(17)}}, "at most 16"),
        ({"metadata": {"a": "b" * 513}}, "too long"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_bad_batch_is_refused_with_its_field(small: Platform, changes: dict[str, Any], words: str) -> None:
    body = {"input_file_id": "file-0", "endpoint": PATH, "completion_window": "24h"} | changes
    answer = small.api(small.key("acme")).post("/v1/batches", json=body)
    assert answer.status_code == 400 and words in answer.text, answer.text


def test_the_command_line_submits_a_batch_and_prints_its_answers(platform: Platform, tmp_path: Path) -> None:
    variables = {"SLORA_URL": platform.url, "SLORA_API_KEY": platform.key("acme")}

    def run(*arguments: str) -> str:
        ended = run_command("batch", *arguments, **variables)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    path = tmp_path / "lines.jsonl"
    path.write_bytes(write_lines([line_of("first"), line_of("second", body={"model": "default"})]))
    batch = json.loads(run("submit", str(path), "--wait", "--json"))
    assert batch["status"] == "completed"
    assert [json.loads(line)["custom_id"] for line in run("output", batch["id"]).splitlines()] == ["first"]
    (failed,) = map(json.loads, run("output", batch["id"], "--errors").splitlines())
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("second", 400)
    assert f"{batch['id']}  completed  1 + 1 of 2" in run("list")
    path.write_bytes(b"\n")
    assert "The file has no lines" in run("submit", str(path), "--wait")
    refused = run_command("batch", "cancel", batch["id"], **variables)
    assert refused.returncode == 1 and "is completed, so it cannot be cancelled" in refused.stderr


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2}, "choices"),
        ("/v1/responses", {"input": "hello"}, "output"),
        ("/v1/embeddings", {"input": ["a", "b"]}, "data"),
    ],
)
def test_a_batch_may_use_any_endpoint_of_its_list(
    platform: Platform, path: str, body: dict[str, Any], field: str
) -> None:
    client = platform.sdk(platform.key("acme"))
    line = line_of("a", url=path, body={"model": "base", **body})
    file = client.files.create(file=("input.jsonl", write_lines([line])), purpose="batch")
    endpoint: Any = path
    created = client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")
    (answer,) = read_answers(client, wait_for(client, created.id, "completed").output_file_id)
    assert answer["response"]["status_code"] == 200 and answer["response"]["body"][field]
    ids = [request.request_id for request in platform.engine.requests]
    num_prompts = 2 if isinstance(body.get("prompt", body.get("input")), list) else 1
    assert ids == [f"{created.id}-1-{index}" for index in range(num_prompts)]
    assert all(request.is_background for request in platform.engine.requests)


def test_a_line_leaves_half_of_a_quota_to_interactive_requests_and_is_sent_again(platform: Platform) -> None:
    key = platform.key("acme")
    quota = {"requests_per_minute": 2, "concurrent_answers": 1}
    platform.api(ADMIN_KEY).patch("/admin/tenants/acme/quota", json=quota).raise_for_status()
    client = platform.sdk(key)
    batch = submit(client, [line_of("first"), line_of("second")])
    wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed == 1)  # type: ignore[union-attr]
    chat = {"model": "base", "prompt": "a", "max_tokens": 2}
    assert platform.api(key).post("/v1/completions", json=chat).status_code == 200
    counts = client.batches.retrieve(batch.id).request_counts
    assert counts is not None and (counts.completed, counts.failed) == (1, 0)
    platform.api(ADMIN_KEY).patch("/admin/tenants/acme/quota", json=dict.fromkeys(quota)).raise_for_status()
    client.batches.cancel(batch.id)
    wait_for(client, batch.id, "cancelled")


def test_a_batch_that_expires_names_the_lines_without_an_answer(platform: Platform) -> None:
    client = platform.sdk(platform.key("acme"))
    file = client.files.create(
        file=("input.jsonl", write_lines([line_of("a"), line_of("b")])), purpose="batch"
    )
    batches = platform.services.batches
    now, batches.clock = batches.clock, lambda: time.time() - 86_401
    batch = client.batches.create(input_file_id=file.id, endpoint=PATH, completion_window="24h")
    batches.clock = now
    ended = wait_for(client, batch.id, "expired")
    assert ended.expired_at and ended.output_file_id is None and not platform.engine.requests
    errors = read_answers(client, ended.error_file_id)
    assert [(one["custom_id"], one["error"]["code"]) for one in errors] == [
        ("a", "batch_expired"),
        ("b", "batch_expired"),
    ]


def test_the_lines_of_a_revoked_key_fail(platform: Platform) -> None:
    client, revoked = platform.sdk(platform.key("acme")), platform.key("acme")
    file = client.files.create(file=("input.jsonl", write_lines([line_of("a")])), purpose="batch")
    platform.services.keys.admin.revoke_key(revoked.split("_")[1])
    created = platform.services.batches.create(
        platform.tenant_id("acme"), revoked.split("_")[1], PATH, file.id, None
    )
    ended = wait_for(client, created.batch_id, "completed")
    (error,) = read_answers(client, ended.error_file_id)
    assert error["response"]["status_code"] == 401 and not platform.engine.requests


def test_batches_that_wait_for_their_quota_hold_up_no_other_tenant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Born from a bug: lines that waited to be sent again kept all slots, and batches of one tenant all runs."""
    monkeypatch.setattr(batch_runner, "MAX_RUNNING", 2)
    monkeypatch.setattr(batch_runner, "NUM_RESERVED", 1)
    engine = ScriptedEngine([deltas_of(b"hi", FinishReason.STOP)])
    with running_platform(tmp_path, engine, runs_batches=True, batch_lines_in_flight=1) as platform:
        waiting, other = platform.sdk(platform.key("acme")), platform.sdk(platform.key("rival"))
        platform.api(ADMIN_KEY).patch(
            "/admin/tenants/acme/quota", json={"requests_per_minute": 2}
        ).raise_for_status()
        batches = [submit(waiting, [line_of("a"), line_of("b")]) for _ in range(2)]
        wait_until(lambda: len(engine.requests) == 1)
        ended = wait_for(other, submit(other, [line_of("c"), line_of("d")]).id, "completed")
        assert ended.request_counts.completed == 2
        for batch in batches:
            waiting.batches.cancel(batch.id)
            wait_for(waiting, batch.id, "cancelled")


def test_one_tenants_lines_leave_places_for_the_lines_of_another(tmp_path: Path) -> None:
    """Born from a bug: the slow lines of one tenant held all places, and others waited for half a minute."""
    engine = ScriptedEngine([deltas_of(b"hi", FinishReason.STOP)], hang=True)
    with running_platform(tmp_path, engine, runs_batches=True, batch_lines_in_flight=8) as platform:
        hostile, honest = platform.sdk(platform.key("acme")), platform.sdk(platform.key("rival"))
        engine.answers = [deltas_of(b"hi")[:1]]
        held = [submit(hostile, [line_of(str(n)) for n in range(20)]) for _ in range(3)]
        wait_until(lambda: len(engine.requests) == 6)
        batch = submit(honest, [line_of("a"), line_of("b")])
        wait_until(lambda: len(engine.requests) >= 7)
        tenants = [request.tenant for request in engine.requests]
        acme, rival = platform.tenant_id("acme"), platform.tenant_id("rival")
        assert (tenants.count(acme), tenants.count(rival)) in ((6, 1), (6, 2))
        for client, one in ((honest, batch), *((hostile, one) for one in held)):
            client.batches.cancel(one.id)
            wait_for(client, one.id, "cancelled")


def test_a_batch_whose_tenant_has_no_cpu_time_left_waits_and_can_be_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_runner, "BURST_S", 1e-6)
    monkeypatch.setattr(batch_runner, "REFILL", 1e-6)
    engine = ScriptedEngine([deltas_of(b"hi", FinishReason.STOP)])
    with running_platform(tmp_path, engine, runs_batches=True) as platform:
        client = platform.sdk(platform.key("acme"))
        batch = submit(client, [b"no json"] * 10_000)
        wait_until(lambda: bool(platform.services.batches.count_by_status()))
        client.batches.cancel(batch.id)
        ended = wait_for(client, batch.id, "cancelled")
        assert ended.request_counts.completed + ended.request_counts.failed < 1000


def test_a_file_of_blank_lines_fails_at_once(platform: Platform) -> None:
    client = platform.sdk(platform.key("acme"))
    file = client.files.create(file=("input.jsonl", b"\n" * (1 << 20)), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=PATH, completion_window="24h")
    errors = wait_for(client, batch.id, "failed").errors
    assert errors is not None and [one.code for one in errors.data] == ["too_many_lines"]


def test_a_batch_whose_answers_exceed_the_limit_fails_and_keeps_its_answers(tmp_path: Path) -> None:
    """Born from a bug: 26 KB of input wrote 390 MiB against a limit of 2 MiB."""
    engine = ScriptedEngine([deltas_of(b"x" * 200, FinishReason.STOP)])
    limits = {"max_file_bytes_per_tenant": 20_000, "batch_lines_in_flight": 1}
    with running_platform(tmp_path, engine, runs_batches=True, **limits) as platform:
        client = platform.sdk(platform.key("acme"))
        ended = wait_for(client, submit(client, [line_of(f"{n}") for n in range(50)]).id, "failed")
        (problem,) = ended.errors.data
        assert (
            problem.code == "file_bytes_exceeded" and "20000 (max_file_bytes_per_tenant)" in problem.message
        )
        answers = read_answers(client, ended.output_file_id)
        assert 5 < len(answers) == ended.request_counts.completed < 40
        assert [one["custom_id"] for one in answers] == [f"{n}" for n in range(len(answers))]
        assert sum(one.bytes for one in client.files.list()) <= 20_000
        blobs = (tmp_path / "adapters" / "blobs").rglob("content")
        assert sum(path.stat().st_size for path in blobs) <= 20_000
        client.files.delete(ended.output_file_id)
        wait_for(client, submit(client, [line_of("a")]).id, "completed")


def test_a_purge_deletes_the_bytes_of_files(platform: Platform) -> None:
    client, other = platform.sdk(platform.key("acme")), platform.sdk(platform.key("rival"))
    for one in (client, other):
        wait_for(one, submit(one, [line_of("a"), line_of("b", url="/other")]).id, "completed")
    blobs = platform.directory / "adapters" / "blobs"
    before = len(list(blobs.rglob("content")))
    report = (
        platform.api(ADMIN_KEY)
        .post("/admin/tenants/acme/purge", json={"confirm": "acme", "ledger": "keep"})
        .raise_for_status()
    )
    assert len(list(blobs.rglob("content"))) == before - 3 == 3, report.text
    assert {one.purpose for one in other.files.list()} == {"batch", "batch_output"}


def test_the_lines_of_a_suspended_tenant_wait_until_it_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Born from a bug: the lines that the engine was computing when the tenant was suspended failed with a 403."""
    monkeypatch.setattr(batch_run, "MAX_RETRY_S", 0.2)
    engine = ScriptedEngine([deltas_of(b"hi", FinishReason.STOP)])
    with running_platform(
        tmp_path, engine, runs_batches=True, follows=True, batch_lines_in_flight=1
    ) as platform:
        suspended, other = platform.sdk(platform.key("acme")), platform.sdk(platform.key("rival"))
        engine.hang, engine.answers = True, [deltas_of(b"hi")[:1]]
        batch = submit(suspended, [line_of("a"), line_of("b")])
        wait_until(lambda: len(engine.requests) == 1)
        admin = platform.api(ADMIN_KEY)
        admin.post("/admin/tenants/acme/suspend").raise_for_status()
        wait_until(lambda: len(engine.aborted) == 1)
        engine.hang, engine.answers = False, [deltas_of(b"hi", FinishReason.STOP)]
        wait_for(other, submit(other, [line_of("c")]).id, "completed")
        assert {request.tenant for request in engine.requests[1:]} == {platform.tenant_id("rival")}
        admin.post("/admin/tenants/acme/resume").raise_for_status()
        counts = wait_for(suspended, batch.id, "completed").request_counts
        assert (counts.completed, counts.failed) == (2, 0)
