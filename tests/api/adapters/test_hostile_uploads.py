"""Sends the corpus of hostile uploads to a real server. Each is refused for its own reason and leaves nothing
behind."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest

from slora.models.model_spec import read_model_spec
from tests.api.adapters.hostile_uploads import HostileUpload, as_parts, kinds, proper
from tests.api.conftest import Kit
from tests.api.served import Served

# For two cores: one sends and one inspects.
_AT_ONCE = 2
# Memory that an allocator may keep after use. A retained body would be 100 MB.
_RSS_SLACK_BYTES = 48 << 20


@dataclass(frozen=True)
class Footprint:
    """State of a server: file sizes, adapters, the metric of resident adapters, and memory of its processes by pid."""

    files: dict[Path, int]
    adapters: list[str]
    resident: float | None
    rss_bytes: dict[int, int]


@dataclass(frozen=True)
class Outcome:
    before: Footprint
    after: Footprint
    answers: dict[str, httpx.Response]


def _footprint(server: Served, client: httpx.Client) -> Footprint:
    # The database and its log also grow and shrink for other reasons.
    paths = [path for path in server.data_dir.rglob("*") if path.is_file() and "slora.db" not in path.name]
    api = psutil.Process(server.process.pid)
    return Footprint(
        {path: path.stat().st_size for path in paths},
        [adapter["name"] for adapter in client.get("/v1/adapters").json()["data"]],
        server.metric("slora_resident_adapters"),
        {process.pid: process.memory_info().rss for process in (api, *api.children(recursive=True))},
    )


def _send(client: httpx.Client, one: HostileUpload) -> httpx.Response:
    if one.raw is not None:
        headers, body = one.raw
        return client.post(
            "/v1/adapters", content=body if isinstance(body, bytes) else body(), headers=headers
        )
    files = [(field, (file_name, raw)) for field, file_name, raw in one.parts]
    return client.post("/v1/adapters", data={"name": one.name}, files=files)


@pytest.fixture(scope="module")
def every(kit: Kit) -> dict[str, HostileUpload]:
    return kinds(read_model_spec(kit.base).shape("float32"))


@pytest.fixture(scope="module")
def corpus(every: dict[str, HostileUpload], soak: bool) -> dict[str, HostileUpload]:
    """The soak run sends every kind. The quick run sends the kinds that the API refuses, and one of 144
    inspected ones.

    `tests/adapters/inspection/test_inspection.py` covers all inspected kinds without a server.
    """
    return {
        name: one
        for at, (name, one) in enumerate(every.items())
        if soak or not one.inspected or at % 144 == 12
    }


@pytest.fixture(scope="module")
def outcome(server: Served, kit: Kit, corpus: dict[str, HostileUpload]) -> Outcome:
    """Sends the whole corpus concurrently to one server."""
    shape = read_model_spec(kit.base).shape("float32")
    with server.client(server.make_key("mallory")) as client:
        files = {field: (name, raw) for field, name, raw in as_parts(proper(shape))}
        client.post("/v1/adapters", data={"name": "good"}, files=files).raise_for_status()
        # The first refusals allocate memory that stays: renderers of templates, threads, buffers.
        for name in (
            "a chat template that is none",
            "a header that has 10 MB",
            "a header of 100 MB",
            "a body over the limit, as declared",
        ):
            _send(client, corpus[name])
        before = _footprint(server, client)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            answers = dict(zip(corpus, pool.map(partial(_send, client), corpus.values()), strict=True))
        return Outcome(before, _footprint(server, client), answers)


def test_every_kind_of_hostile_upload_has_its_own_error_message(every: dict[str, HostileUpload]) -> None:
    assert len(every) >= 200
    words = Counter((one.status, one.words) for one in every.values())
    assert [said for said, times in words.items() if times > 1] == []


def test_each_is_refused_for_its_own_reason(outcome: Outcome, corpus: dict[str, HostileUpload]) -> None:
    wrong = []
    for name, one in corpus.items():
        answer = outcome.answers[name]
        error = answer.json().get("error", {"message": answer.text, "code": None})
        codes = {error["code"] or "", *(reason["code"] for reason in error.get("reasons", ()))}
        if answer.status_code != one.status or one.words not in error["message"] or one.code not in codes:
            wrong.append(
                f"{name}: {answer.status_code} {codes} {error['message'][:300]!r}, expected {one.words!r}"
            )
    assert not wrong, "\n".join(wrong)


def test_nothing_is_left_on_disk_nor_in_registry_and_pool(outcome: Outcome) -> None:
    assert outcome.after.files == outcome.before.files
    assert outcome.after.adapters == outcome.before.adapters == ["good"]
    assert outcome.after.resident == outcome.before.resident


def test_hostile_uploads_leave_no_process_and_leak_no_memory(outcome: Outcome) -> None:
    before, after = outcome.before.rss_bytes, outcome.after.rss_bytes
    assert after.keys() == before.keys(), "an inspection outlived its upload, or a part of the server died"
    grown = {pid: after[pid] - before[pid] for pid in before if after[pid] - before[pid] > _RSS_SLACK_BYTES}
    assert not grown, grown
