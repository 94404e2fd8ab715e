"""Computes what our kernels add to the output of each adapted module, with the adapter in pages as in the engine.

This tests an adapter by itself, without base weights. The inputs are random but the same in every call.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from slora.memory.device_memory import DeviceMemory
from slora.memory.residency import AdapterLoad, Resident
from slora.memory.tenant_account import TenantAccount
from slora_adapters.peft.packing import PackedAdapter
from slora_adapters.version import AdapterVersion
from slora_kernels.batch import KVGeometry, LoraTiles
from slora_kernels.layout import LoraSite, ModelShape
from slora_kernels.ops import Kernels

__all__ = ["probe_adapter", "probe_inputs"]

# More than one token, and not a power of two, like a real batch.
_TOKENS = 5
_BLOCK_TOKENS = 16


def probe_inputs(shape: ModelShape, site: LoraSite, dtype: torch.dtype) -> Tensor:
    """Inputs [T, in] from a standard normal distribution, in `dtype`. For the embedding, one-hot rows of random tokens.

    The inputs depend on the site only, so they are the same in every call.
    """
    random = torch.Generator().manual_seed(site.group)
    if site == shape.embedding_site:
        token_ids = torch.randint(site.in_width, (_TOKENS,), generator=random)
        return F.one_hot(token_ids, site.in_width).to(dtype)
    return torch.randn((_TOKENS, site.in_width), generator=random).to(dtype)


@torch.inference_mode()
def probe_adapter(
    packed: PackedAdapter,
    shape: ModelShape,
    dtype: torch.dtype,
    kernels: Kernels,
    device: torch.device,
    *,
    weight: float = 1.0,
) -> Iterator[tuple[int, Tensor]]:
    """Yields each adapted module with float32 [T, out]: what LoRA adds to its output for the site's `probe_inputs`.

    packed: in `dtype`, for a model of `shape`. weight: a factor on the adapter's scale.
    """
    memory = _load(packed, shape, dtype, device)
    tiles = torch.tensor([[0, 0, _TOKENS]], dtype=torch.int32, device=device)
    weights = torch.tensor([weight], dtype=torch.float32, device=device)
    lora = LoraTiles(tiles, weights, packed.layout.targets.max_group_rank, _TOKENS)
    step = kernels.prepare_lora(lora, memory.tables)
    for site in shape.sites:
        if not packed.layout.groups[site.group, 0]:
            continue
        out = torch.zeros((_TOKENS, sum(site.widths)), dtype=dtype, device=device)
        x = probe_inputs(shape, site, dtype).to(device)
        if site == shape.embedding_site:
            shrunk = kernels.shrink_embedding(x.argmax(dim=1), memory.pages, site, step, dtype)
        else:
            shrunk = kernels.shrink(x, memory.pages, site, step)
        kernels.expand(out, shrunk, memory.pages, site, step)
        deltas = enumerate(torch.split(out.float().cpu(), list(site.widths), dim=1), site.first_module)
        yield from ((module, delta) for module, delta in deltas if packed.layout.modules[module, 0])


def _load(packed: PackedAdapter, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> DeviceMemory:
    """Creates pages for this adapter alone, and one slot that points to them."""
    page_bytes = shape.num_layers * shape.page_bytes(_BLOCK_TOKENS)
    num_pages = -(-packed.layout.num_bytes // page_bytes)
    geometry = KVGeometry(
        shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.head_dim, _BLOCK_TOKENS, dtype
    )
    memory = DeviceMemory(geometry, shape, page_bytes, num_pages, 1, num_pages, device)
    # The pages are in reverse order, so that a kernel that ignores the page table fails.
    pages = list(range(num_pages - 1, -1, -1))
    resident = Resident(
        AdapterVersion("", ""), TenantAccount(""), 0, 1, pages, packed.layout.num_bytes, packed.layout.targets
    )
    memory.load(AdapterLoad(resident, packed, 0, num_pages))
    return memory
