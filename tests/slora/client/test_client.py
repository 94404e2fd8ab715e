"""An API process knows the load and the adapters of an engine from its reports and from what it has sent since."""

import asyncio
from collections.abc import Collection
from contextlib import aclosing
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from slora.client.open_requests import OpenStreams
from slora.client.router import ReportedState
from slora.core.engine_state import ANSWER_TOKENS, Backlog, EngineReport
from slora.core.messages import Report
from slora.core.request import EngineRequest, FinishReason, StepOutput, TokenDelta, single_adapter
from slora.core.sampling_params import SamplingParams
from slora_adapters.version import AdapterVersion
from tests.support.engine_stack import over_the_wire
from tests.support.event_loop import on_event_loop

BACKLOG = Backlog(3, 2, 1.5, 0.001, 0.01)


def version(index: int) -> AdapterVersion:
    return AdapterVersion("t", f"{index:064x}")


def ask(index: int | None = None, max_tokens: int | None = 8) -> EngineRequest:
    adapters = single_adapter(None if index is None else version(index))
    return EngineRequest("r", "t", [1] * 10, adapters, SamplingParams(max_tokens=max_tokens))


def send(state: ReportedState, report: EngineReport, last: EngineReport, num_taken: int) -> None:
    state.receive(over_the_wire(replace(Report.since(last, report, "e"), num_taken=num_taken)))


def of(indexes: Collection[int]) -> frozenset[AdapterVersion]:
    return frozenset(map(version, indexes))


def test_a_request_counts_once_before_and_after_the_report_that_includes_it() -> None:
    state = ReportedState()
    send(state, first := EngineReport(0, BACKLOG), EngineReport(), 0)
    state.add_sent(ask(7))
    state.add_sent(ask(max_tokens=None))
    seen = state.describe("e")
    assert (seen.num_waiting, seen.num_running) == (5, 2)
    assert abs(seen.load - (1.5 + 20 * 0.001 + (8 + ANSWER_TOKENS) * 0.01)) < 1e-9
    assert seen.resident == {version(7)}
    # The engine has taken the first request, and has refused or ended it. So its adapter is not there.
    send(state, EngineReport(1, BACKLOG), first, 1)
    seen = state.describe("e")
    assert seen.num_waiting == 4 and seen.resident == set()
    assert abs(seen.load - (1.5 + 10 * 0.001 + ANSWER_TOKENS * 0.01)) < 1e-9


def test_a_lost_engine_has_no_state() -> None:
    state = ReportedState()
    state.add_sent(ask(3))
    send(state, EngineReport(5, BACKLOG, of([1]), of([2])), EngineReport(), 1)
    state.add_sent(ask(4))
    state.clear()
    assert state.describe("e") == ReportedState().describe("e")
    # The next start of the engine counts from 0.
    state.add_sent(ask(3))
    send(state, EngineReport(1), EngineReport(), 1)
    assert state.describe("e").num_waiting == 0


@given(
    st.lists(st.tuples(*[st.frozensets(st.integers(0, 9))] * 2), min_size=1, max_size=6), st.integers(0, 5)
)
def test_changes_add_up_to_the_sets_of_the_last_report(
    sets: list[tuple[frozenset[int], frozenset[int]]], joined_at: int
) -> None:
    """A process that connects later gets the whole sets first."""
    reports = [EngineReport(0, BACKLOG, of(resident), of(on_host)) for resident, on_host in sets]
    joined_at = min(joined_at, len(reports) - 1)
    state = ReportedState()
    send(state, reports[joined_at], EngineReport(), 0)
    for last, report in zip(reports[joined_at:], reports[joined_at + 1 :], strict=False):
        send(state, report, last, 0)
    seen = state.describe("e")
    assert (seen.resident, seen.on_host) == (reports[-1].resident, reports[-1].on_host)


@on_event_loop
async def test_other_tasks_run_while_a_slow_reader_catches_up() -> None:
    """Born from a bug: a reader with many outputs wrote all of them, even if its client had left meanwhile."""
    streams, turns = OpenStreams(), 0

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def send(request: EngineRequest) -> None:
        for token in range(1000):
            reason = FinishReason.LENGTH if token == 999 else None
            streams.put(StepOutput(request.request_id, TokenDelta((token,), reason)))

    other = asyncio.create_task(take_turns())
    token_ids: list[int] = []
    request = EngineRequest("r", "t", [1], (), SamplingParams())
    async with aclosing(streams.open(request, send, lambda request_id: None)) as arriving:
        async for arrived in arriving:
            token_ids += [token for delta in arrived for token in delta.token_ids]
            assert len(token_ids) <= 64 * (turns + 1), "no other task runs between two lists"
    other.cancel()
    assert token_ids == list(range(1000))
