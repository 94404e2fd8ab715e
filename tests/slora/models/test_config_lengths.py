import pytest
from torch import nn
from transformers import Gemma3TextConfig, Llama4TextConfig, Qwen2Config

from slora.models.model_traces import find_lengths, shorten_lengths


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
