import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from slora.core.engine_state import REPORT_S, EngineReport, EngineStats, Pin
from slora.core.errors import DeadlineMissed, RequestRefused
from slora.core.messages import Abort, Add, Observe, RemoveAdapter, SetPins
from slora.core.request import EndedRequest, EngineRequest, StepOutput, single_adapter
from slora.core.sampling_params import SamplingParams
from slora.engine.engine import Engine
from slora.engine.worker import EngineWorker, Stop, Wake
from slora.memory.tenant_account import TenantAccount
from slora_adapters.loader.source import DirectorySource
from slora_adapters.version import AdapterVersion
from tests.support.driving import make_engine, make_source, start_engine
from tests.support.model_kit import ModelKit
from tests.support.scripted_source import ScriptedSource

GREEDY = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
WAIT_S = 300.0
Outputs = queue.SimpleQueue[StepOutput]


@contextmanager
def working(worker: EngineWorker, engine: Engine) -> Iterator[None]:
    thread = threading.Thread(target=worker.run, args=(engine,))
    thread.start()
    try:
        yield
    finally:
        worker.post(Stop())
        thread.join(WAIT_S)
        assert not thread.is_alive()


def make_worker() -> tuple[EngineWorker, Outputs]:
    told: Outputs = queue.SimpleQueue()

    def deliver(outputs: list[StepOutput], ended: list[EndedRequest]) -> None:
        for output in outputs:
            told.put(output)

    return EngineWorker(deliver), told


def ask(name: str, adapter: AdapterVersion | None = None) -> EngineRequest:
    return EngineRequest(name, "t", [1, 2], single_adapter(adapter), GREEDY)


def stats_of(worker: EngineWorker) -> EngineStats:
    answers: queue.SimpleQueue[EngineStats] = queue.SimpleQueue()
    worker.post(Observe(), answers.put)
    return answers.get(timeout=WAIT_S)


def test_an_idle_worker_wakes_for_a_request_and_for_an_adapter_that_arrives(kit: ModelKit) -> None:
    worker, told = make_worker()
    shape = kit.spec.shape("float32")
    source = DirectorySource(shape, "float32", notify=lambda: worker.post(Wake()), num_threads=1)
    version = source.add(kit.adapters["odd_rank"])
    with working(worker, make_engine(kit, source, 100)):
        for name, adapter in (("base", None), ("adapted", version)):
            worker.post(Add(ask(name, adapter)))
            outputs = [told.get(timeout=WAIT_S) for _ in range(5)]
            assert {output.request_id for output in outputs} == {name}
        assert stats_of(worker).resident_adapters == 1
        worker.post(RemoveAdapter(version))
        assert stats_of(worker).resident_adapters == 0
    source.close()


def test_a_worker_reports_its_requests_and_charges_and_then_nothing_until_there_is_work(
    kit: ModelKit,
) -> None:
    reports: queue.SimpleQueue[EngineReport] = queue.SimpleQueue()
    worker = EngineWorker(lambda outputs, ended: None, tell_report=reports.put)
    engine, versions = start_engine(kit, 100)
    with working(worker, engine):
        worker.post(Add(ask("base")))
        worker.post(Add(ask("adapted", versions["odd_rank"])))
        found = [reports.get(timeout=WAIT_S)]
        while found[-1].num_taken < 2 or found[-1].backlog.load_s:
            found.append(reports.get(timeout=WAIT_S))
        assert found[-1].resident == {versions["odd_rank"]}
        assert found[-1].backlog[:2] == (0, 0) and found[-1].backlog.answer_token_s > 0
        spans = [span for report in found for span in report.spans]
        assert [span.start for span in spans] == [0.0, *(span.end for span in spans[:-1])]
        assert spans[-1].end == engine.scheduler.paging.tenants.find("t").charged > 0
        with pytest.raises(queue.Empty):
            reports.get(timeout=5 * REPORT_S)


def test_a_refused_request_is_answered_and_an_aborted_one_is_not(kit: ModelKit) -> None:
    worker, told = make_worker()
    source, _ = make_source(kit)
    worker.post(Add(EngineRequest("refused", "t", [], (), GREEDY)))
    worker.post(Add(ask("aborted")))
    worker.post(Abort("aborted"))
    with working(worker, make_engine(kit, source, 100)):
        output = told.get(timeout=WAIT_S)
        assert output.request_id == "refused" and isinstance(output.error, RequestRefused)
        assert stats_of(worker).pages_held == 0
    assert told.empty()


def test_the_begin_of_each_request_is_reported_once_and_before_its_first_token(kit: ModelKit) -> None:
    told: queue.SimpleQueue[str] = queue.SimpleQueue()

    def deliver(outputs: list[StepOutput], ended: list[EndedRequest]) -> None:
        for output in outputs:
            told.put(output.request_id)

    worker = EngineWorker(deliver, lambda ids: told.put(f"begun: {', '.join(ids)}"))
    source, _ = make_source(kit)
    for name in ("a", "b"):
        worker.post(Add(ask(name)))
    with working(worker, make_engine(kit, source, 100)):
        found = [told.get(timeout=WAIT_S) for _ in range(11)]
    assert found[0] == "begun: a, b" and sorted(found[1:]) == ["a"] * 5 + ["b"] * 5


def test_a_lost_page_ends_the_worker_when_it_is_idle(kit: ModelKit) -> None:
    worker, told = make_worker()
    engine, _ = start_engine(kit, 100)
    engine.scheduler.paging.pool.allocate(1, TenantAccount("lost"))
    worker.post(Add(ask("r")))
    with pytest.raises(AssertionError, match="reference counts differ"):
        worker.run(engine)
    assert told.qsize() == 5


def test_a_missed_deadline_is_reported_by_an_idle_worker(kit: ModelKit) -> None:
    """The request's adapter never loads and no other request arrives. The request must still end at its deadline."""
    worker, told = make_worker()
    late = AdapterVersion("t", "never")
    engine = make_engine(kit, ScriptedSource({late: 1}), 100)
    with working(worker, engine):
        worker.post(Add(EngineRequest("r", "t", [1, 2], single_adapter(late), GREEDY, deadline_s=0.2)))
        output = told.get(timeout=WAIT_S)
        assert output.request_id == "r" and isinstance(output.error, DeadlineMissed)
        assert stats_of(worker).deadline_misses == 1


class WatchedSource(ScriptedSource):
    """A source that records the requested versions in `asked`."""

    def __init__(self, num_pages: dict[AdapterVersion, int]) -> None:
        super().__init__(num_pages)
        self.asked: queue.SimpleQueue[AdapterVersion] = queue.SimpleQueue()

    def request(self, version: AdapterVersion) -> None:
        super().request(version)
        self.asked.put(version)


def test_an_idle_worker_retries_the_fetch_of_a_pinned_adapter(kit: ModelKit) -> None:
    worker, _ = make_worker()
    version = AdapterVersion("t", "late")
    source = WatchedSource({version: 1})
    with working(worker, make_engine(kit, source, 100)):
        worker.post(SetPins([Pin(version)]))
        assert source.asked.get(timeout=WAIT_S) == version
        source.fail(version, "unavailable")
        worker.post(Wake())
        assert source.asked.get(timeout=WAIT_S) == version
        stats = stats_of(worker)
        assert (stats.pinned_adapters, stats.pinned_loaded, stats.pin_failures) == (1, 0, 1)
