"""What bounds a step, and the policies that an operator chooses. Plain values."""

from dataclasses import dataclass

from slora.engine_config import EngineConfig
from slora.kv_footprint import KVFootprint
from slora.setting import setting_specs

_DEFAULTS = {spec.name: spec.default for spec in setting_specs(EngineConfig)}


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """num_pages: of the pool. num_slots: the most adapters in it. full_page_bytes: of one page over all layers.

    max_num_seqs <= max_num_batched_tokens, so every decode fits. No request may have more choices than max_num_seqs.
    rope_switch: a longer sequence is rotated with longrope's long factors from its first token on.
    load_pages: the most adapter pages that a step loads beside decoding; None: see LoadPace.
    swap_pages: host pages for swapped sequences.
    prefix_cache, preemption, scheduling, eviction: the policies of `EngineConfig`, which checks them.
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
    prefix_cache: str = _DEFAULTS["prefix_cache"]
    preemption: str = _DEFAULTS["preemption"]
    scheduling: str = _DEFAULTS["scheduling"]
    eviction: str = _DEFAULTS["eviction"]
