"""The engine's socket server against clients that violate the protocol."""

import asyncio
import logging
import socket
import tempfile
from collections.abc import AsyncIterator
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
    WeightedAdapter,
    compose_adapters,
)
from slora.core.sampling_params import SamplingParams
from slora.core.usage_journal import UsageJournal
from slora.engine.process import EngineServer
from slora.engine.worker import EngineWorker
from slora_adapters.process.wire import encode, read_message, send
from slora_adapters.version import AdapterVersion
from tests.support.engine_stack import over_the_wire, wait_until

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
            await wait_until(lambda: not server._peers)


def ask(name: str) -> EngineRequest:
    return EngineRequest(name, "t", [1], (), SamplingParams())


def test_a_peer_that_never_reads_is_dropped_and_its_requests_aborted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Born from a bug: closing the connection waited until the peer had read all output, and so never ended."""
    monkeypatch.setattr("slora.engine.process._MAX_UNREAD_BYTES", 1 << 20)

    async def main() -> None:
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

    asyncio.run(main())
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
def test_a_peer_that_sends_invalid_frames_is_dropped_and_others_stay_connected(
    frame: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        worker = PatientWorker()
        async with listening(worker) as (server, path):
            good_reader, good_writer = await asyncio.open_unix_connection(path)
            bad_reader, bad_writer = await asyncio.open_unix_connection(path)
            bad_writer.write(encode(Add(ask("left behind")).pack()) + frame)
            assert [(await read_message(bad_reader))["op"] for _ in FIRST] == FIRST
            assert await read_message(bad_reader) is None, "the connection stays open"
            assert Abort("2:left behind") in worker.posted
            good_writer.write(encode(Add(ask("r")).pack()))
            await wait_until(
                lambda: any(isinstance(one, Add) and one.request.request_id == "1:r" for one in worker.posted)
            )
            server.deliver([StepOutput("1:r", TokenDelta((7,)))], [])
            assert [(await read_message(good_reader))["op"] for _ in FIRST] == FIRST
            outputs = unpack(await read_message(good_reader))
            assert isinstance(outputs, Outputs) and outputs.read() == [StepOutput("r", TokenDelta((7,)))]
            for writer in (good_writer, bad_writer):
                writer.close()

    asyncio.run(main())
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_a_request_survives_the_wire_format() -> None:
    adapters = compose_adapters(
        WeightedAdapter(AdapterVersion("t", digest * 64), weight)
        for digest, weight in {"0": -0.25, "1": 1.0}.items()
    )
    sampling = SamplingParams(max_tokens=None, stop=("a", "b"), stop_token_ids=(3,), logprobs=2, seed=7)
    request = EngineRequest("r", "t", [1, 2], adapters, sampling, account="key")
    assert over_the_wire(Add(request)) == Add(request)


def test_a_request_is_unfinished_until_its_usage_is_known() -> None:
    async def main() -> None:
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
            assert not server._relays, "a relay of a client that left outlives its requests"

    asyncio.run(main())


def test_the_end_of_a_released_request_does_not_disturb_other_peers() -> None:
    """Born from a bug: the peer had disconnected, and its usage raised an error. So nobody got the outputs of the
    step."""

    async def main() -> None:
        worker = PatientWorker()
        async with listening(worker) as (server, path):
            gone_reader, gone_writer = await asyncio.open_unix_connection(path)
            assert [(await read_message(gone_reader))["op"] for _ in FIRST] == FIRST
            reader, writer = await asyncio.open_unix_connection(path)
            assert [(await read_message(reader))["op"] for _ in FIRST] == FIRST
            gone_writer.write(encode(Add(ask("r")).pack()) + encode(Release(["r"]).pack()))
            await wait_until(lambda: Abort("1:r") in worker.posted)
            gone_writer.close()
            await wait_until(lambda: len(server._peers) == 1)
            writer.write(encode(Add(ask("s")).pack()))
            await wait_until(lambda: any(isinstance(one, Add) for one in worker.posted[2:]))
            server.deliver(
                [StepOutput("2:s", TokenDelta((7,), FinishReason.LENGTH))],
                [EndedRequest("1:r", RequestUsage(1, 0, 1)), EndedRequest("2:s", RequestUsage(1, 0, 1))],
            )
            async with asyncio.timeout(60):
                assert [(await read_message(reader))["op"] for _ in range(2)] == ["Usage", "Outputs"]
            writer.close()

    asyncio.run(main())


def test_the_usage_of_a_request_arrives_before_its_last_token() -> None:
    async def main() -> None:
        worker = PatientWorker()
        async with listening(worker) as (server, path):
            reader, writer = await asyncio.open_unix_connection(path)
            for name in ("a", "b"):
                writer.write(encode(Add(ask(name)).pack()))
            await wait_until(lambda: len(worker.posted) == 2)
            outputs = [StepOutput(f"1:{name}", TokenDelta((7,), FinishReason.STOP)) for name in ("a", "b")]
            timing = RequestTiming(1.0, 0.5, True, 2.0, 2.5, None, 3.0, 4)
            ended = EndedRequest("1:a", RequestUsage(1, 2, 3, 4, 0.5), timing)
            server.deliver(outputs, [ended, EndedRequest("1:b", RequestUsage())])
            for _ in FIRST:
                await read_message(reader)
            usage, tokens = unpack(await read_message(reader)), unpack(await read_message(reader))
            assert usage == Usage([ended._replace(request_id="a"), EndedRequest("b", RequestUsage())])
            assert isinstance(tokens, Outputs) and [row[0] for row in tokens.rows] == ["a", "b"]
            writer.close()

    asyncio.run(main())


def test_accepted_drafts_of_a_step_share_a_frame() -> None:
    """A frame for each of them would soon exceed the number of frames after which a slow API process is dropped."""

    async def main() -> None:
        worker = PatientWorker()
        async with listening(worker) as (server, path):
            reader, writer = await asyncio.open_unix_connection(path)
            for name in ("a", "b"):
                writer.write(encode(Add(ask(name)).pack()))
            await wait_until(lambda: len(worker.posted) == 2)
            server.deliver([StepOutput(f"1:{name}", TokenDelta((7, 8))) for name in ("a", "b")], [])
            for _ in FIRST:
                await read_message(reader)
            tokens = unpack(await read_message(reader))
            assert isinstance(tokens, Outputs)
            assert tokens.read() == [StepOutput(name, TokenDelta((7, 8))) for name in ("a", "b")]
            writer.close()

    asyncio.run(main())
