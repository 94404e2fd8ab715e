"""The formats of K and V in pages. This module imports no numpy, so that importing a configuration stays cheap."""

from enum import StrEnum


class KVFormat(StrEnum):
    """The format of K and V in a page.

    MODEL: elements of the model's dtype.
    FP8: float8 e4m3 (arXiv 2209.05433) with bfloat16 scales. A stored element is multiplied by its scale. K of one
    token and head has one scale, and V has another. A scale is the largest magnitude divided by 448, rounded up.
    Nothing is clipped or calibrated. What is stored for a token does not depend on other tokens.

    If K or V of one token and head is not finite, K is written as NaN and V as 0. In FP8, the scale of K is NaN.
    Attention then gives NaN to every query that sees the token, and to no other query. V is not written as NaN, because
    queries that do not see the token multiply V by a weight of 0, and 0 times NaN is NaN.
    """

    MODEL = "auto"
    FP8 = "fp8"
