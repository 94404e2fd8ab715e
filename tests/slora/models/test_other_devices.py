"""No step of transformers' classes mixes tensors of two devices, or waits for numbers from a device.

A GPU is rarely there. The model is therefore loaded on torch's device `meta`, whose tensors have no numbers. Most
operations refuse tensors of the CPU beside them, and nothing can be copied to the host.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slora.core.request import EngineRequest
from slora.core.sampling_params import SamplingParams
from slora.memory.device_memory import DeviceMemory
from slora.models.step_batch import StepBatch
from slora.models.transformers_decoder import TransformersDecoder
from slora.scheduler.step_plan import StepPlan
from slora_kernels.batch import AttentionBatch, AttentionRule, AttentionStep, KVGeometry
from slora_kernels.torch.torch_kernels import TorchKernels
from tests.support.covering import soaked
from tests.support.driving import start_engine
from tests.support.model_kit import make_kit
from tests.support.tiny_models import OTHER_MODELS, RECURRENT_MODELS, few_layers

META = torch.device("meta")
PARAMS = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
# It copies the lengths of its sequences to the host, once in a step, to cut them into chunks.
COPIES = {"llama4_text"}


class MetaKernels(TorchKernels):
    """Kernels whose results have no numbers."""

    def prepare_attention(self, batch: AttentionBatch) -> AttentionStep:
        return AttentionStep(batch, None)

    def rotate_and_write_kv(self, qkv: Tensor, *_: Any) -> Tensor:
        assert qkv.device == META
        return qkv

    def attend(
        self,
        q: Tensor,
        pages: Tensor,
        geometry: KVGeometry,
        layer: int,
        step: AttentionStep,
        rule: AttentionRule,
    ) -> Tensor:
        assert q.device == pages.device == META
        return q.new_empty(len(step.batch.positions), geometry.num_heads * geometry.head_dim)

    def grouped_linear(self, x: Tensor, weight: Tensor, scales: Tensor | None, starts: Tensor) -> Tensor:
        assert x.device == weight.device == starts.device == META
        return x.new_empty(len(x), weight.shape[1])


def move(value: Any) -> Any:
    """The same with all tensors on the device `meta`."""
    if isinstance(value, Tensor):
        return value.to(META)
    if isinstance(value, tuple):
        return tuple(map(move, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: move(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **parts)
    return value


@pytest.mark.parametrize(
    "model",
    soaked(
        [name for name in (*OTHER_MODELS, *RECURRENT_MODELS) if name not in COPIES],
        *("lfm2", "qwen3_5_text", "bamba", "jamba", "deepseek_v32", "gpt_oss"),
    ),
)
def test_a_step_stays_on_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    kit = make_kit(tmp_path, model, {}, **few_layers(model, soak=False))
    engine, _ = start_engine(kit, 200, kernels="torch")
    decoder = TransformersDecoder(kit.spec, kit.directory, torch.float32, META)
    memory, batches = engine.runner.memory, list[StepBatch]()
    launch = engine.runner.launch

    def note(plan: StepPlan) -> Any:
        if plan.chunks:
            batches.append(StepBatch.build(plan, memory, engine.runner.kernels.tile_limits))
        return launch(plan)

    monkeypatch.setattr(engine.runner, "launch", note)
    # Prompts alone, decode rows alone, and both.
    for lengths in ((6, 7, 8), (), (17,), ()):
        for length in lengths:
            engine.add(EngineRequest(str(length), "t", list(range(3, 3 + length)), (), PARAMS))
        engine.step()
    there: DeviceMemory = object.__new__(DeviceMemory)
    vars(there).update(vars(memory), pages=memory.pages.to(META), device=META)
    assert len(batches) == 4
    for batch in batches:
        hidden = decoder.forward(move(batch), there, MetaKernels())
        assert hidden.device == META and hidden.shape == (len(batch.output_rows), kit.spec.sizes.hidden_size)
