"""Engine and loader as real processes, and what a client sees when they start, stop and crash."""

import asyncio
import json
import os
import signal
import socket
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slora.client.client import RemoteEngine
from slora.core.engine_state import EngineStats
from slora.core.errors import (
    AdapterFetchFailed,
    ConfigError,
    ContextTooLong,
    EngineUnavailable,
    RequestRefused,
)
from slora.core.messages import Add
from slora.core.request import (
    EngineRequest,
    FinishReason,
    RequestTiming,
    RequestUsage,
    TokenDelta,
    single_adapter,
)
from slora.core.sampling_params import SamplingParams
from slora.core.usage_journal import UsageRecord, closed_segments
from slora.engine.process import ProcessConfig
from slora_adapters.process.wire import send
from slora_adapters.version import AdapterVersion
from tests.support.driving import Answer, drive, start_engine
from tests.support.engine_stack import WAIT_S, EngineStack, connect, one_by_one, open_stack, wait_until
from tests.support.model_kit import ModelKit

GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=500, temperature=0.0, ignore_eos=True)

Run = Callable[[Callable[[RemoteEngine], Coroutine[Any, Any, None]]], None]


@pytest.fixture(scope="module")
def running_stack(kit: ModelKit) -> Iterator[EngineStack]:
    with open_stack(kit, num_pages=400) as stack:
        yield stack


@pytest.fixture
def stack(running_stack: EngineStack) -> EngineStack:
    running_stack.ensure_running()
    return running_stack


@pytest.fixture
def run(stack: EngineStack) -> Run:
    """Returns a function that runs a coroutine function with a connected client."""

    def call(body: Callable[[RemoteEngine], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            async with asyncio.timeout(2 * WAIT_S), connect(stack) as client:
                await body(client)

        asyncio.run(main())

    return call


def ask(name: str, adapter: AdapterVersion | None = None, params: SamplingParams = GREEDY) -> EngineRequest:
    return EngineRequest(name, "tenant", [1, 2, 3], single_adapter(adapter), params, account="key")


@asynccontextmanager
async def stream_slowly(
    stack: EngineStack, client: RemoteEngine, request: EngineRequest
) -> AsyncIterator[AsyncGenerator[list[TokenDelta], None]]:
    """A long stream that does not end while the test acts."""
    with stack.slowed():
        async with aclosing(client.generate(request)) as stream:
            yield stream


async def collect(stream: AsyncGenerator[list[TokenDelta], None]) -> Answer:
    answer = Answer()
    async for delta in one_by_one(stream):
        answer.token_ids.extend(delta.token_ids)
        answer.logprobs.extend(entry.logprob for entry in delta.logprobs or ())
        answer.reason = delta.finish_reason
    return answer


async def wait_for_stats(client: RemoteEngine, condition: Callable[[EngineStats], bool]) -> EngineStats:
    for _ in range(3000):
        stats = await client.stats()
        if condition(stats):
            return stats
        await asyncio.sleep(0.01)
    raise AssertionError(f"it did not happen; the engine is at {stats}")


def idle(stats: EngineStats) -> bool:
    return stats.running == stats.waiting == stats.pages_held == 0


def test_answers_over_the_socket_are_those_of_an_engine_in_process(
    run: Run, kit: ModelKit, stack: EngineStack
) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=5, ignore_eos=True, logprobs=2)
    engine, versions = start_engine(kit, 400)
    expected = drive(engine, [[ask(kind, version, params) for kind, version in versions.items()]])

    async def body(client: RemoteEngine) -> None:
        assert client.info == engine.info
        requests = [ask(kind, version, params) for kind, version in stack.versions.items()]
        answers = await asyncio.gather(*(collect(client.generate(request)) for request in requests))
        for request, answer in zip(requests, answers, strict=True):
            alone = expected[request.request_id]
            assert (answer.token_ids, answer.reason) == (alone.token_ids, FinishReason.LENGTH)
            assert answer.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
        stats = await wait_for_stats(client, idle)
        assert stats.pages_free + stats.pages_cached == stats.pages_total

    run(body)


class UsageLog:
    """The usage that the client was told."""

    def __init__(self, client: RemoteEngine) -> None:
        self.usage: dict[str, RequestUsage | None] = {}
        client.listen_for_usage(self._note)

    def _note(self, request_id: str, usage: RequestUsage | None, timing: RequestTiming | None) -> None:
        assert request_id not in self.usage, "a request has usage twice"
        self.usage[request_id] = usage


def read_journal(stack: EngineStack) -> dict[str, UsageRecord]:
    """Takes the records out of the engine's journal."""
    records: dict[str, UsageRecord] = {}
    for segment in closed_segments(stack.usage_directory):
        records |= {record.request_id: record for record in segment.records}
        segment.delete()
    return records


def test_each_request_has_its_usage_once_however_it_ends(run: Run, stack: EngineStack) -> None:
    version = stack.versions["odd_rank"]

    async def body(client: RemoteEngine) -> None:
        before = (await wait_for_stats(client, idle)).usage
        log = UsageLog(client)
        async with aclosing(one_by_one(client.generate(ask("finished", version)))) as stream:
            async for delta in stream:
                assert delta.finish_reason is None or "finished" in log.usage
        with pytest.raises(ContextTooLong):
            too_long = replace(ask("refused"), prompt_token_ids=[1] * 10_000)
            await collect(client.generate(too_long))
        assert log.usage["refused"] == RequestUsage()
        async with stream_slowly(stack, client, ask("closed", version, LONG)) as stream:
            await anext(stream)
        await wait_until(lambda: "closed" in log.usage)
        two = replace(LONG, n=2, max_tokens=200)
        async with stream_slowly(stack, client, ask("choices", params=two)) as stream:
            while all(delta.index == 0 for delta in await anext(stream)):
                pass
            client.end_choice("choices", 0)
            client.end_choice("choices", 1)
            assert [delta async for delta in stream] == []
        await wait_until(lambda: "choices" in log.usage)
        usage = {name: one for name, one in log.usage.items() if one is not None}
        assert usage.keys() == {"finished", "refused", "closed", "choices"}
        finished = usage["finished"]
        assert (finished.prompt_tokens, finished.cached_tokens, finished.generated_tokens) == (3, 0, 20)
        assert finished.page_seconds > 0
        assert 1 <= usage["closed"].generated_tokens < 500
        assert 2 <= usage["choices"].generated_tokens < 400
        after = (await wait_for_stats(client, idle)).usage
        assert sum(usage.values(), start=before) == after

    run(body)


def test_the_usage_of_a_client_that_died_is_recorded_by_the_engine(run: Run, stack: EngineStack) -> None:
    async def dying(client: RemoteEngine) -> tuple[UsageLog, AsyncGenerator[list[TokenDelta], None]]:
        log = UsageLog(client)
        for name in ("acknowledged", "ended"):
            await collect(client.generate(replace(ask(name), account="key 1")))
        client.acknowledge_usage("acknowledged")
        stream = client.generate(replace(ask("running", params=LONG), account="key 2"))
        await anext(stream)
        return log, stream

    async def surviving(client: RemoteEngine) -> None:
        with stack.slowed():
            async with connect(stack) as other:
                log, stream = await dying(other)
            await stream.aclose()
            await wait_for_stats(client, idle)
        records: dict[str, UsageRecord] = {}

        def are_recorded() -> bool:
            # The engine may record usage of an earlier test's client only now, with the account of `ask`.
            found = read_journal(stack)
            records.update({name: one for name, one in found.items() if one.account != ask(name).account})
            return len(records) >= 2

        await wait_until(are_recorded)
        assert records.keys() == {"ended", "running"}
        assert "running" not in log.usage, (
            "the engine alone records what a process did not learn before its end"
        )
        assert records["ended"].usage == log.usage["ended"]
        assert [records[name].account for name in ("ended", "running")] == ["key 1", "key 2"]
        assert 1 <= records["running"].usage.generated_tokens < 500

    run(surviving)


def ask_many(adapter: AdapterVersion | None = None) -> list[EngineRequest]:
    """Requests with long answers, so that they are still running when a client leaves after the first tokens."""
    return [ask(str(number), adapter, LONG) for number in range(8)]


async def check_cut_short(client: RemoteEngine, tokens_before: int) -> None:
    """Checks that all pages are free or cached, and that the requests were aborted before they were complete."""
    stats = await wait_for_stats(client, idle)
    assert stats.pages_free + stats.pages_cached == stats.pages_total
    assert stats.generated_tokens - tokens_before < len(ask_many()) * 500


def test_closing_an_answer_early_frees_its_pages(run: Run, stack: EngineStack) -> None:
    async def body(client: RemoteEngine) -> None:
        before = (await wait_for_stats(client, idle)).generated_tokens
        streams = [client.generate(request) for request in ask_many(stack.versions["odd_rank"])]
        with stack.slowed():
            await asyncio.gather(*(anext(stream) for stream in streams))
            for stream in streams:
                await stream.aclose()
            await check_cut_short(client, before)

    run(body)


def test_the_requests_of_a_disconnected_client_are_aborted(run: Run, stack: EngineStack) -> None:
    async def body(client: RemoteEngine) -> None:
        before = (await wait_for_stats(client, idle)).generated_tokens
        with stack.slowed():
            async with connect(stack) as other:
                readers = [asyncio.create_task(collect(other.generate(request))) for request in ask_many()]
                await wait_for_stats(client, lambda stats: stats.running > 0)
            await check_cut_short(client, before)
        for outcome in await asyncio.gather(*readers, return_exceptions=True):
            assert isinstance(outcome, EngineUnavailable)

    run(body)


def test_a_choice_is_ended_alone_and_the_others_go_on(run: Run, kit: ModelKit) -> None:
    # One list has at most 64 deltas, so choice 1 is ended before it is complete.
    params = replace(GREEDY, n=3, max_tokens=100, temperature=1.0, seed=5)
    expected = drive(start_engine(kit, 400)[0], [[ask("r", None, params)]])

    async def body(client: RemoteEngine) -> None:
        tokens: dict[int, list[int]] = defaultdict(list)
        num_seen = 0
        async for arrived in client.generate(ask("r", None, params)):
            for delta in arrived:
                tokens[delta.index] += delta.token_ids
            if len(tokens[1]) >= 4 and not num_seen:
                num_seen = len(tokens[1])
                client.end_choice("r", 1)
        assert 4 <= num_seen < 100
        assert tokens == {
            0: expected["r"].token_ids,
            1: expected["r/1"].token_ids[:num_seen],
            2: expected["r/2"].token_ids,
        }
        await wait_for_stats(client, idle)

    run(body)


def test_two_clients_may_use_the_same_request_ids(run: Run, stack: EngineStack) -> None:
    async def body(client: RemoteEngine) -> None:
        async with connect(stack) as other:
            mine, yours = await asyncio.gather(
                collect(client.generate(ask("same"))),
                collect(other.generate(ask("same", stack.versions["rslora"]))),
            )
        assert mine.token_ids != yours.token_ids
        assert len(mine.token_ids) == len(yours.token_ids) == 20

    run(body)


def test_one_client_may_not_use_a_request_id_twice_at_once(run: Run) -> None:
    """Born from a bug: the second request replaced the first one, whose reader then waited for ever."""

    async def body(client: RemoteEngine) -> None:
        async with aclosing(client.generate(ask("same"))) as first:
            begun = sum(len(delta.token_ids) for delta in await anext(first))
            with pytest.raises(RequestRefused, match="'same' is already running"):
                await collect(client.generate(ask("same")))
            rest = await collect(first)
            assert begun + len(rest.token_ids) == 20

    run(body)


def test_the_error_of_a_request_keeps_its_class_over_the_socket(run: Run, kit: ModelKit) -> None:
    async def body(client: RemoteEngine) -> None:
        with pytest.raises(RequestRefused, match="the prompt is empty") as refused:
            await collect(client.generate(EngineRequest("a", "tenant", [], (), GREEDY)))
        assert refused.value.param == "prompt"
        with pytest.raises(ContextTooLong, match="max_model_len") as too_long:
            await collect(client.generate(EngineRequest("b", "tenant", [1] * 600, (), GREEDY)))
        assert (too_long.value.param, too_long.value.code) == ("prompt", "context_length_exceeded")
        with pytest.raises(AdapterFetchFailed) as missing:
            await collect(client.generate(ask("c", AdapterVersion("tenant", "0" * 64))))
        assert missing.value.code == "not_found"
        assert len((await collect(client.generate(ask("d")))).token_ids) == 20

    run(body)


def test_a_deleted_adapter_is_removed_from_the_engine(run: Run, stack: EngineStack) -> None:
    async def body(client: RemoteEngine) -> None:
        version = stack.versions["odd_rank"]
        await collect(client.generate(ask("a", version)))
        before = await wait_for_stats(client, idle)
        await client.remove_adapter(version)
        after = await client.stats()
        assert after.resident_adapters == before.resident_adapters - 1
        # The adapter was not deleted from the store, so it may be loaded again.
        await collect(client.generate(ask("b", version)))

    run(body)


def test_a_client_that_does_not_read_does_not_delay_other_clients(run: Run, stack: EngineStack) -> None:
    chatty = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True, logprobs=20)

    async def body(client: RemoteEngine) -> None:
        with socket.socket(socket.AF_UNIX) as stuck:
            stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stuck.connect(str(stack.socket))
            for number in range(8):
                send(stuck, Add(ask(f"stuck{number}", params=chatty)).pack())
            await wait_for_stats(client, lambda stats: stats.running == 8)
            answers = await asyncio.gather(*(collect(client.generate(ask(f"r{n}"))) for n in range(4)))
            assert [len(answer.token_ids) for answer in answers] == [20] * 4
            # The answers of the slow client are computed to the end too. Their messages wait for the client, but hold
            # no pages.
            await wait_for_stats(client, idle)

    run(body)


def test_a_killed_engine_fails_requests_in_flight_and_its_successor_serves(
    run: Run, stack: EngineStack
) -> None:
    async def body(client: RemoteEngine) -> None:
        log = UsageLog(client)
        async with stream_slowly(stack, client, ask("a", params=LONG)) as stream:
            await anext(stream)
            assert stack.engine is not None
            stack.engine.send(signal.SIGKILL)
            with pytest.raises(EngineUnavailable, match="the engine died while it processed this request"):
                async for _ in stream:
                    pass
        assert not client.ready
        assert log.usage == {"a": None}, "the usage is unknown"
        with pytest.raises(EngineUnavailable, match="not running and is being started"):
            await collect(client.generate(ask("b")))
        assert log.usage.pop("b") == RequestUsage()
        log.usage.clear()  # the successor gets the same id
        with pytest.raises(EngineUnavailable):
            await client.stats()
        await client.remove_adapter(stack.versions["odd_rank"])
        assert client.info.block_tokens == 16, "what the engine is may still be asked"

        assert stack.engine.wait() == -signal.SIGKILL
        stack.ensure_running()
        await wait_until(lambda: client.ready)
        answer = await collect(client.generate(ask("a", stack.versions["rslora"])))
        assert len(answer.token_ids) == 20 and log.usage.keys() == {"a"}

    run(body)


def test_requests_that_waited_for_a_killed_loader_are_served_by_its_successor(
    run: Run, stack: EngineStack
) -> None:
    async def body(client: RemoteEngine) -> None:
        resident, cold = stack.versions["rslora"], stack.versions["some_layers"]
        await collect(client.generate(ask("a", resident)))
        await client.remove_adapter(cold)
        assert stack.loader is not None
        stack.loader.kill()
        await wait_until(lambda: not client.ready)
        # Requests that need no loader continue. Requests that need it wait for the restarted loader.
        waiting = asyncio.create_task(collect(client.generate(ask("cold", cold))))
        assert len((await collect(client.generate(ask("b", resident)))).token_ids) == 20
        assert len((await collect(client.generate(ask("c")))).token_ids) == 20
        assert (await client.stats()).awaiting_adapter == 1
        stack.ensure_running()
        await wait_until(lambda: client.ready)
        assert len((await waiting).token_ids) == 20
        await wait_for_stats(client, idle)

    run(body)


def test_without_an_engine_a_client_raises_engine_unavailable(tmp_path: Path) -> None:
    async def main() -> None:
        client = RemoteEngine(tmp_path / "nobody.sock")
        running = asyncio.create_task(client.run())
        await asyncio.sleep(0)
        with pytest.raises(EngineUnavailable, match="starting"):
            _ = client.info
        with pytest.raises(EngineUnavailable):
            await collect(client.generate(ask("a")))
        running.cancel()

    asyncio.run(main())


def test_an_engine_exits_cleanly_on_sigterm_with_connected_clients(run: Run, stack: EngineStack) -> None:
    async def body(client: RemoteEngine) -> None:
        async with stream_slowly(stack, client, ask("released", params=LONG)) as stream:
            await anext(stream)
            assert stack.engine is not None
            # A terminal's Ctrl-C; the engine must ignore it, because the supervisor decides.
            stack.engine.send(signal.SIGINT)
            await anext(stream)
            stack.engine.send(signal.SIGTERM)
            with pytest.raises(EngineUnavailable):
                async for _ in stream:
                    pass
        assert await asyncio.to_thread(stack.engine.wait) == 0

    run(body)
    assert "released" not in read_journal(stack), (
        "the client reports the usage when it has continued the request"
    )


def test_an_engine_whose_parent_closes_the_pipe_releases_its_requests_and_exits(stack: EngineStack) -> None:
    """Born from a bug: on a cluster, API processes outlive the parent. They took what the engine had computed so far
    for the usage of the whole answer, which another engine continued.
    """
    assert stack.engine is not None
    engine = stack.engine

    async def main() -> None:
        async with connect(stack) as client, stream_slowly(stack, client, ask("a", params=LONG)) as stream:
            await anext(stream)
            engine.close_stdin()
            with pytest.raises(EngineUnavailable):
                async for _ in stream:
                    pass
            # Still connected: the engine bills what a client that leaves has not released, and its release may be lost.
            assert await asyncio.to_thread(engine.wait) == 0

    asyncio.run(main())
    assert "a" not in read_journal(stack), "the client reports the usage when it has continued the request"


def test_an_engine_whose_parent_and_clients_are_gone_records_usage_and_exits(stack: EngineStack) -> None:
    assert stack.engine is not None
    engine = stack.engine

    async def main() -> None:
        async with connect(stack) as client, aclosing(client.generate(ask("a", params=LONG))) as stream:
            await anext(stream)

    with stack.slowed():
        asyncio.run(main())
        engine.close_stdin()
        assert engine.wait() == 0
    assert 1 <= read_journal(stack)["a"].usage.generated_tokens < 500


def test_an_engine_with_a_lost_device_exits_and_its_clients_may_retry(running_stack: EngineStack) -> None:
    """Born from a fault: every later step failed, and the engine process went on."""
    if running_stack.engine is not None and running_stack.engine.running:
        running_stack.engine.kill()
    running_stack.engine = engine = running_stack.start_engine("tests.support.broken_engine")

    async def main() -> None:
        async with asyncio.timeout(2 * WAIT_S), connect(running_stack) as client:
            with pytest.raises(EngineUnavailable, match="send the request again"):
                await collect(client.generate(ask("a")))

    running_stack.ensure_running()
    asyncio.run(main())
    assert engine.wait() == os.EX_SOFTWARE
    assert "DeviceFailed: the device is lost" in engine.log


def test_an_engine_that_cannot_start_says_why_and_exits_with_two(running_stack: EngineStack) -> None:
    engine = running_stack.start_engine(pool_bytes=5)
    assert engine.wait() == 2
    assert "pool_bytes is 5, but one page of this model takes" in engine.log
    assert "Traceback" not in engine.log


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_sequences": 8}, "the engine has no setting max_sequences"),
    ],
)
def test_settings_that_no_engine_accepts_are_refused_before_it_starts(
    tmp_path: Path, settings: dict[str, int], message: str
) -> None:
    paths = {"socket": "engine.sock", "loader_socket": "loader.sock", "usage_directory": "usage"}
    with pytest.raises(ConfigError, match=message):
        ProcessConfig.from_json(json.dumps({**paths, "engine": {"model": str(tmp_path), **settings}}))
