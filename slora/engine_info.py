"""What an engine says of itself: fixed facts once, numbers on request. Knows no torch: the API reads both."""

from dataclasses import dataclass

from slora_kernels.layout import ModelShape


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What callers may know of the engine before they send anything. Sizes in tokens, pages and bytes."""

    model_name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
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
    """Gauges as they stand, counters since the engine started."""

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
    preemptions: int
    prompt_tokens: int
    generated_tokens: int
    steps: int
