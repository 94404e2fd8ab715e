"""Usage that the API process has not recorded when it dies is recorded by the engine, and no other."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from slora.core.request import EngineRequest, RequestUsage, single_adapter
from slora.core.sampling_params import SamplingParams
from slora.core.usage_journal import UsageJournal, UsageRecord, closed_segments
from slora.engine.usage_relay import UsageRelay
from slora_adapters.version import AdapterVersion

USAGE = RequestUsage(1, 2, 3, 4, 0.5)
VERSION = AdapterVersion("acme", "ab" * 32)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[UsageJournal]:
    journal = UsageJournal(tmp_path)
    yield journal
    journal.close()


def open_requests(relay: UsageRelay, *names: str) -> None:
    for name in names:
        relay.add(
            name, EngineRequest(name, "acme", [1], single_adapter(VERSION), SamplingParams(), account="key")
        )


def read(journal: UsageJournal, directory: Path) -> dict[str, UsageRecord]:
    journal.close()
    records = [record for segment in closed_segments(directory) for record in segment.records]
    assert len({record.request_id for record in records}) == len(records)
    return {record.request_id: record for record in records}


def test_a_dead_process_leaves_its_unacknowledged_requests_to_the_engine(
    journal: UsageJournal, tmp_path: Path
) -> None:
    relay = UsageRelay(journal)
    open_requests(relay, "recorded", "unacknowledged", "unfinished", "used nothing")
    relay.add("no one's", EngineRequest("no one's", "acme", [1], single_adapter(VERSION), SamplingParams()))
    relay.end("no one's", USAGE)
    relay.end("recorded", USAGE)
    relay.end("unacknowledged", USAGE)
    relay.acknowledge("recorded")
    relay.acknowledge("unknown")
    relay.abandon()
    relay.abandon()
    assert relay.unfinished == ["unfinished", "used nothing"]
    relay.end("unfinished", USAGE)
    relay.end("used nothing", RequestUsage())
    records = read(journal, tmp_path)
    assert records.keys() == {"unacknowledged", "unfinished"}
    record = records["unacknowledged"]
    assert (record.tenant, record.account, record.adapter_digest) == ("acme", "key", VERSION.digest)
    assert (record.usage, record.is_complete) == (USAGE, True)
    assert record.ended_at > 1.7e9


def test_the_usage_that_a_process_never_acknowledges_is_bounded(
    journal: UsageJournal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slora.engine.usage_relay._MAX_UNACKNOWLEDGED", 10)
    relay = UsageRelay(journal)
    names = [f"{number:02}" for number in range(30)]
    open_requests(relay, *names)
    for name in names:
        relay.end(name, USAGE)
    assert len(relay._unacknowledged) <= 10
    relay.abandon()
    assert sorted(read(journal, tmp_path)) == names
