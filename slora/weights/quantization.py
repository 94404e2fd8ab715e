"""Quantizes weights to 8-bit numbers with one scale per row.

The quantization is symmetric: the largest magnitude of a row becomes the largest number of the format. int8 has 127
steps of equal size. In float8 e4m3 the steps grow with the number, up to 448. The scale adds 4 bytes per row.
"""

import torch
from torch import Tensor

# For each name in the settings, the dtype of the numbers and its largest value.
FORMS = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}


def quantize_rows(rows: Tensor, form: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantizes float32 [N, K], which is overwritten, to numbers of `form` [N, K] and float32 scales [N].

    A row with NaN or infinity gets a scale that is not finite.
    """
    largest = dict(FORMS.values())[form]
    scales = rows.abs().amax(dim=1).div_(largest)
    # A scale that is 0 or underflows is replaced by 1, because dividing by it could give NaN. Numbers of such rows are
    # so small that they round to 0.
    scales.masked_fill_(scales < torch.finfo(torch.float32).tiny, 1.0)
    rows.div_(scales[:, None]).clamp_(-largest, largest)
    return (rows.round_() if form == torch.int8 else rows).to(form), scales
