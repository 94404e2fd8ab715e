import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma3TextConfig, Llama4TextConfig, Qwen2Config
from transformers.masking_utils import (
    bidirectional_mask_function,
    blockwise_overlay,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
)

from slora.models.model_traces import (
    BatchIndexTrace,
    ConstantTrace,
    MaskRecord,
    describe_mask_difference,
    find_lengths,
    shorten_lengths,
)

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


@pytest.mark.parametrize("block", [-1, 0])
def test_tokens_in_one_block_see_each_other_and_those_in_none_do_not(block: int) -> None:
    constants = ConstantTrace()
    with constants:
        blocks = torch.full((1, 13), block, device="meta")
    function = or_masks(causal_mask_function, blockwise_overlay(blocks))
    difference = describe_mask_difference(function, None, LENGTHS, MAX_POSITIONS, constants=constants)
    assert (difference is None) == (block == -1)


def test_a_mask_changed_by_the_model_is_not_recognised() -> None:
    record = MaskRecord()

    def hide_all(_: Tensor, __: Tensor, query: Tensor, ___: Tensor) -> Tensor:
        return torch.zeros_like(query, dtype=torch.bool)

    made = [
        record.make_mask(q_length=3, kv_length=3, mask_function=f) for f in (causal_mask_function, hide_all)
    ]
    assert [record.find_function(mask) for mask in made] == [causal_mask_function, hide_all]
    assert record.find_function(made[0] | made[1]) is None


NUM_TOKENS = 13


def test_arithmetic_carries_the_index_and_selection_does_not() -> None:
    hidden, positions = torch.ones(NUM_TOKENS, 4), torch.arange(NUM_TOKENS)
    trace = BatchIndexTrace(NUM_TOKENS)
    with trace:
        index = torch.arange(NUM_TOKENS)
        scaled = hidden * torch.log1p(index[:, None].float())
        learned = torch.nn.functional.embedding(index, torch.ones(20, 4))
        routed = hidden[index.flip(0)]
        gathered = hidden.index_select(0, index)
        rotated = hidden * positions[:, None].cos()
        other = torch.arange(NUM_TOKENS + 1)
        written = torch.zeros(NUM_TOKENS, 4)
        written += scaled
    assert all(map(trace.is_traced, (index, scaled, learned, written)))
    assert not any(map(trace.is_traced, (routed, gathered, rotated, other, hidden)))


def test_lengths_are_fields_that_count_tokens() -> None:
    assert find_lengths(Llama4TextConfig()) == {"attention_chunk_size": 8192, "floor_scale": 8192}
    assert find_lengths(Gemma3TextConfig(sliding_window=512)) == {"sliding_window": 512}
    config = Qwen2Config(use_sliding_window=True, sliding_window=1, max_window_layers=2)
    assert find_lengths(config) == {}, "one token, and a count of layers"


def test_long_lengths_are_cut_wherever_the_model_keeps_them_and_put_back() -> None:
    class Layer(nn.Module):
        def __init__(self, config: Qwen2Config) -> None:
            super().__init__()
            self.config = config
            self.window_size = config.sliding_window
            self.hidden_size = 4096
            self.other_window = 40

    config = Qwen2Config(use_sliding_window=True, sliding_window=4096, hidden_size=4096)
    model = nn.Sequential(Layer(config), Layer(config))
    with pytest.raises(RuntimeError, match="inside"), shorten_lengths(model, 128, 11):
        assert [(m.window_size, m.hidden_size, m.other_window) for m in model] == [(11, 4096, 40)] * 2
        assert (config.sliding_window, config.hidden_size) == (11, 4096)
        raise RuntimeError("inside")
    assert [m.window_size for m in model] == [4096] * 2
    assert config.sliding_window == 4096
