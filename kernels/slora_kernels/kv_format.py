"""The formats of K and V in pages. It imports no numpy, so that configurations can name a format cheaply."""

from enum import StrEnum

__all__ = ["KVFormat"]


class KVFormat(StrEnum):
    """The format of K and V in a page.

    MODEL: numbers of the model's dtype.
    FP8: float8 e4m3 (arXiv 2209.05433), each times a scale in bfloat16. The K of a token and head has one scale, its V
    another: the largest magnitude over 448, rounded up. Nothing is clipped or calibrated, and the stored numbers depend
    on this token alone. If K or V is not finite, both scales are NaN.
    """

    MODEL = "auto"
    FP8 = "fp8"
