"""Prometheus metrics: vLLM's names, so that existing dashboards work, and additional ones that start with `slora_`.

The API's own counters and histograms are kept here. With several API processes, each keeps them in files of its own,
and any process answers a scrape with the sums over all files (prometheus_client's multiprocess mode). The files outlive
a process that dies. Gauges and the engine's numbers are read at each scrape. Adapters are labelled with tenant and
digest prefix, because names are not unique across tenants. Only the operator can read the metrics (see
authentication.py).
"""

import os
import time
from collections import Counter as Tally
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Histogram, values
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector

from slora.engine.info import EngineInfo, EngineStats
from slora.pool.page_counts import PageCounts
from slora.request import FinishReason

__all__ = ["Metrics", "allocate_files", "share_metrics"]

# Space for some thousand series. It is allocated at the start, because a write to a memory-mapped file on a full disk
# would kill the process.
_FILE_BYTES = 1 << 20

# The label of all tenants that have no label of their own. A tenant with this name is counted there, too.
_OTHER = "other"

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
    """Makes this process store its metrics in files of its own in `directory`. Call it before any metric is created.
    The metrics continue the counts of an earlier process with the same number.
    """
    # prometheus_client finds the files by this variable.
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(directory)
    values.ValueClass = values.MultiProcessValue(lambda: process)  # type: ignore[no-untyped-call]


class Metrics:
    """The metrics of one server.

    model_name: value of the `model_name` label of vLLM's metrics.
    directory: the files of all API processes, after `share_metrics`; None if this process is the only one.
    restarts: how often each process of the server died and was restarted, by the process's name.
    is_read_only: whether the disk of the data directory is full.
    usage_journal_bytes, usage_ledger_lag_s: see `UsageShipper`.
    batches: numbers of unfinished batches by status, as the runner of this process read them last.
    """

    def __init__(self, model_name: str, directory: Path | None = None) -> None:
        self._model = model_name
        self._registry = CollectorRegistry()
        self._first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "From arrival at the API to the first token."
        )
        self._whole_answer = self._histogram(
            "vllm:e2e_request_latency_seconds", "From arrival at the API to the last token."
        )
        self._finished = Counter(
            "vllm:request_success", "Answers that were completed.", ["model_name", "finished_reason"],
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
        self.restarts: Tally[str] = Tally()
        self.is_read_only = False
        self.usage_journal_bytes = 0
        self.usage_ledger_lag_s = 0.0
        self._engine: tuple[EngineInfo, EngineStats] | None = None
        self._scraped = self._registry if directory is None else CollectorRegistry()
        if directory is not None:
            MultiProcessCollector(self._scraped, str(directory))  # type: ignore[no-untyped-call]
        self._scraped.register(self)

    def _histogram(self, name: str, help_text: str) -> Histogram:
        return Histogram(name, help_text, ["model_name"], registry=self._registry, buckets=_SECONDS)

    def first_token(self, seconds: float) -> None:
        self._first_token.labels(self._model).observe(seconds)

    def finished(self, reason: FinishReason, seconds: float) -> None:
        self._finished.labels(self._model, reason.value).inc()
        self._whole_answer.labels(self._model).observe(seconds)

    def answered(self, route: str, status: int, seconds: float) -> None:
        """Counts one answer. route: the route's pattern; the path would make one label value for each adapter name."""
        self._http.labels(route, str(status)).inc()
        self._http_seconds.labels(route).observe(seconds)

    def quota_refused(self, quota: str) -> None:
        """quota: the field that did not admit a request or an upload."""
        self._quota_refusals.labels(quota).inc()

    def answered_line(self, outcome: str) -> None:
        """Counts the answer to a line of a batch."""
        self._batch_lines.labels(outcome).inc()

    def render(self, engine: tuple[EngineInfo, EngineStats] | None) -> bytes:
        """Returns the text that Prometheus scrapes. Without an engine its metrics are left out rather than shown as
        zeros.
        """
        self._engine = engine
        return generate_latest(self._scraped)

    def collect(self) -> Iterable[Metric]:
        """Makes the metrics that are not counted in this process. The registry calls it at each scrape."""
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
            yield from self._vllm(*self._engine)
            yield from _own(self._engine[1])

    def describe(self) -> Iterable[Metric]:
        return ()

    def _vllm(self, info: EngineInfo, stats: EngineStats) -> Iterator[Metric]:
        held = (stats.pages_total - stats.pages_free - stats.pages_cached) / stats.pages_total
        yield self._gauge("num_requests_running", "Sequences in the running batch.", stats.running)
        waiting = stats.waiting + stats.awaiting_adapter
        yield self._gauge("num_requests_waiting", "Sequences that wait to be computed.", waiting)
        yield self._gauge(
            "kv_cache_usage_perc",
            "Fraction of the page pool in use, adapters included; 1 means all of it.",
            held,
        )
        for name, help_text, value in (
            ("num_preemptions", "Preemptions of sequences.", stats.preemptions),
            (
                "prompt_tokens",
                "Prompt tokens of admitted requests, cached ones included.",
                stats.prompt_tokens,
            ),
            ("prompt_tokens_cached", "Prompt tokens found in the prefix cache.", stats.prefix_hits),
            ("generation_tokens", "Tokens generated.", stats.generated_tokens),
            ("spec_decode_num_drafts", "Drafts of prompt lookup.", stats.drafts),
            ("spec_decode_num_draft_tokens", "Tokens in drafts.", stats.draft_tokens),
            (
                "spec_decode_num_accepted_tokens",
                "Tokens in drafts that became part of an answer.",
                stats.accepted_draft_tokens,
            ),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_hits),
        ):
            counter = CounterMetricFamily(f"vllm:{name}", help_text, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter
        cache = GaugeMetricFamily(
            "vllm:cache_config_info", "The page pool.", labels=["block_size", "cache_dtype", "num_gpu_blocks"]
        )
        cache.add_metric([str(info.block_tokens), info.kv_cache_dtype, str(info.num_pages)], 1)
        yield cache
        lora = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters in the running batch. The value is the time of the scrape.",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        lora.add_metric([str(info.max_num_seqs), ",".join(stats.running_adapters), ""], time.time())
        yield lora

    def _gauge(self, name: str, help_text: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(f"vllm:{name}", help_text, labels=["model_name"])
        gauge.add_metric([self._model], value)
        return gauge


def _own(stats: EngineStats) -> Iterator[Metric]:
    pages = GaugeMetricFamily("slora_pages", "Pages of the pool by state.", labels=["state"])
    for state in ("free", "held", "cached"):
        pages.add_metric([state], getattr(stats, f"pages_{state}"))
    yield pages
    owners = GaugeMetricFamily(
        "slora_pages_by_owner", "Pages of the pool by what they hold.", labels=["owner"]
    )
    owners.add_metric(["free"], stats.pages_free)
    for owner, count in asdict(stats.pages).items():
        owners.add_metric([owner], count)
    yield owners
    tenants = GaugeMetricFamily(
        "slora_tenant_pages",
        "Pages of the pool by tenant and by what they hold. Pages of further tenants, and those that no tenant "
        "owns, count as other.",
        labels=["tenant", "owner"],
    )
    for tenant, counts in _with_other(stats).items():
        for owner, count in asdict(counts).items():
            tenants.add_metric([tenant, owner], count)
    yield tenants
    yield GaugeMetricFamily("slora_adapter_pages", "Pages that hold adapters.", stats.adapter_pages)
    yield GaugeMetricFamily("slora_resident_adapters", "Adapters in the pool.", stats.resident_adapters)
    yield GaugeMetricFamily("slora_pinned_adapters", "Adapters that are pinned.", stats.pinned_adapters)
    yield GaugeMetricFamily(
        "slora_pinned_adapters_loaded", "Pinned adapters that are in the pool.", stats.pinned_loaded
    )
    yield CounterMetricFamily("slora_pin_failures", "Failed fetches of pinned adapters.", stats.pin_failures)
    yield GaugeMetricFamily(
        "slora_requests_awaiting_adapter", "Sequences whose adapter is being fetched.", stats.awaiting_adapter
    )
    yield CounterMetricFamily("slora_adapter_loads", "Adapters copied into the pool.", stats.adapter_loads)
    yield CounterMetricFamily(
        "slora_adapter_evictions", "Evictions of idle adapters.", stats.adapter_evictions
    )
    yield CounterMetricFamily(
        "slora_prefix_evictions", "Evictions of cached prefix blocks.", stats.prefix_evictions
    )
    swap = GaugeMetricFamily(
        "slora_swap_pages", "Host pages for the KV of preempted sequences.", labels=["state"]
    )
    swap.add_metric(["free"], stats.swap_pages_total - stats.swap_pages_used)
    swap.add_metric(["used"], stats.swap_pages_used)
    yield swap
    swapped = CounterMetricFamily(
        "slora_swapped_pages", "Pages copied to the host (out) and back (in).", labels=["direction"]
    )
    swapped.add_metric(["out"], stats.swapped_out_pages)
    swapped.add_metric(["in"], stats.swapped_in_pages)
    yield swapped
    yield CounterMetricFamily(
        "slora_deadline_misses",
        "Requests whose first token could not be computed before their deadline.",
        stats.deadline_misses,
    )
    used = CounterMetricFamily(
        "slora_engine_usage",
        "What all ended requests have used since the engine started, as in the usage ledger.",
        labels=["of"],
    )
    for name, amount in asdict(stats.usage).items():
        used.add_metric([name], amount)
    yield used
    yield CounterMetricFamily("slora_engine_steps", "Steps of the engine.", stats.steps)
    costs = GaugeMetricFamily(
        "slora_cost_seconds",
        "Time that the engine expects for a unit of work, learned from its steps: a step, a token of "
        "prefill, a decoding sequence, a token of such a sequence's context, a page copied to the "
        "host or back, and a byte of an adapter loaded into the pool.",
        labels=["work"],
    )
    for name, seconds in asdict(stats.costs).items():
        costs.add_metric([name.removesuffix("_s")], seconds)
    yield costs


def _with_other(stats: EngineStats) -> dict[str, PageCounts]:
    tenants = {name: counts for name, counts in stats.tenant_pages.items() if name != _OTHER}
    return {**tenants, _OTHER: stats.pages - sum(tenants.values(), PageCounts())}
