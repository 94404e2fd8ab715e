"""Prometheus metrics. Some have vLLM's names, so that existing dashboards work. The names of all others begin with
`slora_`.

The API's own counters and histograms are kept here. If there are several API processes, each process keeps its counters
and histograms in its own files. Any process answers a scrape with the sums over all files (prometheus_client's
multiprocess mode). The files outlive a process that dies. Gauges and the engine's numbers are read at each scrape.
Adapters are labelled with tenant and digest prefix, because names are not unique across tenants. Only
`vllm:lora_requests_info` has names, because gateways compare them with the model of a request. Only the operator can
read the metrics (see authentication.py), except the few that `--gateway-metrics on` opens to gateways.

The folder in which API workers keep their counters; see `metrics/metrics.py`.
"""

import asyncio
import os
import tempfile
import time
from collections import Counter as Tally
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, values
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector

from slora.core.engine_state import EngineInfo, EngineStats
from slora.core.request import FinishReason
from slora_adapters.process.full_disk import is_full
from slora_adapters.version import AdapterVersion
from slora_api.core.data_dir import DataDir
from slora_api.metrics.engine_metrics import engine_metrics, gateway_metrics
from slora_api.metrics.request_metrics import (
    ENGINE,
    FIRST_TOKEN_S,
    LATENCY_S,
    VLLM_LABELS,
    RequestMetrics,
)

# Space for a few thousand series. It is allocated at the start, because a write to a memory-mapped file on a full disk
# would kill the process.
_FILE_BYTES = 1 << 20

# Histogram buckets in seconds: from one decode step to the longest answers, densest where users notice a delay.
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


def allocate_files(directory: Path, num_processes: int) -> None:
    """Creates the files of processes 1 to `num_processes`, all with zeros. Raises OSError if the disk has no room."""
    directory.mkdir(mode=0o700, exist_ok=True)
    for stale in directory.iterdir():
        stale.unlink()
    for process in range(1, num_processes + 1):
        for kind in ("counter", "histogram"):
            with (directory / f"{kind}_{process}.db").open("xb") as file:
                os.posix_fallocate(file.fileno(), 0, _FILE_BYTES)


def share_metrics(directory: Path, process: int) -> None:
    """Makes this process store its metrics in its own files in `directory`. The counts continue from the counts of an
    earlier process with the same number. Call this before any metric is created.
    """
    # prometheus_client finds the files by this variable.
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(directory)
    values.ValueClass = values.MultiProcessValue(lambda: process)  # type: ignore[no-untyped-call]


class EngineNumbers(NamedTuple):
    """What the engine says at a scrape. references: the names of its adapters, see `Registry.find_references`."""

    info: EngineInfo
    stats: EngineStats
    references: Mapping[AdapterVersion, Collection[str]]


class Metrics:
    """The metrics of one server.

    model_name: value of the `model_name` label of vLLM's metrics.
    directory: the directory with the files of all API processes, after `share_metrics`; None if this process is the
        only one.
    restarts: how often each process of the server died and was restarted, by the process's name.
    read_replicas: returns whether each engine serves, by its process's name.
    is_read_only: whether the disk of the data directory is full.
    usage_journal_bytes, usage_ledger_lag_s: see `UsageShipper`.
    requests: histograms of the stages of requests.
    batches: the number of unfinished batches by status, as this process's batch runner last read them.
    """

    def __init__(self, model_name: str, directory: Path | None = None) -> None:
        self._model = model_name
        self._registry = CollectorRegistry()
        self._first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "From arrival at the API to the first token.", FIRST_TOKEN_S
        )
        self._whole_answer = self._histogram(
            "vllm:e2e_request_latency_seconds", "From arrival at the API to the last token.", LATENCY_S
        )
        self.requests = RequestMetrics(model_name, self._registry)
        self._finished = Counter(
            "vllm:request_success", "Answers that were completed.", [*VLLM_LABELS, "finished_reason"],
            registry=self._registry,
        )  # fmt: skip
        self._http = Counter(
            "slora_http_requests",
            "Answers by route and status. Status 0 counts clients that disconnected before an answer.",
            ["route", "status"],
            registry=self._registry,
        )
        self._http_seconds = Histogram(
            "slora_http_request_seconds",
            "Time from the request to the end of its answer.",
            ["route"],
            registry=self._registry,
            buckets=_SECONDS,
        )
        self._quota_refusals = Counter(
            "slora_quota_refusals", "Requests and uploads that a quota refused, by the field of the quota.",
            ["quota"], registry=self._registry,
        )  # fmt: skip
        self._batch_lines = Counter(
            "slora_batch_lines", "Lines of batches that were answered, by outcome.", ["outcome"],
            registry=self._registry,
        )  # fmt: skip
        self.batches: dict[str, int] = {}
        self.restarts: Tally[str] = Tally(engine=0, loader=0)
        self.read_replicas: Callable[[], Mapping[str, bool]] = dict
        self.is_read_only = False
        self.usage_journal_bytes = 0
        self.usage_ledger_lag_s = 0.0
        self._engine: EngineNumbers | None = None
        # The last answer of an engine, when it came, and the question that is not answered yet.
        self._last_engine: EngineNumbers | None = None
        self._answered_at = 0.0
        self._asking: asyncio.Task[EngineNumbers | None] | None = None
        self._scraped = self._registry if directory is None else CollectorRegistry()
        if directory is not None:
            MultiProcessCollector(self._scraped, str(directory))  # type: ignore[no-untyped-call]
        self._scraped.register(self)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(name, help_text, VLLM_LABELS, registry=self._registry, buckets=buckets)
        return family.labels(self._model, ENGINE)

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def finished(self, reason: FinishReason, seconds: float) -> None:
        self._finished.labels(self._model, ENGINE, reason.value).inc()
        self._whole_answer.observe(seconds)

    def answered(self, route: str, status: int, seconds: float) -> None:
        """Counts one answer. route: the route's pattern. A path would add a label value for each adapter name."""
        self._http.labels(route, str(status)).inc()
        self._http_seconds.labels(route).observe(seconds)

    def quota_refused(self, quota: str) -> None:
        """Counts a request or an upload that a quota refused. quota: the field with the exceeded limit."""
        self._quota_refusals.labels(quota).inc()

    def answered_line(self, outcome: str) -> None:
        """Counts the answer to a line of a batch."""
        self._batch_lines.labels(outcome).inc()

    async def read_engine(
        self, ask: Callable[[], Coroutine[Any, Any, EngineNumbers | None]], patience_s: float
    ) -> EngineNumbers | None:
        """Asks the engine, and returns its last answer: this one, if it comes within `patience_s`. All scrapes
        at a time wait for the same answer, which may also be there for a later one.
        """
        if self._asking is None:
            self._asking = asyncio.create_task(ask())
            self._asking.add_done_callback(self._note_engine)
        asking = self._asking
        await asyncio.wait([asking], timeout=patience_s)
        return asking.result() if asking.done() else self._last_engine

    def _note_engine(self, asking: "asyncio.Task[EngineNumbers | None]") -> None:
        self._asking = None
        if not asking.cancelled() and asking.exception() is None:
            self._last_engine, self._answered_at = asking.result(), time.monotonic()

    def render(self, engine: EngineNumbers | None) -> bytes:
        """Returns the text that Prometheus scrapes. Without an engine, the engine's metrics are left out rather than
        shown as zeros.
        """
        self._engine = engine
        return generate_latest(self._scraped)

    def render_for_gateway(self, engine: EngineNumbers | None) -> bytes:
        """Returns the part of the text that gateways route by. It is empty without an engine."""
        registry = CollectorRegistry()
        if engine is not None:
            registry.register(_GatewayMetrics(self._model, engine))
        return generate_latest(registry)

    def collect(self) -> Iterable[Metric]:
        """Yields the metrics that are read at each scrape instead of counted. The registry calls this method."""
        restarts = CounterMetricFamily(
            "slora_process_restarts",
            "Number of times that a process of the server died and was restarted.",
            labels=["process"],
        )
        for process, count in self.restarts.items():
            restarts.add_metric([process], count)
        yield restarts
        yield GaugeMetricFamily(
            "slora_ready", "1 while the engine and the loader are connected.", self._engine is not None
        )
        replicas = GaugeMetricFamily(
            "slora_replica_serving",
            "1 while this engine process and the loader are connected.",
            labels=["replica"],
        )
        for replica, is_serving in self.read_replicas().items():
            replicas.add_metric([replica], is_serving)
        yield replicas
        yield GaugeMetricFamily(
            "slora_read_only",
            "1 while the disk of the data directory is full and changes are refused.",
            self.is_read_only,
        )
        yield GaugeMetricFamily(
            "slora_usage_journal_bytes",
            "Size of the usage journals of this host. It includes two allocated files for each process.",
            self.usage_journal_bytes,
        )
        yield GaugeMetricFamily(
            "slora_usage_ledger_lag_seconds",
            "Time since the usage ledger last had all records of the API process that answers.",
            self.usage_ledger_lag_s,
        )
        batches = GaugeMetricFamily(
            "slora_batches", "Batches of all tenants that are not finished.", labels=["status"]
        )
        for status, count in self.batches.items():
            batches.add_metric([status], count)
        yield batches
        if self._engine is not None:
            yield GaugeMetricFamily(
                "slora_engine_stats_age_seconds",
                "Age of the engine's numbers in this scrape. It grows while the engine computes a long step.",
                time.monotonic() - self._answered_at,
            )
            yield from gateway_metrics(self._model, *self._engine)
            yield from engine_metrics(self._model, self._engine.stats)

    def describe(self) -> Iterable[Metric]:
        return ()


class _GatewayMetrics:
    """A collector of what gateways route by, for one scrape."""

    def __init__(self, model_name: str, engine: EngineNumbers) -> None:
        self._model = model_name
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        return gateway_metrics(self._model, *self._engine)


def open_metrics_files(stack: AsyncExitStack, data: DataDir, num_workers: int) -> Path:
    """Returns the folder with an empty file for each worker. The folder is in the data directory if the disk has room,
    else in a temporary directory.
    """
    try:
        allocate_files(data.metrics, num_workers)
        return data.metrics
    except OSError as error:
        if not is_full(error):
            raise
    temporary = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slora-")))
    allocate_files(temporary, num_workers)
    return temporary
