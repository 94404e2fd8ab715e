"""What an engine says of itself: fixed facts once, numbers on request. Knows no torch: the API reads both."""

from dataclasses import dataclass

from slora.cost_model import CostModel
from slora.engine.load_paces import LoadPaces
from slora_kernels.layout import ModelShape


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What callers may know of the engine before they send anything. Sizes in tokens, pages and bytes."""

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
    max_num_seqs: int
    shape: ModelShape


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges as they stand, counters since the engine started.

    prefix_queries, prefix_hits: prompt tokens that were looked up in the prefix cache, and found. prefix_evictions:
    blocks that left it to make room. swapped_out_pages, swapped_in_pages: copied to the host and back. deadline_misses:
    requests that ended because their first token could not come in time. pinned_loaded: of the pinned adapters, those
    that are in the pool. pin_failures: times that one could not be fetched or loaded. load_paces: as loads went lately.
    costs: what decisions are based on now.
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
    running_adapters: tuple[str, ...]
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
    steps: int
    load_paces: LoadPaces
    costs: CostModel
