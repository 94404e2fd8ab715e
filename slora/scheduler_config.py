"""What bounds a step, and the choices that an operator has. Plain values."""

from dataclasses import dataclass

from slora.errors import ConfigError
from slora.kv_footprint import KVFootprint

_CHOICES = {
    "prefix_cache": ("off", "tenant", "public"),
    "preemption": ("auto", "swap", "recompute"),
    "scheduling": ("fair", "fcfs"),
    "eviction": ("lru", "cost", "size"),
}


def check_choices(config: object) -> None:
    """Raises ConfigError for a field of these names with another value."""
    for name, choices in _CHOICES.items():
        value = getattr(config, name)
        if value not in choices:
            raise ConfigError(f"{name} is {value!r}; it must be {', '.join(choices[:-1])} or {choices[-1]}")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """num_pages: of the pool. num_slots: the most adapters in it. full_page_bytes: of one page over all layers.

    max_num_seqs <= max_num_batched_tokens, so every decode fits. No request may have more choices than max_num_seqs.
    rope_switch: a sequence of more tokens than that is rotated with longrope's long factors, from its first token on.
    load_pages: of adapters that a step loads beside decoding; None: see LoadPace. swap_pages: of the host, for
    sequences that give way.

    prefix_cache: whose blocks a request may find: its tenant's; public: of the bare base, anybody's; off: nobody's.
    preemption: how sequences give way: auto is whichever costs less. scheduling: who is next. eviction: what leaves.
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
    prefix_cache: str = "tenant"
    preemption: str = "auto"
    scheduling: str = "fair"
    eviction: str = "lru"

    def __post_init__(self) -> None:
        check_choices(self)
