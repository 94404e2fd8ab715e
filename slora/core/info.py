"""Facts and statistics of the engine: EngineInfo is sent once, EngineStats on request.

The API reads both, so this module does not import torch.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from slora.core.cost_model import CostModel
from slora.core.histogram import HistogramCounts
from slora.core.load_paces import LoadPaces
from slora.core.page_counts import PageCounts
from slora.core.request import RequestUsage
from slora_adapters.loader.cached_versions import CacheCounts
from slora_kernels.layout import ModelShape, lay_out_adapter
from slora_kernels.partition import Partition


@dataclass(frozen=True, slots=True)
class ServedCounts:
    """Sums over ended requests. Background requests count only in the sums of tokens.

    cold_starts: requests that waited for an adapter. queue_s: see `RequestTiming`.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    cold_starts: int = 0
    queue_s: float = 0.0

    def __add__(self, other: "ServedCounts") -> "ServedCounts":
        return ServedCounts(
            self.requests + other.requests,
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.generated_tokens + other.generated_tokens,
            self.cold_starts + other.cold_starts,
            self.queue_s + other.queue_s,
        )


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Fixed facts of the engine, known before the first request. Sizes are in tokens, pages and bytes.

    full_page_bytes: size of a page on each tensor-parallel rank. shape: the sizes of the whole model.
    can_embed: whether the model's hidden states can be read, which embeddings need.
    num_ranks: number of tensor-parallel ranks.
    prefix_cache: which cached prefixes a request may reuse, see `EngineConfig`.
    """

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
    full_page_bytes: int
    max_lora_rank: int
    max_composed_adapters: int
    max_num_seqs: int
    scheduling: str
    shape: ModelShape
    can_embed: bool = True
    num_ranks: int = 1
    prefix_cache: str = "tenant"

    def count_rank_bytes(self, packed_bytes: int, target_modules: Collection[str]) -> int:
        """Returns the bytes that an adapter takes in the page pool of each tensor-parallel rank.

        packed_bytes: the bytes that it takes without tensor parallelism. target_modules: the names of its modules.

        The result is exact if the adapter has the same rank in all of its modules. Otherwise it is an estimate, because
        some modules shrink more than others when they are divided.
        """
        if self.num_ranks == 1:
            return packed_bytes
        partition = Partition(self.shape, self.num_ranks)
        ranks = [int(module.path.rpartition(".")[2] in target_modules) for module in self.shape.modules]
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


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine's statistics. Gauges show the current state, and counters count since the engine started.

    prefix_queries: prompt tokens that were looked up in the prefix cache. prefix_hits: prompt tokens found there.
    prefix_evictions: KV blocks evicted from the prefix cache.
    swapped_out_pages, swapped_in_pages: pages copied to host memory, and back.
    drafts: runs of tokens that prompt lookup has drafted. draft_tokens: the tokens in these runs.
    accepted_draft_tokens: drafted tokens that became part of an answer.
    loaded_adapters, waiting_adapters: tenants and digests of adapters in the pool, those in use first, and of adapters
        that requests wait for. Each lists at most 256 adapters.
    deadline_misses: requests that ended because their first token could not meet the deadline.
    pinned_loaded: pinned adapters that are in the pool. pin_failures: failed fetches or loads of pinned adapters.
    not_finite: requests that ended because their logits or hidden states were not finite.
    loads_by_cause, evictions_by_cause, preemptions_by_kind, fetches_by_outcome: see `AdapterLoading.loads`,
        `Residency.evictions`, `Scheduler.preemptions_by_kind` and `AdapterFetching.outcomes`.
    step_seconds, step_tokens: the time and the number of tokens of each step that computed tokens.
    token_gaps: seconds between consecutive tokens of a sequence. Tokens that arrive together count as one.
    tenants, adapters: what ended requests have used, see `ServedRequests`.
    pooled_adapters: the names in `adapters` whose adapters are in the pool now.
    pages: numbers of used pages, by their content.
    tenant_pages: the same for the tenants that own the most pages, at most `metrics_tenants` of them.
    load_paces: recent speeds of adapter loads. costs: the cost model on which the scheduler now bases its decisions.
    usage: the total usage of all ended requests.
    host_cache: the content of the host cache. It lists the largest tenants, at most `metrics_tenants` of them.
        Its labels are the names in `adapters` whose adapters are cached.
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
    loaded_adapters: tuple[tuple[str, str], ...]
    waiting_adapters: tuple[tuple[str, str], ...]
    adapter_loads: int
    adapter_evictions: int
    pinned_adapters: int
    pinned_loaded: int
    pin_failures: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    prefix_evictions: int
    swapped_out_pages: int
    swapped_in_pages: int
    swap_pages_total: int
    swap_pages_used: int
    deadline_misses: int
    prompt_tokens: int
    generated_tokens: int
    drafts: int
    draft_tokens: int
    accepted_draft_tokens: int
    steps: int
    not_finite: int
    loads_by_cause: Mapping[str, int]
    evictions_by_cause: Mapping[str, int]
    preemptions_by_kind: Mapping[str, int]
    fetches_by_outcome: Mapping[str, int]
    step_seconds: HistogramCounts
    step_tokens: HistogramCounts
    token_gaps: HistogramCounts
    tenants: Mapping[str, ServedCounts]
    adapters: Mapping[str, ServedCounts]
    pooled_adapters: tuple[str, ...]
    pages: PageCounts
    tenant_pages: Mapping[str, PageCounts]
    load_paces: LoadPaces
    costs: CostModel
    usage: RequestUsage
    host_cache: CacheCounts
