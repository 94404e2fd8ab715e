"""The usage of each request is durable before its last byte leaves, and is recorded however the request ends."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

from slora.core.errors import EngineUnavailable, UsageJournalFull
from slora.core.request import EngineRequest, FinishReason, RequestTiming, RequestUsage, TokenDelta
from slora.core.sampling_params import SamplingParams
from slora.core.usage_journal import OpenSegment, UsageJournal, UsageRecord, closed_segments
from slora.text.answer import Answer
from slora_api.completions.services import AnswerServices
from slora_api.usage.usage_recorder import UsageRecorder
from tests.adapters.hand_made import make_members
from tests.api.platform import Platform, post
from tests.api.scripted_engine import ScriptedEngine, deltas_of
from tests.api.served import ask_and_leave, wait_for

PATH = "/v1/completions"
BODY = {"model": "base", "prompt": "hello"}


@pytest.fixture
def platform(shared: Platform) -> Platform:
    """The shared platform with an empty journal."""
    take_records(shared.directory, shared.services.generator.usage.journal)
    shared.engine.answers, shared.engine.hang = [deltas_of(b"answer")], False
    return shared


@pytest.fixture
def key(platform: Platform) -> str:
    return platform.key("acme")


def take_records(directory: Path, journal: UsageJournal) -> list[UsageRecord]:
    """Removes all records from the journal and returns them."""
    journal.rotate().result()
    found = []
    for segment in closed_segments(directory / "usage"):
        found += segment.records
        segment.delete()
    return found


def records_of(platform: Platform) -> list[UsageRecord]:
    recorder = platform.services.generator.usage
    wait_for(lambda: recorder.num_open == 0 or None)
    return take_records(platform.directory, recorder.journal)


class HeldDisk:
    """Holds the writes of the journal until `release`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self._released = threading.Event(), threading.Event()
        append = OpenSegment.append

        def wait(segment: OpenSegment, lines: bytes) -> None:
            self.reached.set()
            assert self._released.wait(60)
            append(segment, lines)

        monkeypatch.setattr(OpenSegment, "append", wait)

    def release(self) -> None:
        self._released.set()


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    return (json.loads(line[6:]) for line in lines if line.startswith("data: {"))


def test_the_last_chunk_of_a_stream_waits_for_the_journal(
    platform: Platform, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = HeldDisk(monkeypatch)
    body = {**BODY, "stream": True}
    with platform.client(key) as client, client.stream("POST", PATH, json=body) as answer:
        chunks = events(answer.iter_lines())
        text = "".join(next(chunks)["choices"][0]["text"] for _ in range(5))
        assert disk.reached.wait(60)
        read: list[dict[str, Any]] = []
        reader = threading.Thread(target=lambda: read.extend(chunks))
        reader.start()
        reader.join(0.1)
        assert reader.is_alive() and not read, "the record is not durable yet"
        disk.release()
        reader.join()
    assert text + read[-1]["choices"][0]["text"] == "answer"
    assert read[-1]["choices"][0]["finish_reason"] == "length"
    assert len(records_of(platform)) == 1


def test_a_json_answer_waits_for_the_journal(
    platform: Platform, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = HeldDisk(monkeypatch)
    answers: list[httpx.Response] = []
    sender = threading.Thread(target=lambda: answers.append(post(platform, key, PATH, BODY)))
    sender.start()
    assert disk.reached.wait(60)
    sender.join(0.1)
    assert not answers
    disk.release()
    sender.join()
    assert answers[0].status_code == 200


def test_a_record_names_tenant_key_and_adapter(platform: Platform, key: str) -> None:
    platform.upload(key, "voice", make_members()).raise_for_status()
    for model in ("voice", "base"):
        assert post(platform, key, PATH, {**BODY, "model": model}).status_code == 200
    voice, base = records_of(platform)
    digest = platform.find(AnswerServices).catalog.describe_adapter(platform.tenant_id("acme"), "voice")[
        "digest"
    ]
    assert (voice.tenant, voice.account, voice.adapter_digest) == (
        *(platform.tenant_id("acme"), key.split("_")[1]),
        digest,
    )
    assert base.adapter_digest is None
    assert base.usage == RequestUsage(len(BODY["prompt"]), 0, 6, 0, 0.75) and base.is_complete


def test_each_prompt_of_a_request_has_a_record(platform: Platform, key: str) -> None:
    platform.engine.answers = [
        [TokenDelta((65,), index=at) for at in (0, 1)]
        + [TokenDelta((66,), FinishReason.LENGTH, index=at) for at in (0, 1)]
    ]
    answer = post(platform, key, PATH, {**BODY, "prompt": ["one", "second"], "n": 2})
    usage = answer.raise_for_status().json()["usage"]
    records = records_of(platform)
    assert sorted(record.usage.prompt_tokens for record in records) == [3, 6]
    assert sum(record.usage.prompt_tokens for record in records) == usage["prompt_tokens"]
    assert sum(record.usage.generated_tokens for record in records) == usage["completion_tokens"] == 8


def test_a_client_that_disconnects_is_billed_for_what_was_computed(platform: Platform, key: str) -> None:
    platform.engine.answers, platform.engine.hang = [deltas_of(b"answer")[:4]], True
    client = platform.api(key)
    with client.stream("POST", PATH, json={**BODY, "stream": True}) as answer:
        assert next(events(answer.iter_lines()))
    ask_and_leave(client, PATH, lambda: len(platform.engine.hung) == 2, json=BODY)
    assert [record.usage.generated_tokens for record in records_of(platform)] == [4, 4]


def test_a_request_whose_engine_dies_is_recorded_with_the_tokens_that_arrived(
    platform: Platform, key: str
) -> None:
    platform.engine.answers = [
        [*deltas_of(b"answer")[:3], EngineUnavailable("it died")],
        [EngineUnavailable("it died before the first token")],
    ]
    num_requests = len(platform.engine.requests)
    for _ in range(2):
        assert post(platform, key, PATH, BODY).status_code == 503
    assert len(platform.engine.requests) == num_requests + 2
    (record,) = records_of(platform)
    assert (record.usage, record.is_complete) == (RequestUsage(5, 0, 3), False)


def test_requests_are_refused_before_the_engine_while_the_journal_is_full(
    platform: Platform, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = UsageJournalFull("it has 5 bytes and the limit is 4")
    monkeypatch.setattr(platform.services.generator.usage.journal, "check", Mock(side_effect=refusal))
    num_requests = len(platform.engine.requests)
    answer = post(platform, key, PATH, BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "usage_journal_full")
    assert "it has 5 bytes and the limit is 4" in answer.json()["error"]["message"]
    assert answer.headers["Retry-After"] and len(platform.engine.requests) == num_requests


TIMING = RequestTiming(1.0, 0.5, True, 2.0, 2.5, 3.0, 4.0)


def make_answer(request_id: str) -> Answer:
    return Answer(EngineRequest(request_id, "t", [1, 2], (), SamplingParams(), account="key1"), None)


def test_the_report_of_each_request_is_acknowledged_when_it_is_durable(tmp_path: Path) -> None:
    """Also without a coroutine that streams the answer, and if there is nothing to record."""
    engine = ScriptedEngine()

    async def report() -> None:
        answers = [make_answer(name) for name in ("complete", "cut", "refused", "lost")]
        opened = [recorder.open(answer) for answer in answers]
        answers[1].take(TokenDelta((5,), num_cached=1))
        engine.on_usage("complete", RequestUsage(2, 1, 1, 100, 0.25), TIMING)
        engine.on_usage("cut", None, None)
        engine.on_usage("refused", RequestUsage(), None)
        engine.on_usage("lost", None, None)
        engine.on_usage("of a canary", RequestUsage(1), TIMING)
        await recorder.wait(opened)
        while len(engine.acknowledged) < 5:
            await asyncio.sleep(0.001)

    with closing(UsageJournal(tmp_path / "usage")) as journal:
        seen: list[tuple[str, RequestUsage, RequestTiming]] = []
        recorder = UsageRecorder(
            engine,
            journal,
            lambda: 7.5,
            observe=lambda request, usage, timing: seen.append((request.request_id, usage, timing)),
        )
        asyncio.run(report())
        assert recorder.num_open == 0
        # Neither a request without a timing nor the request of a canary is observed.
        assert seen == [("complete", RequestUsage(2, 1, 1, 100, 0.25), TIMING)]
        complete, cut = sorted(take_records(tmp_path, journal), key=lambda record: record.request_id)
    assert sorted(engine.acknowledged) == ["complete", "cut", "lost", "of a canary", "refused"]
    assert complete == UsageRecord("complete", "t", "key1", None, 7.5, RequestUsage(2, 1, 1, 100, 0.25))
    assert cut == UsageRecord("cut", "t", "key1", None, 7.5, RequestUsage(2, 1, 1), is_complete=False)


def test_closing_the_recorder_hands_over_the_records_that_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ScriptedEngine()

    async def report() -> None:
        for name in ("held", "waits"):
            recorder.open(make_answer(name))
            engine.on_usage(name, RequestUsage(2, 0, 1), TIMING)
            await asyncio.sleep(0)

    disk = HeldDisk(monkeypatch)
    journal = UsageJournal(tmp_path / "usage")
    recorder = UsageRecorder(engine, journal)
    asyncio.run(report())
    recorder.close()
    disk.release()
    journal.close()
    found = [record for segment in closed_segments(tmp_path / "usage") for record in segment.records]
    assert [record.request_id for record in found] == ["held", "waits"]


def test_a_record_that_could_not_be_written_fails_the_request_and_is_left_to_the_engine(
    platform: Platform, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_segment: OpenSegment, _lines: bytes) -> None:
        raise OSError(5, "the disk is broken")

    num_acknowledged = len(platform.engine.acknowledged)
    with monkeypatch.context() as patch:
        patch.setattr(OpenSegment, "append", fail)
        answer = post(platform, key, PATH, BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "usage_journal_full")
    assert len(platform.engine.acknowledged) == num_acknowledged


def test_a_prompt_that_is_only_scored_is_billed_without_an_answer(platform: Platform, key: str) -> None:
    answer = post(platform, key, PATH, BODY | {"echo": True, "max_tokens": 0}).raise_for_status().json()
    (record,) = records_of(platform)
    assert record.usage.generated_tokens == answer["usage"]["completion_tokens"] == 0
    assert record.usage.prompt_tokens > 0
