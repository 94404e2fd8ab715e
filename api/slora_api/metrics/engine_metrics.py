"""The engine's metrics, made from its snapshot at each scrape."""

import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, replace
from typing import NamedTuple, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from slora.core.engine_state import EngineInfo, EngineStats, HistogramCounts, PageCounts, ServedCounts
from slora.scheduler.served_counts import OTHERS
from slora_adapters.loader.cached_versions import CacheCounts
from slora_adapters.version import AdapterVersion

T = TypeVar("T")

# The labels of vLLM's metrics. A server has one engine.
VLLM_LABELS = ("model_name", "engine")
ENGINE = "0"


class EngineNumbers(NamedTuple):
    """What the engine says at a scrape."""

    info: EngineInfo
    stats: EngineStats
    references: Mapping[AdapterVersion, Collection[str]]  # See `Registry.find_references`.
    answered_at: float  # Monotonic seconds.


def engine_metrics(model_name: str, stats: EngineStats) -> Iterator[Metric]:
    """Yields the engine's metrics except `gateway_metrics`. model_name: value of the `model_name` label of vLLM's
    metrics.
    """
    yield from _vllm(model_name, stats)
    yield from _own(stats)
    yield from _pages(stats)
    yield from _host_cache(stats.host_cache)
    yield from _causes(stats)
    yield from _tenants(stats.tenants)
    yield from _adapters(stats)


def tenants_of(stats: EngineStats) -> set[str]:
    """Returns the tenants that the metrics show, by id."""
    labels = (*stats.tenants, *stats.tenant_pages, *stats.adapters, *stats.host_cache.tenants)
    return {label.partition("/")[0] for label in labels}


def name_tenants(stats: EngineStats, names: Mapping[str, str]) -> EngineStats:
    """Returns the statistics with the names of tenants in place of their ids. A tenant without a name, and one whose
    name stands for further tenants, is shown by its id.
    """

    def show(label: str) -> str:
        tenant, slash, digest = label.partition("/")
        name = names.get(tenant, tenant)
        return f"{tenant if name == OTHERS else name}{slash}{digest}"

    def rename(counts: Mapping[str, T]) -> dict[str, T]:
        return {show(label): count for label, count in counts.items()}

    cache = stats.host_cache
    return replace(
        stats,
        tenants=rename(stats.tenants),
        tenant_pages=rename(stats.tenant_pages),
        adapters=rename(stats.adapters),
        pooled_adapters=tuple(map(show, stats.pooled_adapters)),
        host_cache=replace(cache, tenants=rename(cache.tenants), labels=tuple(map(show, cache.labels))),
    )


def gateway_metrics(model_name: str, engine: EngineNumbers) -> Iterator[Metric]:
    """Yields what gateways route by."""
    info, stats, references, _ = engine
    for name, help_text, value in _vllm_gauges(stats):
        gauge = GaugeMetricFamily(f"vllm:{name}", help_text, labels=VLLM_LABELS)
        gauge.add_metric([model_name, ENGINE], value)
        yield gauge
    yield _cache_config(info)
    lora = GaugeMetricFamily(
        "vllm:lora_requests_info",
        "Adapters in the pool, and adapters that requests wait for. The value is the time of the scrape.",
        labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
    )
    # A name that two tenants use is listed once. A gateway sees only the model that a request names.
    listed = [
        ",".join(sorted({name for one in versions for name in references.get(AdapterVersion(*one), ())}))
        for versions in (stats.loaded_adapters, stats.waiting_adapters)
    ]
    lora.add_metric([str(info.max_num_seqs), *listed], time.time())
    yield lora


def _vllm(model_name: str, stats: EngineStats) -> Iterator[Metric]:
    values = [model_name, ENGINE]
    reasons = GaugeMetricFamily(
        "vllm:num_requests_waiting_by_reason",
        "Sequences that wait for room in the batch and in the pool (capacity), or for an adapter (deferred).",
        labels=[*VLLM_LABELS, "reason"],
    )
    reasons.add_metric([*values, "capacity"], stats.waiting - stats.awaiting_adapter)
    reasons.add_metric([*values, "deferred"], stats.awaiting_adapter)
    yield reasons
    for name, help_text, value in _vllm_counters(stats):
        counter = CounterMetricFamily(f"vllm:{name}", help_text, labels=VLLM_LABELS)
        counter.add_metric(values, value)
        yield counter
    sources = CounterMetricFamily(
        "vllm:prompt_tokens_by_source",
        "Prompt tokens of admitted requests by source: computed, or found in the prefix cache.",
        labels=[*VLLM_LABELS, "source"],
    )
    sources.add_metric([*values, "local_compute"], stats.prefix_queries - stats.prefix_hits)
    sources.add_metric([*values, "local_cache_hit"], stats.prefix_hits)
    yield sources
    for name, help_text, counts in (
        (
            "inter_token_latency_seconds",
            "Time between two tokens of a sequence. Tokens that arrive together count as one.",
            stats.token_gaps,
        ),
        ("iteration_tokens_total", "Tokens that a step computed.", stats.step_tokens),
    ):
        yield _histogram(f"vllm:{name}", help_text, counts, VLLM_LABELS, values)


def _cache_config(info: EngineInfo) -> Metric:
    cache = GaugeMetricFamily(
        "vllm:cache_config_info",
        "The page pool.",
        labels=[
            "block_size",
            "cache_dtype",
            "num_gpu_blocks",
            "kv_cache_size_tokens",
            "kv_cache_max_concurrency",
            "engine",
        ],
    )
    num_tokens = info.num_pages * info.block_tokens
    num_whole = f"{num_tokens / info.max_model_len:.2f}"  # Sequences of maximum length that fit.
    sizes = [str(info.block_tokens), info.kv_cache_dtype, str(info.num_pages), str(num_tokens), num_whole]
    cache.add_metric([*sizes, ENGINE], 1)
    return cache


def _vllm_gauges(stats: EngineStats) -> Iterator[tuple[str, str, float]]:
    held = (stats.pages_total - stats.pages_free - stats.pages_cached) / stats.pages_total
    yield "num_requests_running", "Sequences in the running batch.", stats.running
    yield "num_requests_waiting", "Sequences that wait to be computed.", stats.waiting
    yield (
        "kv_cache_usage_perc",
        "Fraction of the page pool in use, adapters included; 1 means all of it.",
        held,
    )


def _vllm_counters(stats: EngineStats) -> Iterator[tuple[str, str, float]]:
    yield "num_preemptions", "Preemptions of sequences.", stats.preemptions
    yield "prompt_tokens", "Prompt tokens of admitted requests, cached ones included.", stats.prompt_tokens
    yield "prompt_tokens_cached", "Prompt tokens found in the prefix cache.", stats.prefix_hits
    yield "generation_tokens", "Tokens generated.", stats.generated_tokens
    yield "spec_decode_num_drafts", "Drafts of prompt lookup.", stats.drafts
    yield "spec_decode_num_draft_tokens", "Tokens in drafts.", stats.draft_tokens
    yield (
        "spec_decode_num_accepted_tokens",
        "Tokens in drafts that became part of an answer.",
        stats.accepted_draft_tokens,
    )
    yield "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_queries
    yield "prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_hits
    yield "corrupted_requests", "Requests whose logits or hidden states were not finite.", stats.not_finite


def _histogram(
    name: str,
    help_text: str,
    counts: HistogramCounts,
    labels: tuple[str, ...] = (),
    values: list[str] | None = None,
) -> Metric:
    family = HistogramMetricFamily(name, help_text, labels=labels)
    family.add_metric(values or [], counts.cumulate(), counts.total)
    return family


def _own(stats: EngineStats) -> Iterator[Metric]:
    pages = GaugeMetricFamily("slora_pages", "Pages of the pool by state.", labels=["state"])
    for state in ("free", "held", "cached"):
        pages.add_metric([state], getattr(stats, f"pages_{state}"))
    yield pages
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
    yield _histogram("slora_step_seconds", "Time of a step that computed something.", stats.step_seconds)
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


def _pages(stats: EngineStats) -> Iterator[Metric]:
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
    named = {name: counts for name, counts in stats.tenant_pages.items() if name != OTHERS}
    rest = stats.pages - sum(named.values(), PageCounts())
    for tenant, counts in {**named, OTHERS: rest}.items():
        for owner, count in asdict(counts).items():
            tenants.add_metric([tenant, owner], count)
    yield tenants


def _host_cache(counts: CacheCounts) -> Iterator[Metric]:
    yield GaugeMetricFamily("slora_host_cache_adapters", "Adapters in the host cache.", counts.num_adapters)
    size = GaugeMetricFamily("slora_host_cache_bytes", "Bytes of the host cache by state.", labels=["state"])
    size.add_metric(["free"], counts.capacity_bytes - counts.used_bytes)
    size.add_metric(["used"], counts.used_bytes)
    yield size
    tenants = GaugeMetricFamily(
        "slora_tenant_host_cache_bytes",
        "Bytes of the host cache by tenant. Those of further tenants count as other.",
        labels=["tenant"],
    )
    named = {name: held for name, held in counts.tenants.items() if name != OTHERS}
    for tenant, held in {**named, OTHERS: counts.used_bytes - sum(named.values())}.items():
        tenants.add_metric([tenant], held)
    yield tenants


def _causes(stats: EngineStats) -> Iterator[Metric]:
    for name, help_text, label, counts in (
        (
            "slora_adapter_loads_by_cause",
            "Adapters copied into the pool for a request, for a pin, and to prewarm them.",
            "cause",
            stats.loads_by_cause,
        ),
        (
            "slora_adapter_evictions_by_cause",
            "Adapters evicted for their pages, for their slot, and because they were removed.",
            "cause",
            stats.evictions_by_cause,
        ),
        (
            "slora_preemptions",
            "Preemptions whose KV was swapped to the host, or is recomputed, and those of background requests.",
            "kind",
            stats.preemptions_by_kind,
        ),
        (
            "slora_adapter_fetches",
            "Fetches of adapters to the host that ended, by outcome: fetched, or the kind of failure.",
            "outcome",
            stats.fetches_by_outcome,
        ),
    ):
        family = CounterMetricFamily(name, help_text, labels=[label])
        for cause, count in counts.items():
            family.add_metric([cause], count)
        yield family


def _tenants(tenants: Mapping[str, ServedCounts]) -> Iterator[Metric]:
    requests = CounterMetricFamily("slora_tenant_requests", "Ended requests by tenant.", labels=["tenant"])
    colds = CounterMetricFamily(
        "slora_tenant_cold_starts", "Ended requests that waited for an adapter, by tenant.", labels=["tenant"]
    )
    queued = CounterMetricFamily(
        "slora_tenant_queue_seconds",
        "Time that ended requests waited in the queue, without waits for adapters, by tenant.",
        labels=["tenant"],
    )
    tokens = CounterMetricFamily(
        "slora_tenant_tokens",
        "Prompt tokens, cached prompt tokens and generated tokens of ended requests, by tenant.",
        labels=["tenant", "kind"],
    )
    for tenant, counts in tenants.items():
        requests.add_metric([tenant], counts.requests)
        colds.add_metric([tenant], counts.cold_starts)
        queued.add_metric([tenant], counts.queue_s)
        _add_tokens(tokens, [tenant], counts)
    yield from (requests, colds, queued, tokens)


def _adapters(stats: EngineStats) -> Iterator[Metric]:
    labels = ["tenant", "adapter"]
    requests = CounterMetricFamily("slora_adapter_requests", "Ended requests by adapter.", labels=labels)
    colds = CounterMetricFamily(
        "slora_adapter_cold_starts", "Ended requests that waited for an adapter, by adapter.", labels=labels
    )
    tokens = CounterMetricFamily(
        "slora_adapter_tokens",
        "Prompt tokens, cached prompt tokens and generated tokens of ended requests, by adapter.",
        labels=[*labels, "kind"],
    )
    resident = GaugeMetricFamily(
        "slora_adapter_resident",
        "1 while the adapter is in that tier (pool, or host for the host cache), for the busiest adapters.",
        labels=[*labels, "tier"],
    )
    for name, counts in stats.adapters.items():
        tenant, _, digest = name.partition("/")
        values = [tenant, digest or OTHERS]
        if digest:
            resident.add_metric([*values, "pool"], name in stats.pooled_adapters)
            resident.add_metric([*values, "host"], name in stats.host_cache.labels)
        requests.add_metric(values, counts.requests)
        colds.add_metric(values, counts.cold_starts)
        _add_tokens(tokens, values, counts)
    yield from (requests, colds, tokens, resident)


def _add_tokens(family: CounterMetricFamily, values: list[str], counts: ServedCounts) -> None:
    family.add_metric([*values, "prompt"], counts.prompt_tokens)
    family.add_metric([*values, "cached"], counts.cached_tokens)
    family.add_metric([*values, "generated"], counts.generated_tokens)
