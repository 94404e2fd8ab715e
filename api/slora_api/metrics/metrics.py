"""Prometheus metrics. Some have vLLM's names, so that existing dashboards work. The names of all others begin with
`slora_`.

The API's own counters and histograms are kept here. If there are several API processes, each process keeps its counters
and histograms in its own files. Any process answers a scrape with the sums over all files (prometheus_client's
multiprocess mode). The files outlive a process that dies. Gauges and the engine's numbers are read at each scrape.
Adapters are labelled with tenant and digest prefix, because names are not unique across tenants. Only
`vllm:lora_requests_info` has names, because gateways compare them with the model of a request. Only the operator can
read the metrics (see authentication.py), except the few that `--gateway-metrics on` opens to gateways.
"""

import os
import tempfile
import threading
import time
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, values
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector

from slora.core.request import EngineRequest, FinishReason, RequestTiming, RequestUsage
from slora_adapters.process.full_disk import is_full
from slora_api.core.data_dir import DataDir
from slora_api.metrics.engine_metrics import (
    ENGINE,
    VLLM_LABELS,
    EngineNumbers,
    engine_metrics,
    gateway_metrics,
)

# Space for a few thousand series. It is allocated at the start, because a write to a memory-mapped file on a full disk
# would kill the process.
_FILE_BYTES = 1 << 20

# The buckets of vLLM's histograms. Histograms of several servers can be summed only if their buckets are the same.
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_LATENCY_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKEN_GAP_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))

_CHOICES = (1, 2, 5, 10, 20)
_PREEMPTIONS = (0, 1, 2, 5, 10, 20)

# Each tenant with a failed answer is a value of a label, up to this many tenants. The others share one value.
_MAX_FAILING = 100
OTHERS = "others"
_Start = Literal["base", "warm", "cold"]

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


class HostNumbers(NamedTuple):
    """What the API process that answers says of its host."""

    replicas: Mapping[str, bool]  # Whether each engine serves, by its process's name.
    is_read_only: bool  # Whether the disk of the data directory is full.
    # See `UsageShipper`.
    usage_journal_bytes: int
    usage_ledger_lag_s: float


def _vllm_histogram(
    model_name: str, registry: CollectorRegistry, name: str, text: str, buckets: Sequence[float]
) -> Histogram:
    family = Histogram(f"vllm:{name}", text, VLLM_LABELS, registry=registry, buckets=buckets)
    return family.labels(model_name, ENGINE)


class RequestMetrics:
    """Histograms with one observation for each engine request, that is, for each prompt. Lines of batches are left out,
    because they may wait for hours.
    """

    def __init__(self, model_name: str, registry: CollectorRegistry) -> None:
        of_vllm = partial(_vllm_histogram, model_name, registry)

        self._queue = of_vllm(
            "request_queue_time_seconds",
            "From arrival in the engine to the first computed token, waits for adapters included.",
            _LATENCY_S,
        )
        self._prefill = of_vllm(
            "request_prefill_time_seconds",
            "From the first computed prompt token to the first generated token.",
            _LATENCY_S,
        )
        self._decode = of_vllm(
            "request_decode_time_seconds", "From the first token to the last one.", _LATENCY_S
        )
        self._inference = of_vllm(
            "request_inference_time_seconds", "From the first computed token to the last token.", _LATENCY_S
        )
        self._token_time = of_vllm(
            "request_time_per_output_token_seconds",
            "Mean time between the tokens of a request with one choice.",
            _TOKEN_GAP_S,
        )
        self._prompt_tokens = of_vllm("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._generated = of_vllm("request_generation_tokens", "Tokens generated for a request.", _TOKENS)
        self._max_tokens = of_vllm(
            "request_params_max_tokens", "Limit of the tokens of an answer (max_tokens).", _TOKENS
        )
        self._choices = of_vllm("request_params_n", "Answers that a request asks for.", _CHOICES)
        self._preemptions = of_vllm(
            "request_num_preemptions", "Preemptions of all sequences of a request.", _PREEMPTIONS
        )
        first_token = Histogram(
            "slora_first_token_seconds",
            "From arrival in the engine to the first token. Start is base (no adapter), warm (its adapters were in "
            "the pool) or cold (it waited for an adapter).",
            ["start"],
            registry=registry,
            buckets=_FIRST_TOKEN_S,
        )
        starts: tuple[_Start, ...] = ("base", "warm", "cold")
        self._first_token = {start: first_token.labels(start) for start in starts}
        waits = Histogram(
            "slora_adapter_wait_seconds",
            "Time that a cold request waited for its adapters to come to the host (fetch) and to be loaded into "
            "the pool (load).",
            ["stage"],
            registry=registry,
            buckets=_FIRST_TOKEN_S,
        )
        self._fetch, self._load = waits.labels("fetch"), waits.labels("load")

    def count(self, request: EngineRequest, usage: RequestUsage, timing: RequestTiming) -> None:
        """Counts a request that has ended. Stages that the request did not reach are not counted."""
        if request.is_background:
            return
        self._prompt_tokens.observe(len(request.prompt_token_ids))
        self._generated.observe(usage.generated_tokens)
        self._preemptions.observe(timing.num_preemptions)
        if request.pooling is None:
            self._choices.observe(request.sampling.n)
            self._max_tokens.observe(request.sampling.max_tokens or 0)
        if timing.computed_at is None:
            return
        self._queue.observe(timing.computed_at - timing.arrived_at)
        self._inference.observe(timing.ended_at - timing.computed_at)
        if timing.is_cold:
            self._fetch.observe(timing.fetch_s)
            self._load.observe(timing.load_s)
        if timing.first_token_at is None:
            return
        self._prefill.observe(timing.first_token_at - timing.computed_at)
        decode_s = timing.ended_at - timing.first_token_at
        self._decode.observe(decode_s)
        if usage.generated_tokens > 1 and request.sampling.width == 1:
            self._token_time.observe(decode_s / (usage.generated_tokens - 1))
        self._first_token[_start(request, timing)].observe(timing.first_token_at - timing.arrived_at)


def _start(request: EngineRequest, timing: RequestTiming) -> _Start:
    if not request.adapters:
        return "base"
    return "cold" if timing.is_cold else "warm"


class Metrics:
    """The metrics of one server.

    model_name: value of the `model_name` label of vLLM's metrics.
    directory: the directory with the files of all API processes, after `share_metrics`; None if this process is the
        only one.
    restarts: how often each process of the server died and was restarted, by the process's name.
    requests: histograms of the stages of requests.
    batches: the number of unfinished batches by status, as this process's batch runner last read them.
    """

    def __init__(self, model_name: str, directory: Path | None = None) -> None:
        self._model = model_name
        self._registry = CollectorRegistry()
        of_vllm = partial(_vllm_histogram, model_name, self._registry)
        self._first_token = of_vllm(
            "time_to_first_token_seconds", "From arrival at the API to the first token.", _FIRST_TOKEN_S
        )
        self._whole_answer = of_vllm(
            "e2e_request_latency_seconds", "From arrival at the API to the last token.", _LATENCY_S
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
        self._failures = Counter(
            "slora_tenant_failures",
            f"Failed answers by tenant id and status. Tenants after the first {_MAX_FAILING} are one, `{OTHERS}`.",
            ["tenant", "status"],
            registry=self._registry,
        )
        self._failing: set[str] = set()
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
        # What the next scrape shows.
        self._rendering = threading.Lock()
        self._engine: EngineNumbers | None = None
        self._host = HostNumbers({}, is_read_only=False, usage_journal_bytes=0, usage_ledger_lag_s=0.0)
        self._scraped = self._registry if directory is None else CollectorRegistry()
        if directory is not None:
            MultiProcessCollector(self._scraped, str(directory))  # type: ignore[no-untyped-call]
        self._scraped.register(self)

    def observe_first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def count_finished(self, reason: FinishReason, seconds: float) -> None:
        self._finished.labels(self._model, ENGINE, reason.value).inc()
        self._whole_answer.observe(seconds)

    def count_answer(self, route: str, status: int, seconds: float, tenant: str | None = None) -> None:
        """Counts one answer. route: the route's pattern. A path would add a label value for each adapter name. tenant:
        the id of the tenant; None if the request had none.
        """
        self._http.labels(route, str(status)).inc()
        self._http_seconds.labels(route).observe(seconds)
        if tenant is not None and status >= HTTPStatus.BAD_REQUEST:
            if len(self._failing) < _MAX_FAILING:
                self._failing.add(tenant)
            self._failures.labels(tenant if tenant in self._failing else OTHERS, str(status)).inc()

    def count_refusal(self, field: str) -> None:
        """Counts a request or an upload that a quota refused. field: the field of the quota with the exceeded limit."""
        self._quota_refusals.labels(field).inc()

    def count_line(self, outcome: str) -> None:
        """Counts the answer to a line of a batch."""
        self._batch_lines.labels(outcome).inc()

    def read_counts(self, wanted: Mapping[str, Sequence[str]]) -> dict[tuple[str, tuple[str, ...]], float]:
        """Returns the counts of all API processes by name and values of labels. Other labels are summed over. Any
        thread may call this.

        wanted: the names of samples -> the labels that tell them apart.
        """
        counts: defaultdict[tuple[str, tuple[str, ...]], float] = defaultdict(float)
        with self._rendering:
            self._engine = None
            for family in self._scraped.collect():
                for sample in family.samples:
                    if (labels := wanted.get(sample.name)) is not None:
                        counts[sample.name, tuple(sample.labels[label] for label in labels)] += sample.value
        return dict(counts)

    def render(self, engine: EngineNumbers | None, host: HostNumbers) -> bytes:
        """Returns the text that Prometheus scrapes. Without an engine, the engine's metrics are left out rather than
        shown as zeros. Any thread may call this.
        """
        with self._rendering:
            self._engine, self._host = engine, host
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
        for process, count in list(self.restarts.items()):
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
        for replica, is_serving in self._host.replicas.items():
            replicas.add_metric([replica], is_serving)
        yield replicas
        yield GaugeMetricFamily(
            "slora_read_only",
            "1 while the disk of the data directory is full and changes are refused.",
            self._host.is_read_only,
        )
        yield GaugeMetricFamily(
            "slora_usage_journal_bytes",
            "Size of the usage journals of this host. It includes two allocated files for each process.",
            self._host.usage_journal_bytes,
        )
        yield GaugeMetricFamily(
            "slora_usage_ledger_lag_seconds",
            "Time since the usage ledger last had all records of the API process that answers.",
            self._host.usage_ledger_lag_s,
        )
        batches = GaugeMetricFamily(
            "slora_batches", "Batches of all tenants that are not finished.", labels=["status"]
        )
        for status, count in list(self.batches.items()):
            batches.add_metric([status], count)
        yield batches
        if self._engine is not None:
            yield GaugeMetricFamily(
                "slora_engine_stats_age_seconds",
                "Age of the engine's numbers in this scrape. It grows while the engine computes a long step.",
                time.monotonic() - self._engine.answered_at,
            )
            yield from gateway_metrics(self._model, self._engine)
            yield from engine_metrics(self._model, self._engine.stats)

    def describe(self) -> Iterable[Metric]:
        return ()


class _GatewayMetrics:
    """A collector of what gateways route by, for one scrape."""

    def __init__(self, model_name: str, engine: EngineNumbers) -> None:
        self._model = model_name
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        return gateway_metrics(self._model, self._engine)


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
