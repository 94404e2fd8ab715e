"""The limits of a step, and the policies that the operator chooses, as plain values."""

from dataclasses import dataclass

from slora.core.engine_config import EngineConfig
from slora.core.kv_footprint import KVFootprint
from slora.core.setting import setting_specs

_DEFAULTS = {spec.name: spec.default for spec in setting_specs(EngineConfig)}


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The configuration of the scheduler.

    num_pages: number of pages in the pool.
    num_slots: maximum number of adapters in the pool.
    full_page_bytes: bytes of one page over all layers.
    max_num_seqs: the most running sequences, counting one per choice; at most max_num_batched_tokens, so that every
        decode row fits in a step. No request may have more choices.
    max_num_batched_tokens: the token budget of a step.
    rope_switch: all tokens of a sequence with more tokens than this are rotated with longrope's long factors; None: the
        model does not switch.
    load_pages: the most adapter pages that a step with decoding sequences loads; None: `LoadBudget` decides.
    swap_pages: number of host pages for swapped sequences.
    loads_beside: whether the device copies adapters while it computes a step that does not use them.
    prompt_lookup_tokens: maximum number of tokens that a step drafts for a sequence; 0: no drafts.
    metrics_tenants: as in `EngineConfig`.
    prefix_cache, preemption, scheduling: the policies of `EngineConfig`, which checks them.
    """

    num_pages: int
    num_slots: int
    full_page_bytes: int
    footprint: KVFootprint
    max_num_seqs: int
    max_num_batched_tokens: int
    rope_switch: int | None = None
    load_pages: int | None = None
    swap_pages: int = 0
    prompt_lookup_tokens: int = 0
    loads_beside: bool = False
    metrics_tenants: int = 0
    prefix_cache: str = _DEFAULTS["prefix_cache"]
    preemption: str = _DEFAULTS["preemption"]
    scheduling: str = _DEFAULTS["scheduling"]
