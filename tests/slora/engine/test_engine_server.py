"""The engine's socket server against clients that violate the protocol."""

import asyncio
import logging
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from slora.core.messages import Abort, Add, Outputs, Release, Usage, unpack
from slora.core.request import (
    EndedRequest,
    EngineRequest,
    FinishReason,
    RequestTiming,
    RequestUsage,
    StepOutput,
    TokenDelta,
    single_adapter,
)
from slora.core.sampling_params import SamplingParams
from slora.core.usage_journal import UsageJournal, UsageRecord, closed_segments
from slora.engine.process import EngineServer
from slora.engine.usage_relay import UsageRelay
from slora.engine.worker import EngineWorker
from slora_adapters.process.wire import encode, read_message, send
from slora_adapters.version import AdapterVersion
from tests.support.engine_stack import wait_until
from tests.support.event_loop import on_event_loop

# What the engine sends to a new API process.
FIRST = ["hello", "Status", "Report"]


class PatientWorker(EngineWorker):
    """A worker that does not run, so that a test can inspect its pending commands."""

    def __init__(self) -> None:
        super().__init__(lambda outputs, ended: None)
        self.posted: list[object] = []

    def post(self, command) -> None:
        self.posted.append(command)


@asynccontextmanager
async def listening(worker: EngineWorker) -> AsyncIterator[tuple[EngineServer, Path]]:
    with tempfile.TemporaryDirectory() as root, closing(UsageJournal(Path(root) / "usage")) as journal:
        server = EngineServer(worker, {"op": "hello"}, lambda: True, journal, lambda: None)
        path = Path(root) / "engine.sock"
        listener = await asyncio.start_unix_server(server.serve, path)
        try:
            yield server, path
        finally:
            listener.close()
            await wait_until(lambda: not server.peers)


@asynccontextmanager
async def connected(path: Path) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A peer that has read the first messages."""
    reader, writer = await asyncio.open_unix_connection(path)
    assert [(await read_message(reader))["op"] for _ in FIRST] == FIRST
    yield reader, writer
    writer.close()


def ask(name: str) -> EngineRequest:
    return EngineRequest(name, "t", [1], (), SamplingParams())


@on_event_loop
async def test_a_peer_that_never_reads_is_dropped_and_its_requests_aborted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Born from a bug: closing the connection waited until the peer had read all output, and so never ended."""
    monkeypatch.setattr("slora.engine.process._MAX_UNREAD_BYTES", 1 << 20)
    worker = PatientWorker()
    async with listening(worker) as (server, path):
        with socket.socket(socket.AF_UNIX) as stuck:
            await asyncio.to_thread(stuck.connect, str(path))
            send(stuck, Add(ask("r")).pack())
            await wait_until(lambda: bool(worker.posted))
            large = StepOutput("1:r", TokenDelta(tuple(range(100_000))))
            for _ in range(100):
                server.deliver([large], [])
                await asyncio.sleep(0)
            await wait_until(lambda: Abort("1:r") in worker.posted)
            server.deliver([large], [])  # from a step in progress; no client is left to receive it
    complaints = [
        record for record in caplog.records if "has more than 1048576 unread bytes" in record.message
    ]
    assert len(complaints) == 1


@pytest.mark.parametrize(
    "frame",
    [
        b"\xff\xff\xff\xff",
        b"\x00\x00\x00\x01\xc1",
        encode({"op": "dance"}),
        encode({"no op": 1}),
        encode([1, 2]),
        encode({"op": "Add", "fields": [["x"]]}),
        encode({"op": "RemoveAdapter", "fields": [["only a tenant"]]}),
        encode({"op": "Command", "fields": []}),
        encode({"op": "Status", "fields": [True, False]}),
        encode({"op": "Observe", "fields": []}),
    ],
)
@on_event_loop
async def test_a_peer_that_sends_invalid_frames_is_dropped_and_others_stay_connected(
    frame: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    worker = PatientWorker()
    async with (
        listening(worker) as (server, path),
        connected(path) as (good_reader, good_writer),
        connected(path) as (bad_reader, bad_writer),
    ):
        bad_writer.write(encode(Add(ask("left behind")).pack()) + frame)
        assert await read_message(bad_reader) is None, "the connection stays open"
        assert Abort("2:left behind") in worker.posted
        good_writer.write(encode(Add(ask("r")).pack()))
        await wait_until(
            lambda: any(isinstance(one, Add) and one.request.request_id == "1:r" for one in worker.posted)
        )
        server.deliver([StepOutput("1:r", TokenDelta((7,)))], [])
        outputs = unpack(await read_message(good_reader))
        assert isinstance(outputs, Outputs) and outputs.read() == [StepOutput("r", TokenDelta((7,)))]
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


@on_event_loop
async def test_a_request_is_unfinished_until_its_usage_is_known() -> None:
    worker = PatientWorker()
    async with listening(worker) as (server, path):
        _, writer = await asyncio.open_unix_connection(path)
        for name in ("over", "left"):
            request = EngineRequest(name, "t", [1], (), SamplingParams(n=3))
            writer.write(encode(Add(request).pack()))
            writer.write(encode(Abort(name, 1).pack()))
        await wait_until(lambda: len(worker.posted) == 4)
        assert worker.posted[1::2] == [Abort("1:over", 1), Abort("1:left", 1)]
        server.deliver([StepOutput("1:left", TokenDelta((7,), FinishReason.STOP, index=2))], [])
        server.deliver([], [EndedRequest("1:over", RequestUsage())])
        writer.close()
        await wait_until(lambda: len(worker.posted) > 4)
        assert worker.posted[4:] == [Abort("1:left")]
        server.deliver([], [EndedRequest("1:left", RequestUsage())])
        assert not server.relays, "a relay of a client that left outlives its requests"


@on_event_loop
async def test_the_end_of_a_released_request_does_not_disturb_other_peers() -> None:
    """Born from a bug: the peer had disconnected, and its usage raised an error. So nobody got the outputs of the
    step."""
    worker = PatientWorker()
    async with (
        listening(worker) as (server, path),
        connected(path) as (_, gone_writer),
        connected(path) as (reader, writer),
    ):
        gone_writer.write(encode(Add(ask("r")).pack()) + encode(Release(["r"]).pack()))
        await wait_until(lambda: Abort("1:r") in worker.posted)
        gone_writer.close()
        await wait_until(lambda: len(server.peers) == 1)
        writer.write(encode(Add(ask("s")).pack()))
        await wait_until(lambda: any(isinstance(one, Add) for one in worker.posted[2:]))
        server.deliver(
            [StepOutput("2:s", TokenDelta((7,), FinishReason.LENGTH))],
            [EndedRequest("1:r", RequestUsage(1, 0, 1)), EndedRequest("2:s", RequestUsage(1, 0, 1))],
        )
        async with asyncio.timeout(300):
            assert [(await read_message(reader))["op"] for _ in range(2)] == ["Usage", "Outputs"]


@on_event_loop
async def test_usage_arrives_before_the_last_token_and_the_outputs_of_a_step_share_a_frame() -> None:
    """A frame for each accepted draft would soon exceed the number of frames after which a slow API process is
    dropped."""
    worker = PatientWorker()
    async with listening(worker) as (server, path), connected(path) as (reader, writer):
        for name in ("a", "b"):
            writer.write(encode(Add(ask(name)).pack()))
        await wait_until(lambda: len(worker.posted) == 2)
        server.deliver([StepOutput(f"1:{name}", TokenDelta((7, 8))) for name in ("a", "b")], [])
        drafts = unpack(await read_message(reader))
        assert isinstance(drafts, Outputs)
        assert drafts.read() == [StepOutput(name, TokenDelta((7, 8))) for name in ("a", "b")]
        outputs = [StepOutput(f"1:{name}", TokenDelta((7,), FinishReason.STOP)) for name in ("a", "b")]
        timing = RequestTiming(1.0, 0.5, True, 2.0, 2.5, None, 3.0, 4)
        ended = EndedRequest("1:a", RequestUsage(1, 2, 3, 4, 0.5), timing)
        server.deliver(outputs, [ended, EndedRequest("1:b", RequestUsage())])
        usage, tokens = unpack(await read_message(reader)), unpack(await read_message(reader))
        assert usage == Usage([ended._replace(request_id="a"), EndedRequest("b", RequestUsage())])
        assert isinstance(tokens, Outputs) and [row[0] for row in tokens.rows] == ["a", "b"]


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
    assert relay.num_unacknowledged <= 10
    relay.abandon()
    assert sorted(read(journal, tmp_path)) == names
