import pytest
import torch
from torch import Tensor
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from slora.models.model_traces import MaskRecord, describe_mask_difference

LENGTHS, MAX_POSITIONS = (100, 4096), 131072


@pytest.mark.parametrize("window", [1, 2, 21, 100, 4095, 4096, 4097, 100_000])
def test_a_window_is_distinguished_from_every_other_window_at_any_length(window: int) -> None:
    function = sliding_window_causal_mask_function(window)
    assert describe_mask_difference(function, window, LENGTHS, MAX_POSITIONS) is None
    for other in (window - 1, window + 1, 2 * window, None):
        if other != 0:
            difference = describe_mask_difference(function, other, LENGTHS, MAX_POSITIONS)
            assert difference is not None and "its attention call has" in difference, other


def test_a_window_that_no_sequence_outgrows_is_none() -> None:
    function = sliding_window_causal_mask_function(64)
    assert describe_mask_difference(function, None, (64,), 64) is None


def test_a_causal_mask_is_one() -> None:
    assert describe_mask_difference(causal_mask_function, None, LENGTHS, MAX_POSITIONS) is None
    told = describe_mask_difference(causal_mask_function, 21, LENGTHS, MAX_POSITIONS)
    assert told is not None and "has a window of 21 tokens" in told


def test_an_unsupported_mask_is_described_by_the_first_differing_tokens() -> None:
    chunked = chunked_causal_mask_function(8192, torch.zeros(1, dtype=torch.int64))
    difference = describe_mask_difference(chunked, None, (8192,), MAX_POSITIONS)
    assert difference is not None and "hides token 0 from token 8192" in difference
    difference = describe_mask_difference(bidirectional_mask_function, None, LENGTHS, MAX_POSITIONS)
    assert difference is not None and "shows token 1 to token 0" in difference


def test_a_mask_changed_by_the_model_is_not_recognised() -> None:
    record = MaskRecord()

    def hide_all(_: Tensor, __: Tensor, query: Tensor, ___: Tensor) -> Tensor:
        return torch.zeros_like(query, dtype=torch.bool)

    made = [
        record.make_mask(q_length=3, kv_length=3, mask_function=f) for f in (causal_mask_function, hide_all)
    ]
    assert [record.find_function(mask) for mask in made] == [causal_mask_function, hide_all]
    assert record.find_function(made[0] | made[1]) is None
