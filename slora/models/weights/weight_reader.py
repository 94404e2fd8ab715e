"""Reads a checkpoint's bytes directly into the weights that are served, so that no weight is in memory twice.

Weights are allocated first, fused as the decoder needs them. Then a few threads read all files in parallel, in blocks
of rows. Blocks that can't be read in place (another dtype, a GPU, quantization) pass through one small buffer per
thread. Files are not memory-mapped, so their pages never count as memory of this process: for 1.2 GB in bfloat16, the
safetensors library's tensors raise the peak from 1.2 to 2.4 GB, and its slices also take twice the CPU time.

The decoder decides which tensors exist and how they are fused; this module knows no model.
"""

import itertools
import logging
import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slora.core.errors import ConfigError
from slora.memory.host_memory import empty_tensor
from slora.models.stored_quantization import StoredCodes
from slora.models.weights.bitsandbytes_codes import TABLES, BlocksReader
from slora.models.weights.checkpoint import Checkpoint
from slora.models.weights.linear import FORMS, INT4_GROUPS, QuantizedWeight, allocate_codes
from slora.models.weights.stored_codes import (
    REMEDY,
    FindTensor,
    WordsReader,
    allocate_stored_codes,
    is_zero,
    refuse_matrix,
)
from slora.models.weights.tensor_place import TensorPlace
from slora.models.weights.weight_blocks import (
    DTYPES,
    QUANTIZED,
    CodedTarget,
    PlainTarget,
    QuantizedTarget,
    RowBlock,
    ScaleBlock,
    WeightSource,
    WeightTarget,
    decode_gguf,
    expand_scales,
    read_blocks,
    read_tensor,
)
from slora_adapters.process.progress_bar import show_progress
from slora_kernels.coded_weight import CodedWeight

_log = logging.getLogger(__name__)
CodesReader = WordsReader | BlocksReader

# Bytes of a block, unless one row is longer. Quantizing a block needs about six times as much memory for a moment.
_BLOCK_BYTES = 2 << 20
# Tensors of some checkpoints that are not needed: tables computed from the config, and scales of activations and KV.
_HARMLESS = re.compile(r"\.rotary_emb\.inv_freq$|\.(input|output|activation|k|v|q|kv)_scale$")
Weight = Tensor | QuantizedWeight | CodedWeight


@dataclass(frozen=True, slots=True)
class LinearPart:
    """A part of the matrix `name` of `shape`: these rows, in this order, and of each row these columns.

    place: index and count of matrices, if `name` is a stack of them. None: `name` is one matrix.
    """

    name: str
    shape: tuple[int, int]
    rows: tuple[range, ...]
    columns: range
    place: tuple[int, int] | None = None


class WeightReader:
    """Reads the weights of one checkpoint.

    `vector` reads immediately. `matrix` and `linear` allocate memory that `read` fills.

    form: the dtype that `linear` quantizes to; None: no quantization. For the head, see `find_head_form`.
    block: the ScaleBlock of all quantized tensors.
    codes: how weights of 4 bits are stored; None: there are none.

    Raises ConfigError for a tensor that is missing, damaged or not supported.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        *,
        form: torch.dtype | None = None,
        block: ScaleBlock | None = None,
        codes: StoredCodes | None = None,
    ) -> None:
        self.dtype = dtype
        self.device = device
        self._checkpoint = checkpoint
        self._form = form
        self._block = block
        self._codes = None if codes is None else _open_codes(checkpoint, codes, self._find)
        self._blocks: list[RowBlock] = []
        self._known_names: set[str] = set()

    def __contains__(self, name: str) -> bool:
        """Whether the checkpoint has a tensor of this name."""
        return name in self._checkpoint

    def vector(self, name: str, width: int) -> Tensor:
        """Reads a norm or a bias [width]."""
        return self._read_now(self._find(name, (width,))).to(self.device, self.dtype)

    def matrix(
        self, name: str, num_rows: int, width: int, rows: range | None = None, num_held: int | None = None
    ) -> Tensor:
        """Allocates rows of a matrix [num_rows, width], in the served dtype whatever the stored dtype is.

        rows: the rows to read; None: all. num_held: number of rows of the result, with zeros after the rows that are
            read. None: no zeros.
        """
        rows = range(num_rows) if rows is None else rows
        weight = empty_tensor((num_held or len(rows), width), self.dtype, self.device)
        weight[len(rows) :] = 0
        self._fill(self._source(name, (num_rows, width)), PlainTarget(weight, range(width), width), (rows,))
        return weight

    def head(
        self, name: str, num_rows: int, width: int, rows: range, num_held: int
    ) -> Tensor | QuantizedWeight:
        """Like `matrix`, for an output head, which may be rounded to `find_head_form`."""
        form = self.find_head_form(name)
        if form is None:
            return self.matrix(name, num_rows, width, rows, num_held)
        weight = QuantizedWeight(
            empty_tensor((num_held, width), form, self.device), torch.ones(num_held, device=self.device)
        )
        weight.values[len(rows) :] = 0
        self._fill(self._source(name, (num_rows, width)), QuantizedTarget(weight, range(width)), (rows,))
        return weight

    def find_head_form(self, name: str) -> torch.dtype | None:
        """The dtype to which the output head is rounded. None: it stays in the served dtype, as on a GPU, and if the
        tensor `name`, from which it is read, is stored in 4 bits.
        """
        rounds = self._form in (FORMS["int8"], FORMS["int4"]) and self.device.type == "cpu"
        is_coded = rounds and WeightSource(self._checkpoint.find(name)).scale_dtype is not None
        return FORMS["int8"] if rounds and not is_coded else None

    def linear(self, parts: Sequence[LinearPart]) -> Weight:
        """Allocates one weight in which parts of several tensors are stacked. All parts have the same columns.

        The weight is quantized if `form` is set, if all tensors are stored in one 8-bit dtype with a scale per row, or
        if all are stored in 4 bits.
        """
        if self._codes is not None and any(self._codes.holds(part.name) for part in parts):
            return self._coded_linear(parts, self._codes)
        sources = [self._part_source(part) for part in parts]
        columns = parts[0].columns
        sizes = [sum(map(len, part.rows)) for part in parts]
        num_rows, width = sum(sizes), len(columns)
        form = self._form or _common_form(sources)
        targets: Iterable[WeightTarget]
        weight: Weight
        if form is None:
            weight = empty_tensor((num_rows, width), self.dtype, self.device)
            targets = (PlainTarget(rows, columns, parts[0].shape[1]) for rows in torch.split(weight, sizes))
        elif form == FORMS["int4"]:
            group = _choose_group(sources, parts)
            is_wide = any(source.scale_dtype == torch.float32 for source in sources)
            scale_dtype = torch.float32 if is_wide else torch.float16
            weight = allocate_codes(num_rows, width, group, self.device, scale_dtype)
            ends = itertools.accumulate(sizes)
            targets = (
                CodedTarget(weight.rows(end - size, end), columns)
                for size, end in zip(sizes, ends, strict=True)
            )
        else:
            values = empty_tensor((num_rows, width), form, self.device)
            weight = QuantizedWeight(values, torch.empty(num_rows, device=self.device))
            pairs = zip(torch.split(values, sizes), torch.split(weight.scales, sizes), strict=True)
            targets = (QuantizedTarget(QuantizedWeight(*pair), columns) for pair in pairs)
        for source, target, part in zip(sources, targets, parts, strict=True):
            self._fill(source, target, part.rows)
        return weight

    def _coded_linear(self, parts: Sequence[LinearPart], codes: CodesReader) -> CodedWeight:
        columns = parts[0].columns
        self._check_forms(parts, codes)
        sources = [
            WeightSource(codes.find_codes(part.name, part.shape, columns), has_codes=True) for part in parts
        ]
        numbers = [codes.read_numbers(part.name, part.shape, part.rows, columns) for part in parts]
        for part, other in zip(parts, numbers, strict=True):
            if other.scales.shape[1] != numbers[0].scales.shape[1]:
                raise ConfigError(
                    f"{self._checkpoint.directory}: {parts[0].name} and {part.name} are multiplied together, but they "
                    f"are stored in groups of other sizes; {REMEDY}"
                )
        weight = allocate_stored_codes(numbers, len(columns), codes.table, self.device)
        own = torch.split(weight.codes, [len(part.scales) for part in numbers])
        for source, part, rows in zip(sources, parts, own, strict=True):
            target, ranges, unit = codes.make_target(rows, part.rows, columns)
            self._fill(source, target, ranges, unit)
        return weight

    def _check_forms(self, parts: Sequence[LinearPart], codes: CodesReader) -> None:
        for part in parts:
            if not codes.holds(part.name):
                raise ConfigError(
                    f"{self._checkpoint.directory}: {part.name} is not stored in 4 bits, but linears that are "
                    f"multiplied together with it are; {REMEDY}"
                )

    def is_absent_or_same(self, name: str, other: str) -> bool:
        """Whether tensor `name` is absent or has the same bytes as `other`. In both cases it is not needed."""
        self._known_names.add(name)
        if name not in self._checkpoint:
            return True
        tensor, same = self._checkpoint.find(name), self._checkpoint.find(other)
        return tensor.dtype == same.dtype and tensor.shape == same.shape and _same_bytes(tensor, same)

    def skip_prefixes(self, prefixes: tuple[str, ...]) -> None:
        """Skips tensors with these prefixes, which belong to parts of the model that are not served."""
        self._known_names.update(name for name in self._checkpoint if name.startswith(prefixes))

    def read(self) -> None:
        """Fills the memory from `matrix` and `linear`.

        Raises ConfigError if the checkpoint holds tensors that were not requested.
        """
        self._refuse_unknown_tensors()
        start = time.perf_counter()
        total = sum(block.num_bytes for block in self._blocks)
        with show_progress("Weights", total, is_quiet=not _log.isEnabledFor(logging.WARNING)) as advance:
            for num_bytes in read_blocks(self._blocks, self.device):
                advance(num_bytes)
        self._blocks.clear()
        _log.info("read %.2f GB of weights in %.1f s", total / 1e9, time.perf_counter() - start)

    def _find(self, name: str, shape: tuple[int, ...]) -> TensorPlace:
        self._known_names.add(name)
        return self._checkpoint.find(name, shape)

    def _part_source(self, part: LinearPart) -> WeightSource:
        if part.place is None:
            return self._source(part.name, part.shape)
        index, count = part.place
        stack = self._find(part.name, (count, *part.shape))
        if stack.dtype in QUANTIZED:
            raise _not_floating(stack)
        return WeightSource(stack.item(index))

    def _source(self, name: str, shape: tuple[int, int]) -> WeightSource:
        if self._codes is not None and self._codes.holds(name):
            raise refuse_matrix(self._checkpoint, name)
        if name not in self._checkpoint and f"{name}_packed" in self._checkpoint:
            return self._packed_source(name, *shape)
        stored = self._find(name, shape)
        if stored.dtype not in QUANTIZED:
            return WeightSource(stored)
        for scale_name in (f"{name}_scale", f"{name}_scale_inv"):
            if scale_name in self._checkpoint:
                self._known_names.add(scale_name)
                scales = self._read_now(self._checkpoint.find(scale_name)).float()
                return WeightSource(stored, expand_scales(stored, scales, self._block), self._block)
        raise ConfigError(f"{stored.path}: {name} is {stored.dtype}, but there is no {name}_scale")

    def _packed_source(self, name: str, num_rows: int, width: int) -> WeightSource:
        self._known_names.add(f"{name}_shape")
        stored = self._find(f"{name}_packed", (num_rows, -(-width // 4)))
        if stored.dtype != "I32":
            raise _not_floating(stored)
        self._known_names.add(f"{name}_scale")
        scales = self._read_now(self._checkpoint.find(f"{name}_scale")).float()
        return WeightSource(stored, expand_scales(stored, scales, None), packed_width=width)

    def _read_now(self, stored: TensorPlace) -> Tensor:
        if stored.dtype in QUANTIZED or (stored.dtype not in DTYPES and stored.block is None):
            raise _not_floating(stored)
        if stored.block is not None:
            tensor = torch.empty(stored.num_bytes, dtype=torch.uint8)
        else:
            tensor = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
        read_tensor(stored, tensor)
        return decode_gguf(stored, tensor)

    def _fill(
        self, source: WeightSource, target: WeightTarget, parts: Iterable[range], unit: int = 1
    ) -> None:
        """unit: rows that a block has a multiple of."""
        stored = source.stored
        is_packed = source.packed_width is not None or source.has_codes or stored.block is not None
        if stored.dtype not in DTYPES and not is_packed:
            raise _not_floating(stored)
        # Ranks hold whole heads, so all ranges begin and end with a head.
        unit = stored.paired_rows or unit
        step = -(-max(1, _BLOCK_BYTES // stored.row_bytes) // unit) * unit
        target_row = 0
        for rows in parts:
            for row in range(rows.start, rows.stop, step):
                count = min(step, rows.stop - row)
                self._blocks.append(RowBlock(source, target, row, count, target_row))
                target_row += count

    def _is_empty_bias(self, name: str) -> bool:
        """Whether a tensor is a bias of zeros. Some programs write one for each linear that they quantize."""
        stem, _, kind = name.rpartition(".")
        holds = self._codes is not None and kind == "bias" and self._codes.holds(f"{stem}.weight")
        return holds and is_zero(self._checkpoint.find(name))

    def _refuse_unknown_tensors(self) -> None:
        unknown = [
            name
            for name in self._checkpoint
            if name not in self._known_names and not _HARMLESS.search(name) and not self._is_empty_bias(name)
        ]
        if unknown:
            raise ConfigError(
                f"{self._checkpoint.directory} has {len(unknown)} tensors that its config.json does not describe, such "
                f"as {unknown[0]!r}; without them, slora would serve a different model"
            )


def _open_codes(checkpoint: Checkpoint, stored: StoredCodes, find: FindTensor) -> CodesReader:
    if stored.format in TABLES:
        return BlocksReader(checkpoint, stored.format, find)
    return WordsReader(checkpoint, stored, find)


def _not_floating(stored: TensorPlace) -> ConfigError:
    return ConfigError(
        f"{stored.path}: {stored.name} is {stored.dtype}; only floating-point weights, and "
        "weights of 8 or 4 bits with scales, are served"
    )


def _choose_group(sources: Sequence[WeightSource], parts: Sequence[LinearPart]) -> int:
    """The number of columns in a group of int4. It only depends on the number of ranks if their parts of a row do not
    end where groups do.
    """
    ends = [(part.shape[1], part.columns.start, part.columns.stop) for part in parts]
    for source, part, own in zip(sources, parts, ends, strict=True):
        if any(end % INT4_GROUPS[-1] for end in own):
            raise ConfigError(
                f"{source.stored.path}: {part.name} has {own[0]} columns, of which this process computes {own[1]} to "
                f"{own[2] - 1}; int4 needs multiples of {INT4_GROUPS[-1]}, so choose --quantization int8"
            )
    if any(source.stored.block is not None for source in sources):
        return INT4_GROUPS[-1]  # Codes of a GGUF file stay as they are stored, in groups of 32.
    return next(group for group in INT4_GROUPS if not any(end % group for end in itertools.chain(*ends)))


def _same_bytes(first: TensorPlace, second: TensorPlace) -> bool:
    with first.path.open("rb") as first_file, second.path.open("rb") as second_file:
        for done in range(0, first.num_bytes, _BLOCK_BYTES):
            count = min(_BLOCK_BYTES, first.num_bytes - done)
            content = os.pread(first_file.fileno(), count, first.offset + done)
            if content != os.pread(second_file.fileno(), count, second.offset + done):
                return False
    return True


def _common_form(sources: Sequence[WeightSource]) -> torch.dtype | None:
    forms = {source.dtype if source.is_quantized_by_row else None for source in sources}
    return forms.pop() if len(forms) == 1 else None


class WidenedTensor:
    """A tensor of a checkpoint that transformers' loader reads when it needs it. Numbers of 8 bits are multiplied by
    their scales, in float32.
    """

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def __getitem__(self, _: object) -> Tensor:
        """Reads the whole tensor, whatever the index is."""
        tensor = torch.empty(self._source.stored.shape, dtype=self._source.dtype)
        read_tensor(self._source.stored, tensor)
        rows, scales = self._source.decode(0, tensor)
        return rows if scales is None else rows.float().mul_(scales[:, None])


def open_widened(checkpoint: Checkpoint, block: ScaleBlock | None) -> dict[str, WidenedTensor]:
    """Returns the tensors of a checkpoint with 8 bits by name, without those that hold scales.

    block: see `WeightReader`. Raises ConfigError for a tensor whose numbers or scales can't be widened.
    """
    found, scale_names = {}, set()
    for name in checkpoint:
        stored, scales = checkpoint.find(name), None
        if stored.dtype not in DTYPES:
            raise _not_floating(stored)
        own_scales = [scale for scale in (f"{name}_scale", f"{name}_scale_inv") if scale in checkpoint]
        if stored.dtype in QUANTIZED:
            if len(own_scales) != 1:
                what = " and ".join(own_scales) if own_scales else f"no {name}_scale"
                raise ConfigError(f"{stored.path}: {name} is {stored.dtype}, but there is {what}")
            scales = _read_scales(stored, checkpoint.find(own_scales[0]), block)
            scale_names.add(own_scales[0])
        elif own_scales:
            raise ConfigError(
                f"{stored.path}: {name} is {stored.dtype}, but there is {own_scales[0]}, which only numbers of 8 bits "
                "need"
            )
        found[name] = WidenedTensor(WeightSource(stored, scales, block if own_scales else None))
    return {
        name: tensor
        for name, tensor in found.items()
        if name not in scale_names and not _HARMLESS.search(name)
    }


def _read_scales(stored: TensorPlace, place: TensorPlace, block: ScaleBlock | None) -> Tensor:
    if len(stored.shape) != len(("rows", "columns")):
        raise ConfigError(
            f"{stored.path}: {stored.name} has shape {list(stored.shape)}; only matrices are served in 8 bits"
        )
    if place.dtype in QUANTIZED or place.dtype not in DTYPES:
        raise _not_floating(place)
    scales = torch.empty(place.shape, dtype=DTYPES[place.dtype])
    read_tensor(place, scales)
    return expand_scales(stored, scales.float(), block)
