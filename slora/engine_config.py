"""Every setting of the engine, and the sizes that follow from them and from the machine."""

import os
from dataclasses import dataclass
from pathlib import Path

from slora.errors import ConfigError
from slora.scheduler_config import check_choices
from slora_kernels.layout import KVFormat

_GIB = 1 << 30
_LEAST = {
    "pool_bytes": 1,
    "block_tokens": 1,
    "max_model_len": 1,
    "max_num_seqs": 1,
    "max_lora_rank": 1,
    "swap_bytes": 0,
    "load_bytes_per_step": 1,
}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes left at None follow from the model and the machine.

    dtype: auto (the checkpoint's), float32, bfloat16 or float16. device: auto, cpu or cuda.
    kernels: auto, triton, numba or torch.
    model_impl: auto, slora or transformers: whose code computes the model.
    quantization: what the weights of the layers' linears are rounded to while they are read: int8 or fp8, each row with
    its scale; auto takes them as the checkpoint stores them.
    kv_cache_dtype: what pages keep K and V as: auto (the model's dtype) or fp8, 8 bits and a scale for each token and
    head, with which the same pool holds nearly twice the tokens.
    pool_bytes: the one pool for KV and adapters; None is 90% of the GPU memory left after weights and a trial step,
    on a CPU 25% of the free RAM. A CPU's is taken from the system at start if it is named, else as it is used.
    max_model_len: prompt and answer together; None is the model's own, or what the pool holds if that is less.
    max_num_batched_tokens: the token budget of one step.
    prefix_cache: whose computed prefixes a request may find: tenant (its own tenant's), public (those of the bare base
    are everybody's) or off.
    preemption: how sequences give way when pages run short: swap to the host, recompute, or auto, the cheaper one.
    swap_bytes: of the host, for the KV of those; 0 is none; None is a quarter of the pool, at most of the free RAM.
    Taken only as it is needed.
    scheduling: fair between tenants, or fcfs, first come, first served.
    eviction: what leaves the pool first: cost (what it takes to bring back, times how often its kind is used again,
    for each page), lru (least recently used) or size.
    load_bytes_per_step: of adapters copied into the pool beside one step of others, at least a page; None follows from
    the machine and from how many wait for adapters.
    cuda_graphs: on a GPU, decode steps are recorded and replayed; a CPU has nothing to record.
    """

    model: Path
    model_name: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    kernels: str = "auto"
    model_impl: str = "auto"
    quantization: str = "auto"
    kv_cache_dtype: str = "auto"
    pool_bytes: int | None = None
    block_tokens: int = 16
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    max_lora_rank: int = 128
    prefix_cache: str = "tenant"
    preemption: str = "auto"
    swap_bytes: int | None = None
    scheduling: str = "fair"
    eviction: str = "lru"
    load_bytes_per_step: int | None = None
    cuda_graphs: bool = True

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}; it must be at least {least}")
        check_choices(self)
        if self.kv_cache_dtype not in list(KVFormat):
            raise ConfigError(
                f"kv_cache_dtype is {self.kv_cache_dtype!r}; it must be {' or '.join(KVFormat)}"
            )
        if self.preemption == "swap" and self.swap_bytes == 0:
            raise ConfigError(
                "preemption is swap, but swap_bytes is 0: there is nowhere to swap to; raise swap_bytes, or set "
                "preemption to auto or recompute"
            )
        if self.block_tokens & (self.block_tokens - 1):
            raise ConfigError(f"block_tokens is {self.block_tokens}; it must be a power of two")
        budget = self.max_num_batched_tokens
        if budget is not None and budget < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {budget}, below max_num_seqs {self.max_num_seqs}: "
                f"one step could not decode them all; raise it or lower max_num_seqs"
            )

    @property
    def kv_format(self) -> KVFormat:
        return KVFormat(self.kv_cache_dtype)

    @property
    def served_name(self) -> str:
        return self.model_name or self.model.resolve().name

    def load_pages(self, full_page_bytes: int) -> int | None:
        """None follows from what the machine takes for them."""
        num_bytes = self.load_bytes_per_step
        return None if num_bytes is None else max(1, num_bytes // full_page_bytes)

    def token_budget(self, device_type: str) -> int:
        """A CPU step of 512 tokens already keeps every core busy; more would only delay those who decode."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return max(self.max_num_seqs, 512 if device_type == "cpu" else 4096)


def free_ram_bytes() -> int:
    """What this process may still take: the machine's available memory, less if a control group allows less."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists():
        text = limit.read_text().strip()
        if text != "max":
            available = min(available, int(text) - int(used.read_text()))
    return max(available, _GIB // 4)
