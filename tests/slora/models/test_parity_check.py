"""A model that runs through transformers' classes is checked at start, before it is served. A failed proof names the
reason."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from slora.core.engine_config import EngineConfig
from slora.core.errors import ConfigError
from slora.models.model import Model, load_model
from slora.models.model_spec import ModelSpec, read_model_spec
from slora.models.transformers_decoder import TransformersDecoder
from slora.runner.runner import Runner
from tests.support.cpu_kernels import KERNELS
from tests.support.tiny_models import write_model

Hook = Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]


def start_changed(directory: Path, change: Callable[[PreTrainedModel], object]) -> None:
    """Starts the model after a change of transformers' module."""

    def load(config: EngineConfig, spec: ModelSpec, *rest: Any) -> Model:
        decoder = load_model(config, spec, *rest)
        assert isinstance(decoder, TransformersDecoder)
        change(decoder.module)
        return decoder

    Runner(EngineConfig(directory, kernels=KERNELS, pool_bytes=1 << 22), read_model_spec(directory), load)


def start(directory: Path, make_hook: Callable[[PreTrainedModel], Hook]) -> None:
    """Starts the model with a hook after the first layer's MLP."""
    start_changed(
        directory,
        lambda model: model.get_submodule("model.layers.0.mlp").register_forward_hook(make_hook(model)),
    )


def scale_by_index(index_of: Callable[[int], Tensor]) -> Hook:
    return lambda _, __, output: output * (1 + 0.5 * index_of(output.shape[1])[:, None])


def test_a_model_that_mixes_tokens_outside_attention_is_refused_at_start(tmp_path: Path) -> None:
    """The config does not reveal the fault. Only the model's answers do."""
    write_model(tmp_path, "granite", num_hidden_layers=2)
    with pytest.raises(ConfigError, match="'granite' can't be served: with paged attention"):
        start(tmp_path, lambda _: lambda _, __, output: output + 0.1 * output.roll(1, dims=1))


def test_a_model_that_depends_on_positions_in_the_batch_is_refused(tmp_path: Path) -> None:
    """Born from Llama 4, which computed the second sequence of a batch with the length of the first."""
    write_model(tmp_path, "granite", num_hidden_layers=2)
    with pytest.raises(ConfigError, match="with paged attention, in chunks beside other prompts"):
        start(tmp_path, lambda _: scale_by_index(lambda count: torch.arange(count) // 7))


@pytest.mark.parametrize("window", [100, 400])
def test_the_parity_check_goes_beyond_every_length_in_the_config(tmp_path: Path, window: int) -> None:
    """Born from proofs on 41 tokens, which tested nothing beyond the window.

    The check reaches a window of 100. It cuts a window of 400 to 11 tokens.
    """
    write_model(tmp_path, "starcoder2", num_hidden_layers=2, sliding_window=window)

    def scale_beyond_window(model: PreTrainedModel) -> Hook:
        return scale_by_index(lambda count: torch.arange(count) >= model.config.sliding_window)

    condition = " once sliding_window is reduced to 11 tokens" if window > 128 else ""
    with pytest.raises(ConfigError, match=rf"in chunks beside other prompts{condition}, "):
        start(tmp_path, scale_beyond_window)


def test_a_model_that_fails_during_the_parity_check_is_refused_with_the_reason(tmp_path: Path) -> None:
    """Born from an engine that was restarted for ever."""

    def fail(_: nn.Module, __: tuple[Tensor, ...], ___: Tensor) -> Tensor:
        raise AttributeError("'tuple' object has no attribute 'view'")

    write_model(tmp_path, "granite", num_hidden_layers=2)
    reason = "'granite' can't be served, because computing two short prompts failed: AttributeError: 'tuple' object"
    with pytest.raises(ConfigError, match=reason):
        start(tmp_path, lambda _: fail)


@pytest.mark.parametrize(
    ("model", "field", "value", "reason"),
    [
        ("bamba", "time_step_limit", (0.3, 0.6), "in chunks and then token by token otherwise than in one call"),
        ("lfm2", "conv_kernel_size", 1, "in chunks and then token by token, but that failed: RuntimeError"),
    ],
)  # fmt: skip
def test_a_recurrent_layer_that_computes_prompts_otherwise_than_tokens_is_refused(
    tmp_path: Path, model: str, field: str, value: Any, reason: str
) -> None:
    """Born from Mamba-2, whose class limits the time steps of a prompt only. In bfloat16, the logits hide this."""
    write_model(tmp_path, model)

    def change(found: PreTrainedModel) -> None:
        for module in found.modules():
            if hasattr(module, field):
                setattr(module, field, value)

    where = rf"'{model}' can't be served: \w+ at model\.layers\.0\.\w+"
    with pytest.raises(ConfigError, match=rf"{where} computes a sequence {reason}"):
        start_changed(tmp_path, change)
