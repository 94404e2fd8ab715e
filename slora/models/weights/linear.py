"""Linears of the base model: unquantized, with plain or packed weights, or as numbers of 8 or 4 bits with scales."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from slora.core.errors import ConfigError
from slora.memory.host_memory import empty_tensor
from slora.models.affine import SiteWeight
from slora.models.weights.packed_weight import (
    PackedWeight,
    pack_bytes_in_tiles,
    pack_codes_in_tiles,
    pack_head,
    split_weight,
)
from slora_kernels.coded_weight import BLOCK_COLUMNS, CodedWeight, pack_codes
from slora_kernels.layout import LoraSite
from slora_kernels.ops import Kernels
from slora_kernels.torch.grouped_matmuls import multiply_groups
from slora_kernels.torch.quantized_matmuls import coded_linear
from slora_kernels.torch.row_blocks import multiply_rows

# For each name in the settings, the dtype of the numbers. A byte of int4 holds two codes.
FORMS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": torch.uint8}
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# Columns of a group of int4: the first of these that divides the weight's columns. Larger groups take less time.
INT4_GROUPS = (2 * BLOCK_COLUMNS, BLOCK_COLUMNS)
_MAX_CODE = 15
# What is cut off of the range of a group of int4, at each end. On SmolLM2 135M, the root of the mean squared error of a
# weight in groups of 64 is 7.6% of its numbers' with this, 8.4% without, and 7.7% without in groups of 32.
_CUT_SHARE = 0.025
# Numbers of rows for which the GPU's kernels have different blocks.
_CHECKED_ROWS = (1, 16, 17, 128, 200)
# Two correct orders of a sum may differ by some roundings of the largest product, and by those of float32 sums.
_CHECKED_UNITS, _CHECKED_SUMS = 8, 1e-5
# Elements of a weight that are widened to float32 at a time. They fit into a core's own cache.
_SQUARED_ELEMENTS = 1 << 17
# Elements of a weight whose norms are computed at a time. Beside a process that uses a core, each operation of several
# threads waits for that core, and with smaller pieces a model of 135M took 1 s of CPU time more.
_NORM_ELEMENTS = 1 << 21
# Elements that are rounded to int4 at a time. They stay in a core's own cache.
_ROUNDED_ELEMENTS = 1 << 16


def quantize_rows(rows: Tensor, form: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantizes float32 [N, K], which is overwritten, to numbers of `form` [N, K] and float32 scales [N].

    A row with NaN or infinity gets a scale that is not finite.
    """
    largest = _LARGEST[form]
    scales = rows.abs().amax(dim=1).div_(largest)
    # A scale that is 0 or underflows is replaced by 1, because dividing by it could give NaN. Numbers of such rows are
    # so small that they round to 0.
    scales.masked_fill_(scales < torch.finfo(torch.float32).tiny, 1.0)
    rows.div_(scales[:, None]).clamp_(-largest, largest)
    return (rows.round_() if form == torch.int8 else rows).to(form), scales


def allocate_codes(
    num_rows: int, width: int, group: int, device: torch.device, scale_dtype: torch.dtype
) -> CodedWeight:
    """A weight [num_rows, width] of int4, whose codes stand for 0 to 15. Each `group` of columns has a scale and a
    minimum.
    """
    scales, minimums = (
        torch.empty(num_rows, width // group, dtype=scale_dtype, device=device) for _ in range(2)
    )
    codes = empty_tensor((num_rows, width // 2), torch.uint8, device)
    return CodedWeight(codes, scales, minimums, torch.arange(_MAX_CODE + 1.0, device=device))


def quantize_groups(rows: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rounds float32 [N, K] to the codes [N, K / 2], scales and minimums [N, K / group] of int4.

    The codes 0 and 15 are the smallest and the largest number of a group; or, if the sum of the squared errors is then
    smaller, they cut off a little at both ends, and the least squares for these codes are the scale and the minimum.
    A group with NaN or infinity gets a scale or a minimum that is not finite. So does a group whose scale or minimum is
    too large for float16.
    """
    step = max(1, _ROUNDED_ELEMENTS // rows.shape[1])
    parts = [_fit_groups(part.view(-1, group)) for part in torch.split(rows, step)]
    codes, scales, minimums = (torch.cat(part) for part in zip(*parts, strict=True))
    shape = len(rows), rows.shape[1] // group
    return pack_codes(codes.view_as(rows)), scales.view(shape), minimums.view(shape)


def _fit_groups(groups: Tensor) -> tuple[Tensor, ...]:
    """The codes of groups, uint8 [G, n], and their scales and minimums, see `quantize_groups`."""
    smallest, largest = groups.aminmax(dim=1, keepdim=True)
    cut = _CUT_SHARE * (largest - smallest)
    whole = _round_groups(groups, smallest, largest - smallest)
    trial = _round_groups(groups, smallest + cut, largest - smallest - 2 * cut)[0]
    mean, mean_code = groups.mean(1, keepdim=True), trial.mean(1, keepdim=True)
    trial -= mean_code
    steps = (trial * (groups - mean)).sum(1, keepdim=True) / trial.square_().sum(1, keepdim=True)
    fitted = _round_groups(groups, mean - steps * mean_code, steps * _MAX_CODE)
    is_better = fitted[3] < whole[3]
    codes, *numbers = (torch.where(is_better, *pair) for pair in zip(fitted[:3], whole[:3], strict=True))
    return codes.to(torch.uint8), *numbers


def _round_groups(groups: Tensor, smallest: Tensor, ranges: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rounds each of the groups, float32 [G, n], to 16 numbers from `smallest` [G, 1] to `smallest` + `ranges`.

    Returns the codes [G, n], scales and minimums in float16, and the sums of the squared errors, [G, 1].
    """
    scales, minimums = (ranges / _MAX_CODE).half(), smallest.half()
    # All numbers of such a group are nearly the same.
    scales.masked_fill_(scales == 0, 1.0)
    codes = (groups - minimums.float()).div_(scales.float()).round_().clamp_(0, _MAX_CODE)
    errors = (
        torch.addcmul(minimums.float(), codes, scales.float()).sub_(groups).square_().sum(1, keepdim=True)
    )
    return codes, scales, minimums, errors


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A quantized weight: values * scales[:, None].

    values: int8 or float8_e4m3fn [out, in]. scales: float32 [out].
    """

    values: Tensor
    scales: Tensor


Weight = Tensor | PackedWeight | QuantizedWeight | CodedWeight


def quantize_copy(weight: Tensor, form: torch.dtype) -> QuantizedWeight:
    """Rounds a copy of a weight [N, K] to `form`, a few rows at a time."""
    values = empty_tensor((weight.shape[0], weight.shape[1]), form, weight.device)
    scales = torch.empty(len(weight), device=weight.device)
    step = max(1, _SQUARED_ELEMENTS // max(1, weight.shape[1]))
    for parts in zip(*(torch.split(tensor, step) for tensor in (weight, values, scales)), strict=True):
        rows = parts[0].to(torch.float32, copy=True)
        for target, rounded in zip(parts[1:], quantize_rows(rows, form), strict=True):
            target.copy_(rounded)
    return QuantizedWeight(values, scales)


@dataclass(frozen=True, slots=True)
class Linear:
    """weight [out, in]: the stacked weights of all modules of the site. bias [out] is never quantized.

    squares: the sum of the squares of each row of the weight, float32 [out]. None until the linear is packed.
    """

    weight: Weight
    bias: Tensor | None
    site: LoraSite
    squares: Tensor | None = None

    def apply(self, x: Tensor, kernels: Kernels) -> Tensor:
        """x [T, in] -> [T, out] in x's dtype, without LoRA."""
        return self._multiply(x, kernels, self.bias)

    def _multiply(self, x: Tensor, kernels: Kernels, bias: Tensor | None) -> Tensor:
        weight = self.weight
        if isinstance(weight, QuantizedWeight):
            return kernels.quantized_linear(x, weight.values, weight.scales, bias)
        if isinstance(weight, CodedWeight):
            return kernels.coded_linear(x, weight, bias)
        return multiply(x, weight, bias)

    def packed(self, dtype: torch.dtype, *, is_tied: bool = False) -> "Linear":
        """Returns the same linear with packed weights, if this machine supports them. dtype: that of x.

        is_tied: see `pack_head`.
        """
        squares = None if isinstance(self.weight, PackedWeight) else sum_squares(self.weight)
        weight = _pack(self.weight, dtype, is_biased=self.bias is not None, is_tied=is_tied)
        return replace(self, weight=weight, squares=squares)

    def describe(self, kernels: Kernels, *, is_divided: bool) -> SiteWeight:
        """is_divided: whether other ranks have other columns of the weight."""
        assert self.squares is not None, "the linear was not packed"
        return SiteWeight(lambda x: self._multiply(x, kernels, None), self.squares, self.bias, is_divided)


def check_codes(linear: Linear, dtype: torch.dtype, kernels: Kernels) -> None:
    """Compares the kernels' products with a weight of 4 bits with torch's, for numbers of rows that use other blocks.

    Raises ConfigError if they differ. GPUs differ more than the tests can cover, and a wrong product shows no error.
    """
    weight = linear.weight
    if not isinstance(weight, CodedWeight):
        return
    device, width = weight.codes.device, weight.shape[1]
    random = torch.randn(_CHECKED_ROWS[-1], width, generator=torch.Generator().manual_seed(0))
    rows = random.to(dtype).to(device)
    expected = coded_linear(rows, weight, None).float()
    for count in _CHECKED_ROWS:
        error = (kernels.coded_linear(rows[:count], weight, None).float() - expected[:count]).abs().max()
        limit = (_CHECKED_UNITS * torch.finfo(dtype).eps + _CHECKED_SUMS) * expected.abs().max()
        if not error <= limit:
            raise ConfigError(
                f"{device} computes wrong products of {count} rows with 4-bit weights {list(weight.shape)}: they are "
                f"off by {float(error):.3g} (limit {float(limit):.3g}); use the unquantized checkpoint, with "
                "--quantization int8 or fp8, and report this"
            )


def sum_column_squares(weight: Tensor) -> Tensor:
    """The sum of the squares of each column of a weight [N, K], float32 [K]."""
    total = torch.zeros(weight.shape[1], device=weight.device)
    for rows in torch.split(weight, max(1, _SQUARED_ELEMENTS // max(1, weight.shape[1]))):
        total += rows.float().square().sum(0)
    return total


def sum_squares(weight: Tensor | QuantizedWeight | CodedWeight) -> Tensor:
    """The sum of the squares of each row of a weight [N, K], float32 [N]."""
    if isinstance(weight, QuantizedWeight):
        return sum_squares(weight.values) * weight.scales.square()
    if isinstance(weight, CodedWeight):
        return weight.sum_squares()
    is_narrow = weight.element_size() == 1  # Numbers of 8 bits have to be widened.
    step = max(1, (_SQUARED_ELEMENTS if is_narrow else _NORM_ELEMENTS) // max(1, weight.shape[1]))
    parts = (part.float() if is_narrow else part for part in torch.split(weight, step))
    norms = (torch.linalg.vector_norm(part, dim=1, dtype=torch.float32) for part in parts)
    return torch.cat([*norms]).square_()


def _pack(weight: Weight, dtype: torch.dtype, *, is_biased: bool = False, is_tied: bool = False) -> Weight:
    if isinstance(weight, QuantizedWeight):
        return pack_bytes_in_tiles(weight.values, weight.scales, dtype) or weight
    if isinstance(weight, CodedWeight):
        return pack_codes_in_tiles(weight, dtype) or weight
    if isinstance(weight, Tensor):
        return pack_head(weight, is_tied=is_tied, is_biased=is_biased)
    return weight


def multiply(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None) -> Tensor:
    """x [T, in] -> [T, out]: x W^T + b. On a CPU, the bits of a row do not depend on the other rows."""
    if isinstance(weight, PackedWeight):
        return weight.multiply(x, bias)
    if x.device.type != "cpu":
        return F.linear(x, weight, bias)
    pieces = split_weight(weight)
    widths = [len(piece) for piece in pieces]
    biases = [None] * len(widths) if bias is None else torch.split(bias, widths)
    products = [multiply_rows(x, piece, part) for piece, part in zip(pieces, biases, strict=True)]
    return products[0] if len(products) == 1 else torch.cat(products, dim=1)


@dataclass(frozen=True, slots=True)
class ExpertLinear:
    """One linear of E experts, without biases.

    weight: [E * out, in], the experts' weights below each other; or the packed weight of each expert.
    """

    weight: Tensor | QuantizedWeight | CodedWeight | tuple[PackedWeight, ...]
    site: LoraSite

    @property
    def num_experts(self) -> int:
        return self.site.num_experts

    def apply(self, x: Tensor, starts: Tensor, kernels: Kernels) -> Tensor:
        """x [S, in] -> [S, out]. Expert e multiplies the rows from `starts[e]` to `starts[e + 1]`."""
        weight = self.weight
        if isinstance(weight, tuple):
            return multiply_groups(x, starts, lambda expert, rows: multiply(rows, weight[expert]))
        if isinstance(weight, QuantizedWeight):
            scales = weight.scales.view(self.num_experts, -1)
            return kernels.grouped_linear(x, self._stack(weight.values), scales, starts)
        if isinstance(weight, CodedWeight):
            height = len(weight.codes) // self.num_experts
            return multiply_groups(
                x,
                starts,
                lambda expert, rows: kernels.coded_linear(
                    rows, weight.rows(expert * height, (expert + 1) * height), None
                ),
            )
        return kernels.grouped_linear(x, self._stack(weight), None, starts)

    def packed(self, dtype: torch.dtype) -> "ExpertLinear":
        """Returns the same linear with packed weights, if this machine supports them. dtype: that of x."""
        if isinstance(self.weight, tuple):
            return self
        packed = [_pack(expert, dtype) for expert in self._cut(self.weight)]
        packed_only = tuple(weight for weight in packed if isinstance(weight, PackedWeight))
        return replace(self, weight=packed_only) if len(packed_only) == len(packed) else self

    def _stack(self, weight: Tensor) -> Tensor:
        """Views a weight [E * out, in] as [E, out, in]."""
        return weight.view(self.num_experts, -1, weight.shape[1])

    def _cut(self, weight: Tensor | QuantizedWeight | CodedWeight) -> list[Weight]:
        """The weight of each expert."""
        if isinstance(weight, Tensor):
            return list(self._stack(weight))
        if isinstance(weight, QuantizedWeight):
            pairs = zip(self._stack(weight.values), weight.scales.view(self.num_experts, -1), strict=True)
            return [QuantizedWeight(values, scales) for values, scales in pairs]
        height = len(weight.codes) // self.num_experts
        return [weight.rows(first, first + height) for first in range(0, len(weight.codes), height)]
