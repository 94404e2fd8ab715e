"""Every setting of the engine, and the sizes that are derived from the settings and the machine."""

from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from slora.core.errors import ConfigError
from slora.core.request import MAX_COMPOSED_ADAPTERS
from slora.core.setting import (
    Auto,
    ByteSize,
    Directory,
    OneOf,
    OnOff,
    Whole,
    check_settings,
    parameter,
    setting,
)
from slora_adapters.peft.hub_reference import HubReference
from slora_kernels.kv_format import KVFormat

# Longer drafts are rarely accepted completely, and would delay other sequences of the step.
MAX_DRAFT_TOKENS = 64
# With `auto`, the page pool takes a share of free RAM or GPU memory, and swap space is a share of the pool's size.
CPU_POOL_SHARE = 0.25
GPU_POOL_SHARE = 0.9
SWAP_SHARE = 0.25
# Bits of each quantized number, with the scales of its group.
QUANTIZED_BITS = {"int8": 8, "fp8": 8, "int4": 4.5}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The settings of one engine. A size of None is derived from the model and the machine.

    The help texts describe the settings. `slora serve` accepts every field as a flag and as an environment variable.
    """

    model: Path = setting(
        MISSING,
        "base model: a directory (config.json, safetensors, tokenizer), a GGUF file, or ORG/NAME[@REVISION] of the hub",
        Directory(),
        metavar="MODEL",
    )
    model_name: str = setting(
        "",
        "name of the base model for clients (default: the name of its directory, or ORG/NAME)",
        metavar="NAME",
    )
    device: str = setting("auto", "where the model runs: auto, cpu or cuda", OneOf(("auto", "cpu", "cuda")))
    dtype: str = setting(
        "auto",
        "dtype of the model: auto (the dtype of the checkpoint), float32, bfloat16 or float16",
        OneOf(("auto", "float32", "bfloat16", "float16")),
    )
    tensor_parallel_size: int = setting(
        1,
        "number of processes that compute the model together, each on a GPU of its own with its part of the weights: "
        "must divide the attention heads and intermediate_size of the model",
        Whole(1, 64),
        metavar="N",
    )
    kernels: str = setting(
        "auto",
        "kernels that compute the model: auto, triton, cpu or torch",
        OneOf(("auto", "triton", "cpu", "torch")),
        metavar="NAME",
    )
    model_impl: str = setting(
        "auto",
        "implementation of the model: slora's own, for the model families that it supports, or "
        "transformers', for any",
        OneOf(("auto", "slora", "transformers")),
        metavar="NAME",
    )
    quantization: str = setting(
        "auto",
        "int8 or fp8 rounds the linear layers of the base model to 8 bits with a scale for each row, "
        "which halves their memory; int4 rounds them to 4 bits with a scale and a minimum for each 64 "
        "columns (experts on CPUs only); auto uses the format of the checkpoint",
        OneOf(("auto", *QUANTIZED_BITS)),
        metavar="FORM",
    )
    kv_cache_dtype: str = setting(
        "auto",
        "format of K and V in the pool: auto is the model's dtype; fp8 (e4m3, with a scale for each "
        "token and head) fits nearly twice as many tokens, and needs a CPU or a GPU of compute "
        "capability 8.9 or later",
        OneOf(tuple(KVFormat)),
        metavar="FORM",
    )
    pool_bytes: int | None = setting(
        None,
        "size of the page pool for KV cache and adapters: auto takes 90%% of the free GPU memory, or "
        "25%% of the free RAM",
        Auto(ByteSize(1)),
        metavar="SIZE",
    )
    block_tokens: int = setting(
        16, "tokens of KV cache in one page, a power of two", Whole(1, 1024), metavar="N"
    )
    max_model_len: int | None = setting(
        None,
        "largest number of tokens of prompt and answer together; auto takes the model's own limit, "
        "or the size of the pool if that is less",
        Auto(Whole(1)),
        metavar="N",
    )
    max_num_seqs: int = setting(256, "largest number of running sequences", Whole(1), metavar="N")
    max_num_batched_tokens: int | None = setting(
        None, "largest number of tokens that one step computes", Auto(Whole(1)), metavar="N"
    )
    prefix_cache: str = setting(
        "tenant",
        "which cached prefixes a request may reuse: tenant: only prefixes of its own tenant; public: "
        "also prefixes of all tenants on the base model, so that timing may reveal the prompts of "
        "other tenants; off: none",
        OneOf(("off", "tenant", "public")),
        metavar="NAME",
    )
    swap_bytes: int | None = setting(
        None,
        "host memory for swapped sequences: auto takes a quarter of the pool's size; 0 disables swapping",
        Auto(ByteSize()),
        metavar="SIZE",
    )
    cuda_graphs: bool = setting(
        True, "whether steps on a GPU are recorded once and replayed: on or off", OnOff()
    )
    prompt_lookup_tokens: int = setting(
        0,
        "largest number of tokens that one step drafts for a sequence by prompt lookup, if drafts are expected to "
        "save time: 0 disables prompt lookup",
        Whole(0, MAX_DRAFT_TOKENS),
        metavar="N",
    )
    max_lora_rank: int = setting(128, "highest accepted rank of an adapter", Whole(1), metavar="N")
    # fair divides the engine between tenants by weight; fcfs serves requests in order of arrival.
    scheduling: str = parameter("fair", OneOf(("fair", "fcfs")))
    # swap copies the KV of a preempted sequence to the host; recompute computes it again; auto takes what is faster.
    preemption: str = parameter("auto", OneOf(("auto", "swap", "recompute")))
    # The most adapter bytes that are copied into the pool during one step. auto (None) allows steps to take a tenth
    # longer, and more while many requests wait for adapters.
    load_bytes_per_step: int | None = parameter(None, Auto(ByteSize(1)))
    # The most tenants with a label of their own in the metrics. All others count as 'other'.
    metrics_tenants: int = parameter(20, Whole(0, 1000))
    # The most adapters that one request may add up.
    max_composed_adapters: int = parameter(4, Whole(1, MAX_COMPOSED_ADAPTERS))

    def __post_init__(self) -> None:
        check_settings(self)
        if self.preemption == "swap" and self.swap_bytes == 0:
            raise ConfigError(
                "preemption is swap, but swap_bytes is 0: there is no space to swap to; raise "
                "swap_bytes, or set preemption to auto or recompute"
            )
        if self.block_tokens & (self.block_tokens - 1):
            raise ConfigError(f"block_tokens is {self.block_tokens}; it must be a power of two")
        budget = self.max_num_batched_tokens
        if budget is not None and budget < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {budget}, below max_num_seqs {self.max_num_seqs}, so one "
                "step could not decode all sequences; raise max_num_batched_tokens or lower "
                "max_num_seqs"
            )

    @property
    def kv_format(self) -> KVFormat:
        return KVFormat(self.kv_cache_dtype)

    @property
    def served_name(self) -> str:
        reference = HubReference.of_model(self.model)
        return self.model_name or (reference.repo if reference else self.model.resolve().name)

    def load_pages(self, full_page_bytes: int) -> int | None:
        """Adapter pages that each step may load. None: `LoadBudget` decides from measured costs."""
        num_bytes = self.load_bytes_per_step
        return None if num_bytes is None else max(1, num_bytes // full_page_bytes)

    def token_budget(self, device_type: str) -> int:
        """Maximum number of tokens that one step computes.

        On a CPU, 512 tokens keep every core busy; more would only delay decoding sequences.
        """
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return max(self.max_num_seqs, 512 if device_type == "cpu" else 4096)


@dataclass(frozen=True, slots=True)
class KVFootprint:
    """How many pages the KV of any sequence of one model occupies at most.

    If every layer has a sliding window, blocks completely behind the window of the next token are freed while the
    sequence runs. Then the footprint depends on the number of tokens computed at a time, not on the sequence's length.
    """

    block_tokens: int
    # The maximum number of tokens, itself included, that a token attends to in any layer. None if a layer attends to
    # all tokens.
    window: int | None = None
    state_pages: int = 0  # The pages of the recurrent state, whatever the length of the sequence.

    def pages(self, num_tokens: int, chunk_tokens: int = 1) -> int:
        """The maximum number of pages that a sequence of `num_tokens` holds when it computes `chunk_tokens` at a time.

        Worked example: blocks of 16 tokens, a window of 32, one token at a time. 32 consecutive tokens touch up to 3
        blocks. With a recurrent state of 2 pages, the sequence holds up to 5 pages.
        """
        whole = -(-num_tokens // self.block_tokens)
        if self.window is None:
            return self.state_pages + whole
        in_sight = self.window - 1 + chunk_tokens
        return self.state_pages + min(whole, (in_sight + self.block_tokens - 2) // self.block_tokens + 1)

    def tokens(self, num_pages: int) -> int:
        """How many tokens of KV fit into `num_pages` pages, without a window."""
        return max(0, num_pages - self.state_pages) * self.block_tokens

    def chunk_tokens(self, num_tokens: int, num_pages: int) -> int:
        """The maximum chunk size with which a sequence of `num_tokens` holds at most `num_pages` pages.

        Less than 1 if no chunk size is small enough.
        """
        if self.pages(num_tokens, num_tokens) <= num_pages:
            return num_tokens
        if self.window is None:
            return 0
        return (num_pages - self.state_pages - 1) * self.block_tokens + 2 - self.window

    def first_token_seen(self, position: int) -> int:
        """The first token that the token at `position` attends to, in the layer with the largest window."""
        return 0 if self.window is None else max(0, position - self.window + 1)


_DEFAULTS: dict[str, Any] = {declared.name: declared.default for declared in fields(EngineConfig)}


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The configuration of the scheduler: the limits of a step, and the policies that the operator chooses."""

    num_pages: int  # Number of pages in the pool.
    num_slots: int  # Maximum number of adapters in the pool.
    full_page_bytes: int  # Bytes of one page over all layers.
    footprint: KVFootprint
    # The most running sequences, the places of the batch; at most max_num_batched_tokens, so that every decode row
    # fits in a step. No request may have more choices.
    max_num_seqs: int
    max_num_batched_tokens: int  # The token budget of a step.
    # All tokens of a sequence with more tokens than this are rotated with longrope's long factors; None: the model
    # does not switch.
    rope_switch: int | None = None
    # The most adapter pages that a step with decoding sequences loads; None: `LoadBudget` decides.
    load_pages: int | None = None
    swap_pages: int = 0  # Number of host pages for swapped sequences.
    prompt_lookup_tokens: int = 0  # Maximum number of tokens that a step drafts for a sequence; 0: no drafts.
    # Whether the device copies adapters while it computes a step that does not use them.
    loads_beside: bool = False
    metrics_tenants: int = 0  # As in `EngineConfig`.
    # The policies of `EngineConfig`, which checks them.
    prefix_cache: str = _DEFAULTS["prefix_cache"]
    preemption: str = _DEFAULTS["preemption"]
    scheduling: str = _DEFAULTS["scheduling"]
