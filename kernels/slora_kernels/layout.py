"""Where bytes lie inside the page pool: the contract between whoever fills pages and whoever reads them.

The pool is one allocation `[num_pages, num_layers, page_bytes]`. A page has two kinds of user:

- a KV block: in each layer, K and V of `block_tokens` tokens, `[2, num_kv_heads, block_tokens, head_dim]`;
- a slice of a packed adapter: one long byte string, cut into whole pages wherever layers happen to fall.

Both are found through tables of page ids. A packed adapter is layer-major: for each layer and linear group,
the rows of A of all modules of the group (so one shrink serves them), then for each module the rows of B
transposed. A row is padded to whole segments of `SEGMENT_BYTES`; a page holds a whole number of segments, so
a segment never crosses a page and a kernel looks up one page per segment, whatever the rank. Nothing is
padded to a maximum rank.

Worked example: Llama-3.1-8B in bf16, 16-token blocks: 2 * 8 * 16 * 128 * 2 = 64 KiB a layer, 2 MiB a page; a
rank 16 adapter on all seven linears is 80 MiB = 40 pages, the KV of 640 tokens.

Knows no torch: loader and API processes import it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

LAYOUT_VERSION = 1
SEGMENT_BYTES = 256

# The seven linears of a Llama-family layer, in the order of every table that has a module axis.
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class LinearGroup:
    """Linears that read the same input, so that one fused base GEMM and one shrink serve them."""

    name: str
    modules: tuple[int, ...]


QKV = LinearGroup("qkv", (0, 1, 2))
O = LinearGroup("o", (3,))  # noqa: E741
GATE_UP = LinearGroup("gate_up", (4, 5))
DOWN = LinearGroup("down", (6,))
# In the order of every table that has a group axis.
GROUPS = (QKV, O, GATE_UP, DOWN)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a decoder that decide page and adapter layout (those of this rank's shard)."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    element_bytes: int

    @property
    def in_widths(self) -> tuple[int, ...]:
        """Input width of each of `MODULES`."""
        h, attention, i = self.hidden_size, self.num_heads * self.head_dim, self.intermediate_size
        return (h, h, h, attention, h, h, i)

    @property
    def out_widths(self) -> tuple[int, ...]:
        """Output width of each of `MODULES`."""
        h, i = self.hidden_size, self.intermediate_size
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return (query, key, key, h, i, i, h)

    def page_bytes(self, block_tokens: int) -> int:
        """Bytes of one page in one layer (K and V of a block). Raises ValueError if not whole segments."""
        size = 2 * self.num_kv_heads * block_tokens * self.head_dim * self.element_bytes
        if size % SEGMENT_BYTES:
            raise ValueError(
                f"a page of {block_tokens} tokens takes {size} bytes a layer, which is not a multiple of "
                f"{SEGMENT_BYTES}; choose a larger block size (block_tokens)"
            )
        return size

    def row_segments(self, width: int) -> int:
        """Segments that one adapter row of `width` elements takes."""
        return -(-width * self.element_bytes // SEGMENT_BYTES)


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """Where each row of one packed adapter lies, in segments from its first byte.

    groups: int32 [num_layers, 4, 2], (total rank, first segment of A) of each linear group.
    modules: int32 [num_layers, 7, 3], (rank, first row within the group's A, first segment of B) of each
    module.
    """

    groups: Int32Array
    modules: Int32Array
    num_segments: int

    @property
    def num_bytes(self) -> int:
        return self.num_segments * SEGMENT_BYTES


def lay_out_adapter(shape: ModelShape, ranks: Sequence[Sequence[int]]) -> AdapterLayout:
    """Places an adapter whose module m of layer l has rank `ranks[l][m]` (0: not adapted)."""
    groups = np.zeros((shape.num_layers, len(GROUPS), 2), np.int32)
    modules = np.zeros((shape.num_layers, len(MODULES), 3), np.int32)
    segment = 0
    for layer, layer_ranks in enumerate(ranks):
        for group_idx, group in enumerate(GROUPS):
            total = sum(layer_ranks[m] for m in group.modules)
            groups[layer, group_idx] = total, segment
            segment += total * shape.row_segments(shape.in_widths[group.modules[0]])
            row = 0
            for m in group.modules:
                modules[layer, m] = layer_ranks[m], row, segment
                row += layer_ranks[m]
                segment += layer_ranks[m] * shape.row_segments(shape.out_widths[m])
    return AdapterLayout(groups, modules, segment)
