"""Sizes the page pool, the swap space and the longest sequence from the settings and the free memory.

This module does not import torch: `slora plan` sizes the pool of a device that this machine does not have.
"""

from slora.core.engine_config import CPU_POOL_SHARE, GPU_POOL_SHARE, SWAP_SHARE, EngineConfig, KVFootprint
from slora.core.errors import ConfigError
from slora_kernels.layout import ModelShape

# Maximum number of adapters in the pool.
MAX_SLOTS = 1024


def find_full_page_bytes(shape: ModelShape, config: EngineConfig) -> int:
    """Bytes of one page over all layers. Raises ConfigError if block_tokens is too small for this model."""
    try:
        return shape.num_kv_layers * shape.layer_page_bytes(config.block_tokens, config.kv_format)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def choose_pool_bytes(config: EngineConfig, free_bytes: int, *, on_gpu: bool) -> int:
    """The size of the pool: `pool_bytes`, or a share of the free memory.

    free_bytes: the memory that is left beside the weights and the activations of the largest step.
    """
    if config.pool_bytes is not None:
        return config.pool_bytes
    return int(free_bytes * (GPU_POOL_SHARE if on_gpu else CPU_POOL_SHARE))


def count_pages(pool_bytes: int, full_page_bytes: int) -> int:
    """Number of pages in the pool. Raises ConfigError if there are fewer than two."""
    num_pages = pool_bytes // full_page_bytes
    if num_pages < 2:
        raise ConfigError(
            f"pool_bytes is {pool_bytes}, but one page of this model takes {full_page_bytes}; "
            f"give the pool at least {2 * full_page_bytes} bytes"
        )
    return num_pages


def count_swap_pages(config: EngineConfig, num_pages: int, full_page_bytes: int, free_ram_bytes: int) -> int:
    """Returns the number of host pages for swapping. Raises ConfigError if swap_bytes is less than one page."""
    if config.preemption == "recompute":
        return 0
    swap_bytes = config.swap_bytes
    if swap_bytes is None:
        of_ram = int(free_ram_bytes * SWAP_SHARE) // full_page_bytes
        return min(int(num_pages * SWAP_SHARE), of_ram)
    if 0 < swap_bytes < full_page_bytes:
        raise ConfigError(
            f"swap_bytes is {swap_bytes}, but one page of this model takes "
            f"{full_page_bytes}; give at least that, or 0 to disable swapping"
        )
    return swap_bytes // full_page_bytes


def find_max_model_len(
    config: EngineConfig, num_pages: int, full_page_bytes: int, max_positions: int, footprint: KVFootprint
) -> int:
    """Returns the maximum length of a sequence, in tokens. Raises ConfigError if a requested length does not fit.

    If no length was requested, the model's length is reduced to what fits into the pool.
    """
    room = footprint.tokens(num_pages)
    wanted = config.max_model_len
    longest = wanted or max_positions
    if footprint.pages(longest) <= num_pages:
        return longest
    without_window = KVFootprint(footprint.block_tokens, state_pages=footprint.state_pages)
    if wanted is not None:
        raise ConfigError(
            f"max_model_len is {wanted}, but the pool holds {room} tokens; raise pool_bytes to "
            f"{without_window.pages(wanted) * full_page_bytes} or lower max_model_len"
        )
    if not room:
        raise ConfigError(
            f"the pool has {num_pages} pages, but the recurrent state of one sequence takes {footprint.state_pages}; "
            f"raise pool_bytes to at least {without_window.pages(1) * full_page_bytes}"
        )
    return room
