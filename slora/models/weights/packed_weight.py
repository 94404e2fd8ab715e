"""Weights packed at load time: into the blocks of the CPU's matmul library (oneDNN), or with AMX or AVX-512 BF16 into
the panels of our own products.

oneDNN also accepts plain rows, but then it packs them in every call. Measured with two AVX-512 cores on the linears of
a 110M model, in ms, plain / packed:

    rows              1             64          512
    bfloat16     8.9 / 5.6    17.2 / 14.5    113 / 91
    float32     18.5 / 8.4     122 / 28      456 / 187
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slora_kernels.coded_weight import CodedWeight
from slora_kernels.kernel_selector import find_tile_weights
from slora_kernels.torch.row_blocks import (
    Multiply,
    even_terms,
    find_row_counts,
    make_trial_bias,
    multiply_in_blocks,
)

# The number of rows of x that the blocks are optimized for. Blocks for many rows also suit one row, but not vice versa.
_ROWS = 512
# The largest weight of an embedding of which a packed copy is made, if the output head has the same weight. The copy of
# a larger one would take too much memory.
_LARGE_HEAD_BYTES = 512 << 20
# A larger weight is packed in pieces, because finding the row counts of a shape takes the memory of two such weights.
_PIECE_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A packed weight [out, in].

    pieces: its rows in packed form, which is opaque. All pieces together have as many bytes as the weight, or one more
    column (see `even_terms`). tiles: the weight for our own products instead, one of the classes of
    `tile_linear`.
    """

    pieces: tuple[Tensor, ...]
    tiles: Any = None

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, in] -> [T, out]: x W^T + b. The bits of a row do not depend on the other rows."""
        if self.tiles is not None:
            product: Tensor = self.tiles.multiply(x, bias)
            return product
        x = even_terms(x)
        if len(self.pieces) == 1:
            return _multiply_piece(x, self.pieces[0], bias)
        widths = [len(piece) for piece in self.pieces]
        biases = [None] * len(widths) if bias is None else torch.split(bias, widths)
        pairs = zip(self.pieces, biases, strict=True)
        return torch.cat([_multiply_piece(x, piece, part) for piece, part in pairs], dim=1)

    def unpack(self, width: int) -> Tensor:
        """Returns the weight [out, width]. Only weights that `pack_weight` has packed can be unpacked."""
        if self.tiles is not None:
            weight: Tensor = self.tiles.unpack()
            return weight
        return torch.cat([piece.to_dense()[:, :width] for piece in self.pieces])


def pack_weight(weight: Tensor, *, is_biased: bool = False) -> Tensor | PackedWeight:
    """Packs a weight if this machine supports that; otherwise returns it unchanged. The caller drops `weight`.

    is_biased: whether products will add a bias, so that the row counts can be found now and not in the first step.
    """
    if not _can_pack(weight):
        return weight
    tiles: Any = find_tile_weights()
    if tiles is not None and tiles.TileWeight.suits(weight):
        return PackedWeight((), tiles.TileWeight(weight))
    pieces = split_weight(even_terms(weight))
    for piece in pieces:
        _find_counts(len(piece), piece.shape[1], piece.dtype, is_biased=is_biased)
    return PackedWeight(tuple(map(_pack, pieces)))


def pack_head(weight: Tensor, *, is_tied: bool, is_biased: bool = False) -> Tensor | PackedWeight:
    """Like `pack_weight`, for an output head. is_tied: whether an embedding keeps the unpacked weight in memory."""
    return (
        weight if is_tied and weight.nbytes > _LARGE_HEAD_BYTES else pack_weight(weight, is_biased=is_biased)
    )


def pack_codes_in_tiles(weight: CodedWeight, dtype: torch.dtype) -> PackedWeight | None:
    """Packs a weight of 4 bits for tiles. None if this machine has none for it. dtype: that of x."""
    tiles: Any = find_tile_weights() if weight.codes.device.type == "cpu" else None
    if tiles is None or not tiles.CodedTileWeight.suits(weight, dtype):
        return None
    return PackedWeight((), tiles.CodedTileWeight(weight))


def pack_bytes_in_tiles(values: Tensor, scales: Tensor, dtype: torch.dtype) -> PackedWeight | None:
    """Packs a weight of 8 bits [out, in] for tiles. None if this machine has none for it. dtype: that of x.

    scales: float32 [out].
    """
    tiles: Any = find_tile_weights() if values.device.type == "cpu" else None
    if tiles is None or not tiles.ByteTileWeight.suits(values, dtype):
        return None
    return PackedWeight((), tiles.ByteTileWeight(values, scales))


def multiply_freely(x: Tensor, weight: Tensor | PackedWeight) -> Tensor:
    """x [T, in] -> [T, out], with the library's own choice for this number of rows. For comparisons only."""
    if isinstance(weight, Tensor):
        return torch.mm(x, weight.T)
    if weight.tiles is not None:
        return weight.multiply(x)
    products = [_call(x, piece, None) for piece in weight.pieces]
    return products[0] if len(products) == 1 else torch.cat(products, dim=1)


def split_weight(weight: Tensor) -> tuple[Tensor, ...]:
    """Splits a weight [out, in] into pieces of rows that are at most 128 MiB large."""
    return torch.split(weight, max(1, _PIECE_BYTES // (weight.shape[1] * weight.element_size())))


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
    return packed


def _call(x: Tensor, piece: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, piece, bias, "none", [], "")
    return out


def _multiply_piece(x: Tensor, piece: Tensor, bias: Tensor | None) -> Tensor:
    out_width, width = piece.shape
    counts = _find_counts(out_width, width, x.dtype, is_biased=bias is not None)
    return multiply_in_blocks(x, lambda rows: _call(rows, piece, bias), counts)


def _find_counts(out_width: int, width: int, dtype: torch.dtype, *, is_biased: bool) -> tuple[int, ...]:
    return find_row_counts(_bind_biased if is_biased else _bind, out_width, width, dtype)


def _bind(weight: Tensor) -> Multiply:
    piece = _pack(weight)
    return lambda rows: _call(rows, piece, None)


def _bind_biased(weight: Tensor) -> Multiply:
    piece, bias = _pack(weight), make_trial_bias(weight)
    return lambda rows: _call(rows, piece, bias)


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
