"""What an engine tells the API: its facts, the snapshot that metrics and consoles show, and its reports to routers.

API processes read these values, so this module does not import torch.
"""

import itertools
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import reduce
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

from slora.core.cost_model import CostModel
from slora.core.request import DEFAULT_SHARE, RequestUsage, TenantShare
from slora_adapters.loader.cached_versions import CacheCounts
from slora_adapters.version import AdapterVersion
from slora_kernels.layout import ModelShape, lay_out_adapter, name_module
from slora_kernels.partition import Partition

_Part = TypeVar("_Part", "LiveState", "EngineStats")


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Numbers of pages by content. They count all pages of the pool that are not free, or the pages of one tenant."""

    kv: int = 0  # KV of running sequences.
    prefixes: int = 0  # Cached prefixes, which no sequence uses now.
    adapters: int = 0  # Adapters that are in use or being loaded.
    idle_adapters: int = 0  # Adapters that stay cached.

    @property
    def total(self) -> int:
        return self.kv + self.prefixes + self.adapters + self.idle_adapters

    def __add__(self, other: "PageCounts") -> "PageCounts":
        return PageCounts(
            self.kv + other.kv,
            self.prefixes + other.prefixes,
            self.adapters + other.adapters,
            self.idle_adapters + other.idle_adapters,
        )

    def __sub__(self, other: "PageCounts") -> "PageCounts":
        return PageCounts(
            self.kv - other.kv,
            self.prefixes - other.prefixes,
            self.adapters - other.adapters,
            self.idle_adapters - other.idle_adapters,
        )


class PageOwner(NamedTuple):
    """The content and the owner of a page, as a cell of a map shows them."""

    content: str  # "kv", "prefix", "adapter" or "idle_adapter", as in PageCounts.
    tenant: str  # The owner of the page; empty for a public prefix.
    digest: str = ""  # The digest of an adapter; empty for other content.


@dataclass(frozen=True, slots=True)
class PageMap:
    """A drawing of the page pool: what each page holds, and for which tenant.

    stride: cell C shows page C * stride. cells: one uint16 for each cell; 0 is a free page, N is owners[N - 1].
    """

    stride: int
    cells: bytes
    owners: tuple[PageOwner, ...]


# The expected number of further tokens of an answer, unless `max_tokens` allows fewer. It is the same for new and for
# long answers, because nothing is known of their lengths.
ANSWER_TOKENS = 256


class Backlog(NamedTuple):
    """The work that the unfinished requests of an engine still need. Routers compare it between engines.

    num_waiting, num_running: numbers of sequences.

    load_s: estimated seconds of work of these sequences, in full batches.
    prompt_token_s, answer_token_s: estimated seconds of work of each further token of a prompt or an answer.
    """

    num_waiting: int = 0
    num_running: int = 0
    load_s: float = 0.0
    prompt_token_s: float = 0.0
    answer_token_s: float = 0.0


class ServiceSpan(NamedTuple):
    """What an engine charged to one tenant between two reports, for the other engines.

    start, end: the tokens that the engine had charged to the account since its start, at the last report and now.

    A receiver adds a span once, however often it arrives: it remembers the largest end. If it does not know the
    account's counter, it adds only this span, and not what the tenant received before.
    """

    tenant: str
    is_background: bool
    start: float
    end: float


class AdapterPlace(StrEnum):
    """The places of an adapter between the store and the pool.

    POOL: loaded; a request can run immediately.
    LOADING: being loaded from the host into the pool.
    HOST: was fetched to the host, where it stays until it is evicted from the host cache.
    FETCHING: being fetched from the store to the host.
    """

    POOL = "pool"
    LOADING = "loading"
    HOST = "host"
    FETCHING = "fetching"


@dataclass(frozen=True, slots=True)
class HistogramCounts:
    """The counts of a histogram at one moment, as Prometheus expects them.

    counts[i]: number of values above bounds[i - 1], up to bounds[i]. The last count is the number of values above all
        bounds.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float  # The sum of all values.

    def __add__(self, other: "HistogramCounts") -> "HistogramCounts":
        """The counts of both. They must have the same bounds."""
        counts = tuple(map(sum, zip(self.counts, other.counts, strict=True)))
        return HistogramCounts(self.bounds, counts, self.total + other.total)

    def cumulate(self) -> list[tuple[str, float]]:
        """Returns Prometheus' cumulative buckets: each upper bound as text, with the number of values up to it."""
        buckets, count = [], 0
        for bound, more in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            count += more
            buckets.append((bound, float(count)))
        return buckets


class Histogram:
    """Counts values. bounds: the upper bounds of its buckets, ascending."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(map(float, bounds))
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def count(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    def read(self) -> HistogramCounts:
        return HistogramCounts(self._bounds, tuple(self._counts), self._total)


@dataclass(frozen=True, slots=True)
class LoadPaces:
    """Measured seconds per byte of a packed adapter. They predict the cold start of an adapter outside the pool."""

    # The copy from the host cache to the pool. With tensor parallelism, only the bytes of one rank count.
    pool: float
    # The fetch to the host cache, by tier. A tier has an entry once an adapter was fetched from it. The bytes of all
    # ranks count.
    host: Mapping[str, float]

    def load_ms(self, num_bytes: int, tiers: Iterable[str], num_ranks: int = 1) -> dict[str, float | None]:
        """Milliseconds to load an adapter into the pool: from the host cache, and from each tier.

        num_bytes: the bytes of each tensor-parallel rank.

        None for a tier from which no adapter was fetched yet. Concurrent loads and decode steps make a load slower than
        this.

        Worked example: at 0.1 ns per byte into the pool and 1 ns per byte from a file, 100 MB take 10 ms from the host
        cache and 110 ms from a file.
        """
        pool_s = self.pool * num_bytes
        from_tiers = {
            tier: None
            if (byte_s := self.host.get(tier)) is None
            else _ms(byte_s * num_bytes * num_ranks + pool_s)
            for tier in tiers
        }
        return {"host": _ms(pool_s), **from_tiers}


def _ms(seconds: float) -> float:
    """Converts to milliseconds with three significant digits, because the measurement is not more accurate."""
    return float(f"{1e3 * seconds:.3g}")


@dataclass(frozen=True, slots=True)
class ServedCounts:
    """Sums over ended requests. Background requests count only in the sums of tokens."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    cold_starts: int = 0  # Requests that waited for an adapter.
    queue_s: float = 0.0  # See `RequestTiming`.

    def __add__(self, other: "ServedCounts") -> "ServedCounts":
        return ServedCounts(
            self.requests + other.requests,
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.generated_tokens + other.generated_tokens,
            self.cold_starts + other.cold_starts,
            self.queue_s + other.queue_s,
        )


# Facts that may differ between the engines of one server. Each engine takes its share of the memory that is free.
_OWN_FACTS = ("num_pages", "device")


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Fixed facts of the engine, known before the first request. Sizes are in tokens, pages and bytes."""

    model_name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    kv_cache_dtype: str
    device: str
    kernels: str
    num_pages: int
    block_tokens: int
    full_page_bytes: int  # Size of a page on each tensor-parallel rank.
    max_lora_rank: int
    max_composed_adapters: int
    max_num_seqs: int
    scheduling: str
    shape: ModelShape  # The sizes of the whole model.
    can_embed: bool = True  # Whether the model's hidden states can be read, which embeddings need.
    num_ranks: int = 1  # Number of tensor-parallel ranks.
    prefix_cache: str = "tenant"  # Which cached prefixes a request may reuse, see `EngineConfig`.
    weight_form: str | None = None  # Of the linears, such as int8. None: numbers of `dtype`.

    def with_added_tokens(self, num_added: int) -> "EngineInfo":
        """Returns the facts of a request to an adapter with added tokens behind those of the base model."""
        return replace(self, vocab_size=self.vocab_size + num_added) if num_added else self

    @staticmethod
    def merge(infos: "Sequence[EngineInfo]") -> "EngineInfo":
        """Returns the facts on which a request can rely in every engine."""
        return replace(infos[0], num_pages=min(info.num_pages for info in infos))

    def explain_difference(self, found: "EngineInfo") -> str | None:
        """Returns why an engine with `found` cannot serve beside an engine with these facts; None if it can."""
        if self.device.partition(":")[0] != found.device.partition(":")[0]:
            return f"its device is {found.device}, but that of the other replicas is {self.device}"
        for fact in fields(self):
            wanted, value = getattr(self, fact.name), getattr(found, fact.name)
            if fact.name not in _OWN_FACTS and wanted != value:
                return f"its {fact.name} is {value}, but that of the other replicas is {wanted}"
        return None

    def count_rank_bytes(self, packed_bytes: int, target_modules: Collection[str]) -> int:
        """Returns the bytes that an adapter takes in the page pool of each tensor-parallel rank.

        packed_bytes: the bytes that it takes without tensor parallelism. target_modules: the names of its modules.

        The result is exact if the adapter has the same rank in all of its modules. Otherwise it is an estimate, because
        some modules shrink more than others when they are divided.
        """
        if self.num_ranks == 1:
            return packed_bytes
        partition = Partition(self.shape, self.num_ranks)
        ranks = [int(name_module(module.path) in target_modules) for module in self.shape.modules]
        whole, part = (
            lay_out_adapter(shape, ranks).num_bytes for shape in (self.shape, partition.rank_shape)
        )
        return -(-packed_bytes * part // whole) if whole else packed_bytes


@dataclass(frozen=True, slots=True)
class TenantPurge:
    """The numbers of items that a purge of a tenant dropped. num_pages: pool pages that were overwritten with zeros."""

    num_requests: int
    num_adapters: int
    num_pages: int

    def __add__(self, other: "TenantPurge") -> "TenantPurge":
        return TenantPurge(
            self.num_requests + other.num_requests,
            self.num_adapters + other.num_adapters,
            self.num_pages + other.num_pages,
        )


class Quantiles(NamedTuple):
    """The median and the 99th percentile of recent times in seconds, and the number of these times."""

    p50: float
    p99: float
    num_times: int


def _slowest(quantiles: Sequence[Quantiles | None]) -> Quantiles | None:
    return max(filter(None, quantiles), key=lambda times: times.p99, default=None)


@dataclass(frozen=True, slots=True)
class TenantState:
    """The state of one tenant, or of all tenants together."""

    pages: PageCounts = field(default_factory=PageCounts)
    # Numbers of sequences.
    running: int = 0
    waiting: int = 0
    tokens_per_s: float = 0.0  # Rate of generated tokens in the last seconds.
    # Times from the arrival in the engine to the first token; None without recent first tokens.
    first_token: Quantiles | None = None
    interval: Quantiles | None = None  # Times between two tokens; None without recent intervals.

    def __add__(self, other: "TenantState") -> "TenantState":
        """The state of the tenant in both engines. Quantiles are those of the slower engine."""
        return TenantState(
            self.pages + other.pages,
            self.running + other.running,
            self.waiting + other.waiting,
            self.tokens_per_s + other.tokens_per_s,
            _slowest([self.first_token, other.first_token]),
            _slowest([self.interval, other.interval]),
        )


class AdapterWork(NamedTuple):
    """The number of tokens that were computed with an adapter in the last seconds, prompts included.

    A token that uses several adapters counts for each adapter. digest: empty for the base model.
    """

    tenant: str
    digest: str
    num_tokens: int


class PoolEvent(NamedTuple):
    """An event in the pool while the engine is observed."""

    number: int  # Grows by one with each event.
    time_s: float  # Unix time.
    kind: str  # "load" or "eviction" of an adapter, "prefix_eviction", or "preemption".
    tenant: str
    digest: str  # The digest of the adapter.
    num_times: int  # Number of such events since the last observation.


def _join_maps(maps: Sequence[PageMap]) -> PageMap:
    """Draws the pools one after the other, with as many cells in all as one map has."""
    stride = len(maps) * max(drawn.stride for drawn in maps)
    numbers: dict[PageOwner, int] = {}
    cells = array("H")
    for drawn in maps:
        table = [0, *(numbers.setdefault(owner, len(numbers) + 1) for owner in drawn.owners)]
        cells.extend(table[cell] for cell in array("H", drawn.cells)[:: stride // drawn.stride])
    return PageMap(stride, cells.tobytes(), tuple(numbers))


def _add_work(listed: Sequence[tuple[AdapterWork, ...]]) -> tuple[AdapterWork, ...]:
    counts: Counter[tuple[str, str]] = Counter()
    for tenant, digest, num_tokens in itertools.chain(*listed):
        counts[tenant, digest] += num_tokens
    return tuple(AdapterWork(*key, count) for key, count in counts.items())


def _join_events(listed: Sequence[tuple[PoolEvent, ...]]) -> tuple[PoolEvent, ...]:
    """Each engine numbers its own events. The times number the events of all engines in one order."""
    events = (event._replace(number=int(event.time_s * 1e6)) for event in itertools.chain(*listed))
    return tuple(sorted(events, key=lambda event: event.number))


def _join_caches(caches: Sequence[CacheCounts]) -> CacheCounts:
    """The engines share one host cache, but each lists its own adapters. An engine without a loader knows nothing."""
    largest = max(caches, key=lambda cache: cache.capacity_bytes)
    return replace(largest, labels=tuple(sorted({label for cache in caches for label in cache.labels})))


def _add_up(values: Sequence[Any]) -> Any:
    return reduce(_add, values)


def _add(first: Any, second: Any) -> Any:
    """Adds maps by their keys, joins tuples, and adds other values."""
    if isinstance(first, Mapping):
        new = {key: _add(first[key], value) if key in first else value for key, value in second.items()}
        return {**first, **new}
    if isinstance(first, tuple):
        return tuple(sorted({*first, *second}))
    return first + second


# Metadata of the fields of snapshots that are not added up over several engines.
_MAX, _MIN, _OF_FIRST = {"merge": max}, {"merge": min}, {"merge": itemgetter(0)}


def _merge_fields(parts: Sequence[_Part]) -> _Part:
    """Adds values of one class up, field by field, as the fields' metadata say."""
    if len(parts) == 1:
        return parts[0]
    merged = {
        part.name: part.metadata.get("merge", _add_up)([getattr(value, part.name) for value in parts])
        for part in fields(parts[0])
    }
    return replace(parts[0], **merged)


@dataclass(frozen=True, slots=True)
class LiveState:
    """What the engine measures only while a console watches."""

    time_s: float = field(metadata=_MAX)  # Unix time.
    page_map: PageMap = field(metadata={"merge": _join_maps})
    total: TenantState  # All tenants together.
    tenants: Mapping[str, TenantState]  # The tenants with the most pages, and the watched tenants.
    # The adapters with the most computed tokens, and adapters of the watched tenants.
    adapters: tuple[AdapterWork, ...] = field(metadata={"merge": _add_work})
    work_tokens: int  # Tokens that were computed with any adapter, including adapters that are not listed.
    step: Quantiles | None = field(metadata={"merge": _slowest})  # Times of recent steps.
    # Rates of the last seconds, prompts included.
    steps_per_s: float
    computed_tokens_per_s: float
    events: tuple[PoolEvent, ...] = field(
        metadata={"merge": _join_events}
    )  # The most recent ones, oldest first.

    @property
    def tokens_per_step(self) -> float:
        return self.computed_tokens_per_s / self.steps_per_s if self.steps_per_s else 0.0


def _merge_live(states: Sequence[LiveState | None]) -> LiveState | None:
    observed = [state for state in states if state is not None]
    return _merge_fields(observed) if observed else None


class EngineState(NamedTuple):
    """One of the engines of a server."""

    name: str
    problem: str | None  # Why it gets no new requests; None if it serves.
    device: str | None  # None before its first connection.
    stats: "EngineStats | None"  # None while it does not answer.


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the engine: all that metrics, consoles and operators see of it. Gauges show the current state, and
    counters count since the engine started. An API process adds up the snapshots of several engines field by field.
    """

    running: int
    waiting: int
    awaiting_adapter: int
    pages_total: int
    pages_free: int
    pages_held: int
    pages_cached: int
    adapter_pages: int
    resident_adapters: int
    # Tenants and digests of adapters in the pool, those in use first, and of adapters that requests wait for. Each
    # lists at most 256 adapters.
    loaded_adapters: tuple[tuple[str, str], ...]
    waiting_adapters: tuple[tuple[str, str], ...]
    adapter_loads: int
    adapter_evictions: int
    pinned_adapters: int = field(metadata=_MAX)
    pinned_loaded: int = field(metadata=_MIN)  # Pinned adapters that are in the pool.
    pin_failures: int  # Failed fetches or loads of pinned adapters.
    preemptions: int
    prefix_queries: int  # Prompt tokens that were looked up in the prefix cache.
    prefix_hits: int  # Prompt tokens that were found there.
    prefix_evictions: int  # KV blocks evicted from the prefix cache.
    swapped_out_pages: int  # Pages copied to host memory.
    swapped_in_pages: int
    swap_pages_total: int
    swap_pages_used: int
    deadline_misses: int  # Requests that ended because their first token could not meet the deadline.
    prompt_tokens: int
    generated_tokens: int
    drafts: int  # Runs of tokens that prompt lookup has drafted.
    draft_tokens: int  # The tokens in these runs.
    accepted_draft_tokens: int  # Drafted tokens that became part of an answer.
    steps: int
    not_finite: int  # Requests that ended because their logits or hidden states were not finite.
    loads_by_cause: Mapping[str, int]  # See `AdapterLoading.loads`.
    evictions_by_cause: Mapping[str, int]  # See `Residency.evictions`.
    preemptions_by_kind: Mapping[str, int]  # See `Scheduler.preemptions_by_kind`.
    fetches_by_outcome: Mapping[str, int]  # See `AdapterFetching.outcomes`.
    step_seconds: HistogramCounts  # The time of each step that computed tokens.
    step_tokens: HistogramCounts  # The number of tokens of each of these steps.
    # Seconds between consecutive tokens of a sequence. Tokens that arrive together count as one.
    token_gaps: HistogramCounts
    tenants: Mapping[str, ServedCounts]  # What ended requests have used, see `ServedRequests`.
    adapters: Mapping[str, ServedCounts]
    pooled_adapters: tuple[str, ...]  # The names in `adapters` whose adapters are in the pool now.
    pages: PageCounts  # Numbers of used pages, by their content.
    tenant_pages: Mapping[str, PageCounts]  # For the tenants with the most pages, at most `metrics_tenants`.
    load_paces: LoadPaces = field(metadata=_OF_FIRST)  # Recent speeds of adapter loads.
    costs: CostModel = field(metadata=_OF_FIRST)  # The scheduler bases its decisions on it now.
    usage: RequestUsage  # The total usage of all ended requests.
    # The host cache, with its largest tenants, at most `metrics_tenants`. Its labels are the names in `adapters` whose
    # adapters are cached.
    host_cache: CacheCounts = field(metadata={"merge": _join_caches})
    live: LiveState | None = field(
        default=None, metadata={"merge": _merge_live}
    )  # None unless a console asks.
    engines: tuple[EngineState, ...] = ()  # The engines of a server, if these are their statistics together.

    @staticmethod
    def merge(stats: "Sequence[EngineStats]") -> "EngineStats":
        """Returns the statistics of several engines together, as if one engine had computed all of it."""
        return _merge_fields(stats)


# Seconds between two reports of a busy engine. A report is late by at most one step. An idle engine reports changes.
REPORT_S = 0.1
# The most accounts in one report. The next reports have the rest.
MAX_SPANS = 256


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What an engine reports to the API processes about ten times a second, for the router and for the other engines:
    its state between two steps.
    """

    num_taken: int = 0  # Number of requests that the engine has taken from its inbox since its start.
    backlog: Backlog = field(default_factory=Backlog)
    # The adapters in the pool, and those that are fetched for requests or prewarms.
    resident: frozenset[AdapterVersion] = frozenset()
    on_host: frozenset[AdapterVersion] = frozenset()  # The adapters in the host cache.
    spans: tuple[ServiceSpan, ...] = ()  # What the engine has charged since the last report. It is sent once.


@dataclass(frozen=True, slots=True)
class Pin:
    """An adapter that the operator wants in the pool before its first request."""

    version: AdapterVersion
    share: TenantShare = DEFAULT_SHARE  # The current share of the adapter's tenant.
