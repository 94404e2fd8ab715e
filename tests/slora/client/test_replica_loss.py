"""A group of engines that compute nothing by themselves, so that a test decides when one is lost, drains or stalls."""

import asyncio
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from slora.client.replica_group import MAX_LOSSES, ReplicaGroup
from slora.core.engine_state import EngineInfo, ServiceSpan
from slora.core.errors import EngineUnavailable
from slora.core.messages import Abort, Add, Command, encode_info
from slora.core.request import (
    EndedRequest,
    EngineRequest,
    FinishReason,
    RequestTiming,
    RequestUsage,
    StepOutput,
    TokenDelta,
)
from slora.core.sampling_params import SamplingParams
from slora.core.usage_journal import UsageJournal
from slora.engine.process import EngineServer
from slora.engine.worker import EngineWorker
from slora_adapters.database import schema
from slora_adapters.database.database import Database
from slora_api.usage.usage_ledger import UsageLedger
from slora_api.usage.usage_recorder import UsageRecorder
from slora_api.usage.usage_shipper import UsageShipper
from tests.api.scripted_engine import ScriptedEngine
from tests.support.engine_stack import find_owner, wait_until
from tests.support.event_loop import on_event_loop

# The longest wait for something that takes milliseconds.
LIMIT_S = 60.0
TIMING = RequestTiming(0.0, 0.0, False, 0.0, 0.0, 0.0, 0.0)


class PatientWorker(EngineWorker):
    """A worker that keeps commands, and what it is told of the service of other engines."""

    def __init__(self) -> None:
        super().__init__(lambda outputs, ended: None)
        self.posted: list[Command] = []
        self.elsewhere: list[tuple[str, list[ServiceSpan]]] = []

    def post(self, command: Command) -> None:
        self.posted.append(command)

    def add_service_elsewhere(self, engine: str, spans: list[ServiceSpan]) -> None:
        self.elsewhere.append((engine, spans))


class FakeEngine:
    """The socket server of an engine. The test sends the tokens."""

    def __init__(self, socket: Path, journal: UsageJournal, info: EngineInfo) -> None:
        self.socket, self.name = socket, socket.stem
        self._journal, self.hello = journal, encode_info(info)
        self._writers: list[asyncio.StreamWriter] = []
        self.num_stops = self.num_connections = 0

    def _note_stop(self) -> None:
        self.num_stops += 1

    async def start(self) -> None:
        self.worker = PatientWorker()
        self.server = EngineServer(self.worker, self.hello, lambda: True, self._journal, self._note_stop)
        self.socket.unlink(missing_ok=True)
        self._listener = await asyncio.start_unix_server(self._serve, self.socket)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        self.num_connections += 1
        try:
            await self.server.serve(reader, writer)
        finally:
            self.num_connections -= 1

    async def break_connections(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()
        await wait_until(lambda: not self.num_connections)

    async def die(self) -> None:
        self._listener.close()
        await self.break_connections()

    @property
    def added(self) -> list[EngineRequest]:
        return [command.request for command in self.worker.posted if isinstance(command, Add)]

    @property
    def num_aborted(self) -> int:
        return sum(isinstance(command, Abort) for command in self.worker.posted)

    def send(self, token_id: int, reason: FinishReason | None = None, index: int = 0) -> None:
        """Sends a token of the last request. With a reason, the request ends after three computed tokens."""
        name = self.added[-1].request_id
        ended = [] if reason is None else [EndedRequest(name, RequestUsage(1, 0, 3), TIMING)]
        self.server.deliver([StepOutput(name, TokenDelta((token_id,), reason, index=index))], ended)


@dataclass
class PartialAnswer:
    request: EngineRequest
    num_cached: int = 0
    num_generated: int = 0
    prompt_only: bool = False


class Bench:
    """A group of fake engines. usage: what the group has reported, by request."""

    def __init__(
        self, root: Path, journal: UsageJournal, num_engines: int, resume_s: float, **facts: object
    ) -> None:
        self.root, self.journal = root, journal
        self.engines = [self.make_engine(number, **facts) for number in range(num_engines)]
        self.group = ReplicaGroup([engine.socket for engine in self.engines], resume_s)
        self.group.listen_for_usage(self._note)
        self.usage: dict[str, RequestUsage | None] = {}
        self.running = asyncio.create_task(self.group.run())

    def make_engine(self, number: int, **facts: object) -> FakeEngine:
        info = replace(ScriptedEngine().info, **facts)  # type: ignore[arg-type]
        return FakeEngine(self.root / f"engine-{number}.sock", self.journal, info)

    def _note(self, request_id: str, usage: RequestUsage | None, timing: RequestTiming | None) -> None:
        assert request_id not in self.usage, "a request is billed twice"
        self.usage[request_id] = usage
        self.group.acknowledge_usage(request_id)

    def owner(self, request_id: str = "r") -> FakeEngine:
        return next(one for one in self.engines if one.name == find_owner(self.group, request_id))

    async def wait_for_owner(self, request_id: str = "r") -> FakeEngine:
        """Waits until an engine has the request."""
        await wait_until(
            lambda: find_owner(self.group, request_id) is not None and bool(self.owner(request_id).added)
        )
        return self.owner(request_id)

    async def begin_stream(self, request: EngineRequest) -> tuple[asyncio.Task[list[int]], FakeEngine]:
        """Returns the stream, which has its first token, and the engine that computes it."""
        tokens: list[int] = []
        stream = asyncio.create_task(read(self.group.generate(request), tokens))
        owner = await self.wait_for_owner()
        owner.send(7)
        await wait_until(lambda: tokens == [7])
        return stream, owner

    async def wait_for_other_owner(self, lost: FakeEngine) -> FakeEngine:
        await wait_until(
            lambda: find_owner(self.group, "r") not in (None, lost.name) and self.owner().added != []
        )
        return self.owner()

    async def begin_request(self, engine: FakeEngine, request_id: str = "r") -> None:
        """Begins the last request when it has arrived. Returns when the group knows that."""
        await wait_until(lambda: bool(engine.added))
        engine.server.deliver_begun([engine.added[-1].request_id])
        await wait_until(lambda: self.group.answers[request_id].settlement.has_begun)

    async def close(self) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        for engine in self.engines:
            await engine.die()


@asynccontextmanager
async def running_bench(num_engines: int, resume_s: float = LIMIT_S, **facts: object) -> AsyncIterator[Bench]:
    """facts: fields of `EngineInfo` that the engines report."""
    with tempfile.TemporaryDirectory() as root:
        journal = UsageJournal(Path(root) / "usage")
        bench = Bench(Path(root), journal, num_engines, resume_s, **facts)
        try:
            async with asyncio.timeout(LIMIT_S):
                for engine in bench.engines:
                    await engine.start()
                await wait_until(lambda: all(bench.group.health.values()))
                yield bench
        finally:
            await bench.close()
            journal.close()


def on_bench(
    num_engines: int,
) -> Callable[[Callable[[Bench], Coroutine[Any, Any, None]]], Callable[[], None]]:
    """Runs a test with a group of fake engines."""

    def decorate(test: Callable[[Bench], Coroutine[Any, Any, None]]) -> Callable[[], None]:
        @on_event_loop
        async def run() -> None:
            async with running_bench(num_engines) as bench:
                await test(bench)

        return run

    return decorate


def ask(name: str = "r", **sampling: int) -> EngineRequest:
    return EngineRequest(
        name, "t", [1, 2], (), SamplingParams(max_tokens=9, seed=1, **sampling), account="key"
    )


async def read(stream: AsyncGenerator[list[TokenDelta], None], tokens: list[int] | None = None) -> list[int]:
    """tokens: gets the tokens as they arrive. All of them are returned at the end."""
    tokens = [] if tokens is None else tokens
    async for deltas in stream:
        tokens.extend(token_id for delta in deltas for token_id in delta.token_ids)
    return tokens


@on_bench(2)
async def test_a_stream_ends_when_the_process_of_its_group_ends(bench: Bench) -> None:
    """It once waited without a limit for the usage, which no engine reports then."""
    stream = asyncio.create_task(read(bench.group.generate(ask())))
    await bench.wait_for_owner()
    bench.running.cancel()
    with pytest.raises(EngineUnavailable):
        await stream


@on_bench(1)
async def test_a_client_that_leaves_while_no_engine_runs_ends_its_request(bench: Bench) -> None:
    stream, engine = await bench.begin_stream(ask())
    await engine.die()
    await wait_until(lambda: not bench.group.ready)
    stream.cancel()
    await asyncio.gather(stream, return_exceptions=True)
    assert bench.usage == {"r": None}
    with pytest.raises(EngineUnavailable, match="being started"):
        await read(bench.group.generate(ask("refused")))


@on_event_loop
async def test_without_time_to_resume_the_loss_of_an_engine_ends_its_streams() -> None:
    async with running_bench(1, resume_s=0) as bench:
        stream, engine = await bench.begin_stream(ask())
        await engine.die()
        with pytest.raises(EngineUnavailable, match="the engine died"):
            await stream


@on_bench(1)
async def test_a_request_that_loses_too_many_engines_without_a_new_token_is_given_up(bench: Bench) -> None:
    stream, engine = await bench.begin_stream(ask())
    for number in range(MAX_LOSSES):
        await bench.begin_request(engine)
        await engine.die()
        if number < MAX_LOSSES - 1:
            await engine.start()
    with pytest.raises(EngineUnavailable, match=f"{MAX_LOSSES} engines died"):
        await stream
    assert bench.usage == {"r": None}


@on_bench(1)
async def test_a_request_that_only_waits_in_queues_may_lose_any_number_of_engines(bench: Bench) -> None:
    stream = asyncio.create_task(read(bench.group.generate(ask())))
    engine = bench.engines[0]
    for _ in range(MAX_LOSSES + 2):
        await wait_until(lambda: bool(engine.added))
        await engine.die()
        await engine.start()
    await wait_until(lambda: bool(engine.added))
    engine.send(99, FinishReason.STOP)
    assert await stream == [99]


@on_bench(1)
async def test_a_request_that_proceeds_may_lose_any_number_of_engines(bench: Bench) -> None:
    tokens: list[int] = []
    stream = asyncio.create_task(read(bench.group.generate(ask()), tokens))
    engine = bench.engines[0]
    for number in range(MAX_LOSSES + 2):
        await wait_until(lambda: bool(engine.added))
        engine.send(number)
        await wait_until(lambda count=number: len(tokens) == count + 1)  # type: ignore[misc]
        await engine.die()
        await engine.start()
    await wait_until(lambda: bool(engine.added))
    engine.send(99, FinishReason.STOP)
    assert await stream == [*range(MAX_LOSSES + 2), 99]
    assert bench.usage == {"r": RequestUsage(1, 0, 3)}


@on_bench(2)
async def test_an_engine_that_drains_hands_its_requests_over_and_records_no_usage(bench: Bench) -> None:
    stream, left = await bench.begin_stream(ask())
    await left.server.drain()
    assert left.num_aborted == 1 and left.num_connections
    left.server.abandon_all()
    assert not bench.group.health[left.name]
    other = await bench.wait_for_owner()
    assert other is not left
    emitted = other.added[0].emitted
    assert emitted is not None and emitted.choices == ((7,),)
    other.send(8, FinishReason.STOP)
    assert await stream == [7, 8]
    assert bench.usage == {"r": RequestUsage(1, 0, 3)}
    assert find_owner(bench.group, "r") is None


@on_bench(2)
async def test_an_engine_that_is_told_to_stop_hands_its_requests_over_at_once(bench: Bench) -> None:
    stream, left = await bench.begin_stream(ask())
    assert bench.group.can_stop(left.name)
    bench.group.stop_engine(left.name)
    assert not bench.group.can_stop(left.name)
    other = await bench.wait_for_other_owner(left)
    await wait_until(lambda: left.num_stops == 1 and left.num_aborted == 1)
    assert bench.group.problems == {left.name: "it stops, and is then started again", other.name: None}
    await left.die()
    await wait_until(lambda: bench.group.problems[left.name] == "it is starting")
    assert not bench.group.can_stop(left.name)
    with pytest.raises(EngineUnavailable):
        bench.group.stop_engine(left.name)
    other.send(8, FinishReason.STOP)
    assert await stream == [7, 8]
    assert bench.usage == {"r": RequestUsage(1, 0, 3)}


@on_bench(2)
async def test_the_reason_why_an_engine_gets_no_requests_is_known(bench: Bench) -> None:
    first, second = (engine.name for engine in bench.engines)
    bench.group.is_stalled = lambda name: name == first
    assert bench.group.problems == {first: "it makes no progress", second: None}
    bench.group.is_stalled = lambda name: False
    await bench.engines[0].die()
    odd = bench.engines[0] = bench.make_engine(0, dtype="bfloat16")
    await odd.start()
    differs = "its dtype is bfloat16, but that of the other replicas is float32"
    await wait_until(lambda: bench.group.problems == {first: differs, second: None})


@on_bench(1)
async def test_engines_join_and_leave_while_the_group_runs(bench: Bench) -> None:
    stream = asyncio.create_task(read(bench.group.generate(ask())))
    first = await bench.wait_for_owner()
    second = bench.make_engine(1)
    bench.engines.append(second)
    await second.start()
    bench.group.add(second.name, second.socket)
    await wait_until(lambda: bench.group.health.get(second.name, False))
    bench.group.remove(first.name)
    assert await bench.wait_for_owner() is second
    await wait_until(lambda: first.num_aborted == 1 and not first.num_connections)
    second.send(8, FinishReason.STOP)
    assert await stream == [8]
    assert bench.usage == {"r": RequestUsage(1, 0, 3)}
    bench.group.remove(second.name)
    with pytest.raises(EngineUnavailable, match="is being started"):
        await read(bench.group.generate(ask("refused")))


async def check_billed_whole(bench: Bench, lose: Callable[[FakeEngine], Coroutine[Any, Any, None]]) -> None:
    """The first engine records the usage so far, which enters the ledger first. lose: how it loses the request."""
    recorder = UsageRecorder(bench.group, bench.journal)
    opened = recorder.open(PartialAnswer(ask()))
    stream, first = await bench.begin_stream(opened.answer.request)
    cut = EndedRequest(first.added[-1].request_id, RequestUsage(2, 0, 1), TIMING)
    await lose(first)
    first.server.deliver([], [cut])
    with closing(Database(bench.root / "slora.db")) as database:
        shipper = UsageShipper(bench.journal, bench.root / "usage", UsageLedger(database), None)
        await asyncio.to_thread(shipper.ship)
        query = select(schema.usage_records.c.prompt_tokens, schema.usage_records.c.generated_tokens)
        assert database.read(query) == [(2, 1)]
        second = await bench.wait_for_other_owner(first)
        second.send(8, FinishReason.STOP)
        assert await stream == [7, 8]
        await recorder.wait([opened])
        await asyncio.to_thread(shipper.ship)
        assert database.read(query) == [(1, 3)]


@on_bench(2)
async def test_a_request_whose_connection_broke_is_billed_once_and_whole(bench: Bench) -> None:
    await check_billed_whole(bench, FakeEngine.break_connections)


@on_bench(2)
async def test_a_request_that_is_released_after_the_drain_ended_is_billed_once_and_whole(
    bench: Bench,
) -> None:
    async def end_drain(engine: FakeEngine) -> None:
        """Without an await in between: the API process has not read yet that the engine drains."""
        engine.server.is_draining = True
        engine.server.broadcast_status()
        engine.server.abandon_all()

    await check_billed_whole(bench, end_drain)


@on_bench(2)
async def test_a_stalled_engine_gets_requests_only_if_no_other_engine_serves(bench: Bench) -> None:
    stalled, other = bench.engines
    bench.group.is_stalled = stalled.name.__eq__
    streams = [asyncio.create_task(read(bench.group.generate(ask(f"{n}")))) for n in range(6)]
    await wait_until(lambda: len(other.added) == 6)
    await other.die()
    await wait_until(lambda: len(stalled.added) == 6)
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)


@on_bench(1)
async def test_an_engine_that_differs_from_the_others_gets_no_requests(bench: Bench) -> None:
    bench.engines.append(odd := bench.make_engine(1, max_model_len=17))
    await odd.start()
    bench.group.add(odd.name, odd.socket)
    await wait_until(lambda: bool(odd.num_connections))
    await bench.engines[0].die()
    await wait_until(lambda: not bench.group.ready)
    with pytest.raises(EngineUnavailable):
        await read(bench.group.generate(ask()))
    assert odd.added == [] and not bench.group.health[odd.name]


@on_bench(1)
async def test_an_engine_with_another_protocol_version_gets_no_requests_and_does_not_end_the_group(
    bench: Bench,
) -> None:
    bench.engines.append(odd := bench.make_engine(1))
    odd.hello["protocol"] = 0
    await odd.start()
    bench.group.add(odd.name, odd.socket)
    await wait_until(lambda: "version 0" in (bench.group.problems[odd.name] or ""))
    stream = asyncio.create_task(read(bench.group.generate(ask())))
    assert await bench.wait_for_owner() is bench.engines[0]
    bench.engines[0].send(8, FinishReason.STOP)
    assert await stream == [8]
    assert not bench.group.health[odd.name] and not bench.running.done()
    await bench.engines[0].die()
    await odd.break_connections()
    with pytest.raises(EngineUnavailable, match="restart both from the same installation"):
        await bench.running


@on_bench(2)
async def test_the_usage_of_an_ended_answer_is_reported_even_if_its_engine_was_lost(bench: Bench) -> None:
    """A stop string ends all choices. The recorder then waits for the usage before it closes the stream."""
    stream = bench.group.generate(ask())
    reading = asyncio.create_task(anext(stream))
    owner = await bench.wait_for_owner()
    owner.send(7)
    await reading
    bench.group.end_choice("r", 0)
    await owner.die()
    await wait_until(lambda: bench.usage == {"r": None})
    await stream.aclose()


@on_event_loop
async def test_an_answer_does_not_continue_on_an_engine_with_another_model(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A cluster may be deployed again with another model, while its servers have answers in progress."""
    async with running_bench(1, resume_s=0.2) as bench:
        stream, first = await bench.begin_stream(ask())
        await first.die()
        bench.group.remove(first.name)
        odd = bench.make_engine(9, model_name="another")
        await odd.start()
        bench.group.add(odd.name, odd.socket)
        await wait_until(lambda: "its model_name is another" in caplog.text)
        with pytest.raises(EngineUnavailable):
            await stream
        assert not odd.added
        await odd.die()
