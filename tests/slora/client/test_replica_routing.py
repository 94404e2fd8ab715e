"""A group sends requests by what its engines report, which includes the requests of other API processes."""

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from slora.core.engine_state import Backlog, EngineReport, ServiceSpan
from slora.core.request import EngineRequest, single_adapter
from slora.core.sampling_params import SamplingParams
from slora_adapters.version import AdapterVersion
from tests.slora.client.test_replica_loss import Bench, FakeEngine, on_bench, read, running_bench
from tests.support.engine_stack import wait_until
from tests.support.event_loop import on_event_loop

VERSION = AdapterVersion("t", "a" * 64)


def ask(name: str, first: int = 1, tenant: str = "t", adapter: AdapterVersion | None = None) -> EngineRequest:
    """A prompt of ten blocks. The first four are filled with `first`, and the others with another token each time."""
    prompt = [first] * 64 + [int(name) + 100] * 96
    return EngineRequest(name, tenant, prompt, single_adapter(adapter), SamplingParams(max_tokens=8))


async def find_engines(bench: Bench, requests: list[EngineRequest]) -> Counter[str]:
    """Sends the requests one after the other, and counts the engines to which they went."""
    went: Counter[str] = Counter()
    for request in requests:
        stream = asyncio.create_task(read(bench.group.generate(request)))
        went[(await bench.wait_for_owner(request.request_id)).name] += 1
        stream.cancel()
        await asyncio.gather(stream, return_exceptions=True)
    return went


async def report(bench: Bench, engine: FakeEngine, report: EngineReport) -> None:
    """Returns when the group knows the report."""
    engine.server.deliver_report(replace(report, num_taken=len(engine.added)))
    state = bench.group.replicas[engine.name].client.state
    await wait_until(
        lambda: state.backlog == report.backlog and state.describe("").resident == report.resident
    )


@on_bench(3)
async def test_a_request_goes_to_the_engine_that_reports_less_work(bench: Bench) -> None:
    """This group has sent nothing before: the work is that of other API processes."""
    for engine, load_s in zip(bench.engines, (9.0, 1.0, 9.0), strict=True):
        await report(bench, engine, EngineReport(0, Backlog(0, 1, load_s, 1e-3, 1e-3)))
    went = await find_engines(bench, [ask(str(number), first=number) for number in range(12)])
    assert went == {"engine-1": 12}


@on_bench(3)
async def test_a_request_goes_where_its_adapter_is_although_another_process_brought_it_there(
    bench: Bench,
) -> None:
    for engine in bench.engines:
        held = frozenset([VERSION] if engine is bench.engines[1] else [])
        await report(bench, engine, EngineReport(0, Backlog(0, 1, 1.0, 1e-6, 1e-6), held))
    requests = [ask(str(number), first=number, adapter=VERSION) for number in range(6)]
    assert await find_engines(bench, requests) == {"engine-1": 6}


@pytest.mark.parametrize("prefix_cache", ["tenant", "public", "off"])
@on_event_loop
async def test_prompts_with_the_same_beginning_go_to_one_engine_until_it_has_more_work(
    prefix_cache: str,
) -> None:
    async with running_bench(3, prefix_cache=prefix_cache) as bench:
        group = bench.group
        keys = {tenant: group.find_prefix_key(ask("0", tenant=tenant)) for tenant in ("t", "u")}
        adapted = group.find_prefix_key(ask("0", adapter=VERSION))
        if prefix_cache == "off":
            assert not any([*keys.values(), adapted])
            return
        assert (keys["t"] == keys["u"]) == (prefix_cache == "public")
        assert adapted not in keys.values()
        for engine in bench.engines:
            await report(bench, engine, EngineReport(0, Backlog(0, 1, 1.0, 1e-6, 1e-6)))
        (home,) = await find_engines(bench, [ask(str(number)) for number in range(8)])
        others = await find_engines(bench, [ask(str(number), first=number) for number in range(20, 50)])
        assert len(others) == 3, "each beginning has an engine of its own"
        busy = next(one for one in bench.engines if one.name == home)
        await report(bench, busy, EngineReport(0, Backlog(0, 1, 1.5, 1e-6, 1e-6)))
        assert home not in await find_engines(bench, [ask(str(number)) for number in range(60, 64)])


@on_bench(3)
async def test_the_service_of_an_engine_is_told_to_the_other_engines_alone(bench: Bench) -> None:
    """Several API processes tell it several times, and the engines count it once."""
    first, *others = bench.engines
    span = ServiceSpan("t", False, 10.0, 25.5)
    first.server.deliver_report(EngineReport(spans=(span,)))
    told = [engine.worker.elsewhere for engine in others]
    await wait_until(lambda: all(told))
    ((name, spans),) = told[0]
    assert name and spans == [span]
    assert told[0] == told[1] and not first.worker.elsewhere
