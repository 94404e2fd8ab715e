"""Reads blocks of rows from files into weights. A few threads run in parallel, each on its own part of a file.

A block is read directly into its weight where possible. Otherwise it passes through one small buffer per thread.

Measured on two busy cores, 2 GB in bfloat16 from a disk of 2 GB/s: 2.3 s with one open file per part; 4 s with threads
that share one open file; 3.2 s with 2 or 8 threads instead of 4.
"""

import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

import torch
from torch import Tensor

from slora.core.errors import ConfigError
from slora.models.weights.gguf_file import import_gguf
from slora.models.weights.linear import QuantizedWeight, quantize_groups, quantize_rows
from slora.models.weights.tensor_place import TensorPlace
from slora_kernels.coded_weight import CodedWeight, pack_codes

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8,
}  # fmt: skip
QUANTIZED = ("I8", "F8_E4M3")
# The number of rows and columns of a block that shares one scale.
ScaleBlock = tuple[int, int]


@dataclass(frozen=True, slots=True)
class WeightSource:
    """A stored weight [N, K] and its scales."""

    stored: TensorPlace
    # float32 [N], one per row; or one per block, float32 [ceil(N / block rows), ceil(K / block columns)].
    scales: Tensor | None = None
    block: ScaleBlock | None = None
    packed_width: int | None = None  # K, if int8 numbers are stored four to an int32, each increased by 128.
    has_codes: bool = False  # Whether codes of 4 bits are stored eight to an int32, see `stored_codes`.

    @property
    def dtype(self) -> torch.dtype:
        if self.stored.block is not None or self.has_codes:
            return torch.uint8
        return torch.int8 if self.packed_width is not None else DTYPES[self.stored.dtype]

    @property
    def is_as_stored(self) -> bool:
        """Whether `decode` changes nothing."""
        stored = self.stored
        return self.scales is None and stored.block is None and not (stored.paired_rows or stored.added)

    @property
    def is_quantized_by_row(self) -> bool:
        return self.scales is not None and self.block is None

    def decode(self, first_row: int, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Decodes stored rows [n, K] from `first_row` on. Rows in pairs are those of whole heads.

        Returns the rows, and float32 [n] scales that are not yet applied. The argument `rows` may be overwritten.
        """
        if not self.is_as_stored and self.scales is None:
            return decode_gguf(self.stored, rows), None
        if self.packed_width is not None:
            # Adding or subtracting 128 flips the top bit. Words are little-endian, so the bytes are in column order.
            rows = rows.bitwise_xor_(-128)[:, : self.packed_width]
        if self.scales is None:
            return rows, None
        if self.block is None:
            return rows, self.scales[first_row : first_row + len(rows)]
        height, width = self.block
        lines = torch.arange(first_row, first_row + len(rows)) // height
        factors = self.scales[lines].repeat_interleave(width, dim=1)[:, : rows.shape[1]]
        return rows.float().mul_(factors), None

    @property
    def scale_dtype(self) -> torch.dtype | None:
        """The dtype that holds the scales of codes of 4 bits, if the tensor is stored as such."""
        return _CODED.get(self.stored.dtype)

    def split_codes(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Codes, scales and minimums of stored rows of a tensor with a `scale_dtype`, as `CodedWeight` has them."""
        blocks = rows.view(-1, self.stored.row_bytes // _count_blocks(self.stored))
        if self.stored.dtype == "Q4_K":
            parts = _split_k_blocks(blocks)
        else:
            scales = blocks[:, :2].contiguous().view(torch.float16)
            has_minimum = self.stored.dtype == "Q4_1"
            # The codes of Q4_0 stand for -8 to 7. The product with 8 is exact.
            minimums = blocks[:, 2:4].contiguous().view(torch.float16) if has_minimum else scales * -8.0
            parts = blocks[:, 4 if has_minimum else 2 :], scales, minimums
        codes, scales, minimums = (_join_halves(self.stored, part.reshape(len(rows), -1)) for part in parts)
        return codes, scales, minimums


# GGUF's types with codes of 4 bits for groups of 32 numbers, and the dtype that holds their scales exactly.
_CODED = {"Q4_0": torch.float16, "Q4_1": torch.float16, "Q4_K": torch.float32}


def _count_blocks(stored: TensorPlace) -> int:
    assert stored.block is not None
    return math.prod(stored.shape[1:]) // stored.block[0]


def _split_k_blocks(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Splits blocks of Q4_K: two factors, packed scales and minimums of 8 groups, and codes of 4 times 64 numbers, of
    which the low bits are those of the first 32.
    """
    factors = blocks[:, :4].contiguous().view(torch.float16).float()
    scales, minimums = import_gguf().quants.Q4_K.get_scale_min(blocks[:, 4:16].contiguous().numpy())
    pairs = blocks[:, 16:].reshape(-1, 32)
    codes = pack_codes(torch.cat((pairs & 15, pairs >> 4), dim=1))
    return (
        codes.view(len(blocks), -1),
        factors[:, :1] * torch.from_numpy(scales).float(),
        -factors[:, 1:] * torch.from_numpy(minimums).float(),
    )


def _join_halves(stored: TensorPlace, rows: Tensor) -> Tensor:
    """Puts the rows of each head in the order of transformers' class."""
    if not stored.paired_rows:
        return rows
    pairs = rows.view(-1, stored.paired_rows // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).flatten(0, 2)


def decode_gguf(stored: TensorPlace, rows: Tensor) -> Tensor:
    """Returns the numbers of rows of a tensor in a GGUF file, in the order of transformers' class.

    rows: numbers, or uint8 blocks, [n, ...].
    """
    if stored.block is not None:
        rows = _decode_blocks(stored, rows)
    if stored.added:
        rows = rows.float() - stored.added
    return _join_halves(stored, rows)


# The bytes before the codes of types with blocks of 32 numbers: a scale, and a minimum, in float16.
_FACTOR_BYTES = {"Q4_0": 2, "Q4_1": 4, "Q8_0": 2}


def _decode_blocks(stored: TensorPlace, rows: Tensor) -> Tensor:
    """Returns float32 [..., K] of rows of blocks, uint8 [..., bytes].

    The package gguf computes all types. It takes three times as long as torch takes here, and its numbers are the same.
    """
    if stored.dtype not in _FACTOR_BYTES:
        gguf = import_gguf()
        kind = gguf.GGMLQuantizationType[stored.dtype]
        return torch.from_numpy(gguf.quants.dequantize(rows.numpy(), kind))
    assert stored.block is not None
    blocks = rows.view(-1, stored.block[1])
    num_bytes = _FACTOR_BYTES[stored.dtype]
    factors = blocks[:, :num_bytes].contiguous().view(torch.float16).float()
    codes = blocks[:, num_bytes:]
    if stored.dtype == "Q8_0":
        numbers = codes.contiguous().view(torch.int8).float()
    else:
        # The low bits of the bytes are the codes of the first half of the block.
        numbers = torch.empty(len(blocks), 2 * codes.shape[1])
        low, high = numbers.chunk(2, dim=1)
        low.copy_(codes & 15)
        high.copy_(codes >> 4)
    if stored.dtype == "Q4_0":
        numbers -= 8.0
    numbers *= factors[:, :1]
    if stored.dtype == "Q4_1":
        numbers += factors[:, 1:]
    return numbers.view(*rows.shape[:-1], -1)


def expand_scales(stored: TensorPlace, scales: Tensor, block: ScaleBlock | None) -> Tensor:
    """Converts scales per tensor, per row or per block to the shapes of `WeightSource.scales`."""
    num_rows, num_columns = stored.shape
    if block is not None:
        wanted = (-(-num_rows // block[0]), -(-num_columns // block[1]))
        if scales.shape != wanted:
            raise ConfigError(f"{_where(stored)} {list(scales.shape)}; blocks of {block} need {list(wanted)}")
        return scales
    if scales.numel() not in (1, num_rows) or (scales.dim() > 1 and scales.shape[0] != scales.numel()):
        raise ConfigError(
            f"{_where(stored)} {list(scales.shape)}; only one scale for each row, or one for all, is "
            "supported: use the unquantized checkpoint with --quantization"
        )
    return scales.flatten().expand(num_rows)


def _where(stored: TensorPlace) -> str:
    return f"{stored.path}: {stored.name} {list(stored.shape)} has scales of shape"


class WeightTarget(Protocol):
    """The rows of a weight that one tensor of the checkpoint fills, block by block.

    A target may hold only some columns of the tensor. Rows are quantized before their columns are cut, so that the
    parts of all ranks together equal the weight of a single rank.
    """

    def direct_memory(self, dtype: torch.dtype) -> Tensor | None:
        """The memory of these rows, if bytes of `dtype` may be read directly into it; otherwise None."""

    def write(self, first_row: int, rows: Tensor, scales: Tensor | None) -> bool:
        """Writes rows [n, K], multiplied by scales float32 [n] if given. Returns False if a number is not finite.

        The rows may be overwritten, and the caller reuses their memory.
        """


@dataclass(frozen=True, slots=True)
class PlainTarget:
    """columns: the columns of the tensor that the weight holds. num_columns: all columns of the tensor."""

    weight: Tensor
    columns: range
    num_columns: int

    def direct_memory(self, dtype: torch.dtype) -> Tensor | None:
        suits = self.weight.dtype == dtype and self.weight.device.type == "cpu"
        return self.weight if suits and len(self.columns) == self.num_columns else None

    def write(self, first_row: int, rows: Tensor, scales: Tensor | None) -> bool:
        exact = rows if scales is None else rows.float().mul_(scales[:, None])
        self.weight[first_row : first_row + len(rows)].copy_(exact[:, self.columns.start : self.columns.stop])
        return True


@dataclass(frozen=True, slots=True)
class QuantizedTarget:
    """Copies numbers that are already stored in the target format. Quantizes all others, on the GPU if there is one."""

    weight: QuantizedWeight
    columns: range

    def direct_memory(self, dtype: torch.dtype) -> Tensor | None:
        return None

    def write(self, first_row: int, rows: Tensor, scales: Tensor | None) -> bool:
        values, form = self.weight.values, self.weight.values.dtype
        if scales is None or rows.dtype != form:
            exact = rows.to(values.device, torch.float32)
            if scales is not None:
                exact = exact.mul_(scales.to(values.device)[:, None])
            rows, scales = quantize_rows(exact, form)
        block = slice(first_row, first_row + len(rows))
        values[block].copy_(rows[:, self.columns.start : self.columns.stop])
        self.weight.scales[block].copy_(scales)
        return bool(scales.isfinite().all())


@dataclass(frozen=True, slots=True)
class CodedTarget:
    """Copies codes of 4 bits as they are stored. Rounds all other numbers. The columns are whole groups."""

    weight: CodedWeight
    columns: range

    def direct_memory(self, dtype: torch.dtype) -> Tensor | None:
        return None

    def write(self, first_row: int, rows: Tensor, scales: Tensor | None) -> bool:
        exact = rows.float() if scales is None else rows.float().mul_(scales[:, None])
        return self.write_parts(first_row, quantize_groups(exact.contiguous(), self.weight.group))

    def write_parts(self, first_row: int, parts: tuple[Tensor, Tensor, Tensor]) -> bool:
        """Like `write`, for the codes, scales and minimums of whole rows."""
        block, weight = slice(first_row, first_row + len(parts[0])), self.weight
        num_columns = 2 * parts[0].shape[1]
        for target, part in zip((weight.codes, weight.scales, weight.minimums), parts, strict=True):
            columns_each = num_columns // part.shape[1]
            columns = slice(self.columns.start // columns_each, self.columns.stop // columns_each)
            target[block].copy_(part[:, columns])
        return all(bool(part.isfinite().all()) for part in parts[1:])


_THREADS = 4
# The bytes that a thread reads from one file before it takes the next part. Prefetching the part with WILLNEED was
# slower: 1.9 to 2.4 s for 2 GB from a disk of 2.4 GB/s, where plain reads took 1.3 to 1.4 s.
_PART_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Rows [first_row, first_row + num_rows) of a stored tensor. They begin at `target_row` of the target."""

    source: WeightSource
    target: WeightTarget
    first_row: int
    num_rows: int
    target_row: int

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.source.stored.row_bytes

    @property
    def offset(self) -> int:
        return self.source.stored.offset + self.first_row * self.source.stored.row_bytes


def read_blocks(blocks: list[RowBlock], device: torch.device) -> Iterator[int]:
    """Reads all blocks in the order of their files and offsets. Yields the number of bytes of each finished part."""
    largest = max((block.num_bytes for block in blocks), default=0)
    buffers: SimpleQueue[Tensor] = SimpleQueue()
    for _ in range(_THREADS):
        buffers.put(torch.empty(largest, dtype=torch.uint8, pin_memory=device.type == "cuda"))
    threads = torch.get_num_threads()
    with ExitStack() as stack:
        # Our own threads do the rounding, so torch must not start a thread pool in each of them.
        torch.set_num_threads(1)
        stack.callback(torch.set_num_threads, threads)
        executor = ThreadPoolExecutor(_THREADS, "slora-weights")
        stack.callback(executor.shutdown, cancel_futures=True)
        yield from executor.map(lambda part: _read_part(part, buffers), _split_into_parts(blocks))


def _split_into_parts(blocks: list[RowBlock]) -> list[list[RowBlock]]:
    """Groups blocks that follow each other in one file, up to `_PART_BYTES` per group."""
    parts: list[list[RowBlock]] = []
    end: tuple[Path, int] | None = None
    for block in sorted(blocks, key=lambda block: (block.source.stored.path, block.offset)):
        path = block.source.stored.path
        if end != (path, block.offset) or block.offset - parts[-1][0].offset >= _PART_BYTES:
            parts.append([])
        parts[-1].append(block)
        end = path, block.offset + block.num_bytes
    return parts


def _read_part(part: list[RowBlock], buffers: SimpleQueue[Tensor]) -> int:
    """Reads one part through a file descriptor of its own.

    The operating system detects sequential reads, and reads ahead, separately for each open file.
    """
    with part[0].source.stored.path.open("rb") as file:
        for block in part:
            _read_block(block, file.fileno(), buffers)
    return sum(block.num_bytes for block in part)


def _read_block(block: RowBlock, file: int, buffers: SimpleQueue[Tensor]) -> None:
    source, stored = block.source, block.source.stored
    memory = block.target.direct_memory(source.dtype) if source.is_as_stored else None
    if memory is not None:
        read_into(memory[block.target_row : block.target_row + block.num_rows], stored, file, block.offset)
        return
    buffer = buffers.get()
    try:
        rows = buffer[: block.num_bytes].view(source.dtype).view(block.num_rows, -1)
        read_into(rows, stored, file, block.offset)
        if isinstance(block.target, CodedTarget) and source.scale_dtype is not None:
            is_finite = block.target.write_parts(block.target_row, source.split_codes(rows))
        else:
            is_finite = block.target.write(block.target_row, *source.decode(block.first_row, rows))
        if not is_finite:
            raise ConfigError(f"{stored.path}: {stored.name} contains numbers that are not finite")
    finally:
        buffers.put(buffer)


def read_tensor(stored: TensorPlace, tensor: Tensor) -> None:
    """Fills a contiguous tensor in CPU memory with the whole stored tensor."""
    with stored.path.open("rb") as file:
        read_into(tensor, stored, file.fileno(), stored.offset)


def read_into(rows: Tensor, stored: TensorPlace, file: int, offset: int) -> None:
    """Fills contiguous `rows` in CPU memory from byte `offset` of the file."""
    assert rows.is_contiguous(), rows.stride()
    memory = rows.view(-1).view(torch.uint8).numpy().data
    done = 0
    while done < len(memory):
        try:
            count = os.preadv(file, [memory[done:]], offset + done)
        except OSError as error:
            raise ConfigError(
                f"{stored.path}: {stored.name} can't be read at byte {offset + done}: {error.strerror}"
            ) from error
        if count == 0:
            raise ConfigError(f"{stored.path} ends at byte {offset + done}, within {stored.name}")
        done += count
