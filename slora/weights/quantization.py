"""Weights as 8-bit numbers with a scale for each row: how a row is rounded, and to what.

Symmetric, the largest magnitude of a row becoming the largest number: 127 steps of equal size in int8, in float8 e4m3
steps that grow with the number, up to 448. The scale is the only thing that is not 8 bits: 4 bytes a row.
"""

import torch
from torch import Tensor

# By the name that settings give it: the type of the numbers and the largest of them.
FORMS = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}


def quantize_rows(rows: Tensor, form: torch.dtype) -> tuple[Tensor, Tensor]:
    """float32 [N, K], which is overwritten -> (numbers of `form` [N, K], scales float32 [N]).

    A row that is not finite has a scale that is not finite.
    """
    largest = dict(FORMS.values())[form]
    scales = rows.abs().amax(dim=1).div_(largest)
    # A row of zeros: any scale will do. A scale that underflows would divide by zero.
    scales.masked_fill_(scales < torch.finfo(torch.float32).tiny, 1.0)
    rows.div_(scales[:, None]).clamp_(-largest, largest)
    return (rows.round_() if form == torch.int8 else rows).to(form), scales
