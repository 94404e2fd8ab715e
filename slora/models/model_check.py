"""Proof, at start, that a model of transformers' own classes says on our pages what it says by itself.

Two random prompts go through the pages, one in two chunks, the second of them beside the other prompt: whatever lets
tokens meet outside attention (convolutions, recurrent state, masks that we are not told of) shows as another answer.
The pages keep K and V in the model's dtype here, whatever they are served in: rounding to 8 bits would hide much.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Tokens
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from slora.device.page_memory import PageMemory
from slora.device.step_batch import StepBatch
from slora.errors import ConfigError
from slora.models.lora_deltas import LoraDeltas
from slora.models.model import ReferenceModel
from slora.models.model_spec import ModelSpec
from slora.pool.tenant import Tenant
from slora.request import EngineRequest
from slora.sampling_params import SamplingParams
from slora.scheduler.sequence import Sequence
from slora.scheduler.step_plan import Chunk, StepPlan
from slora_kernels.batch import KVGeometry
from slora_kernels.layout import KVFormat
from slora_kernels.ops import Kernels

__all__ = ["check_model"]

# Root mean square of the difference over that of the logits around their mean. Rounding gave at most 2e-6 in float32
# and 0.02 in bfloat16 over ten architectures of two layers; deeper ones add up more. A prompt that sees one token of
# the other one differs by 0.1 to 1.
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.15}
_LENGTHS = (41, 17)
_FIRST_CHUNK = 23


def check_model(
    model: ReferenceModel,
    spec: ModelSpec,
    geometry: KVGeometry,
    kernels: Kernels,
    device: torch.device,
) -> None:
    """Raises ConfigError if the answers differ."""
    prompts = _prompts(spec)
    exact = replace(geometry, kv_format=KVFormat.MODEL)
    ours = _through_pages(model, spec, exact, kernels, device, prompts)
    for prompt, logits in zip(prompts, ours, strict=True):
        expected = model.reference_logits(prompt).double()
        spread = (expected - expected.mean()).square().mean().sqrt()
        error = float((logits.double() - expected).square().mean().sqrt() / spread)
        if not error <= _TOLERANCES[geometry.dtype]:
            raise ConfigError(
                f"model_type {spec.family!r} answers differently through paged attention: {error:.2g} of the logits' "
                f"spread, at most {_TOLERANCES[geometry.dtype]:.2g} is rounding; this architecture can't be served"
            )


def _prompts(spec: ModelSpec) -> list[list[int]]:
    rng = np.random.default_rng(0)
    longest = max(2, spec.max_positions - 1)
    return [rng.integers(0, spec.vocab_size, min(length, longest)).tolist() for length in _LENGTHS]


@torch.inference_mode()
def _through_pages(
    model: ReferenceModel,
    spec: ModelSpec,
    geometry: KVGeometry,
    kernels: Kernels,
    device: torch.device,
    prompts: Tokens[list[int]],
) -> list[Tensor]:
    """The logits [vocab_size] after each prompt, in order."""
    num_pages = [-(-len(prompt) // geometry.block_tokens) for prompt in prompts]
    dtype_name = str(geometry.dtype).removeprefix("torch.")
    page_bytes = geometry.num_layers * geometry.layout.num_bytes
    memory = PageMemory(geometry, spec.shape(dtype_name), page_bytes, sum(num_pages), 1, 1, device)
    # What a page held before must not matter, so it is made to hurt.
    memory.pages.fill_(0xFF)
    free = iter(range(sum(num_pages)))
    sequences = [_sequence(prompt, free, geometry.block_tokens) for prompt in prompts]
    split = min(_FIRST_CHUNK, len(prompts[0]) - 1)
    first = [_chunk(sequences[0], 0, split)]
    second = [_chunk(sequences[0], split, len(prompts[0])), _chunk(sequences[1], 0, len(prompts[1]))]
    for chunks in (first, second):
        batch = StepBatch.build(StepPlan(chunks=chunks), memory, kernels.tile_limits)
        hidden = model.forward(batch, memory, kernels)
    return list(model.logits(hidden, LoraDeltas(None, memory, kernels)))


def _sequence(prompt: list[int], free_pages: Iterator[int], block_tokens: int) -> Sequence:
    request = EngineRequest("check", "", prompt, None, SamplingParams(temperature=0.0))
    sequence = Sequence(request, Tenant("check"), 1, frozenset(), 0, block_tokens)
    sequence.blocks.extend([next(free_pages) for _ in range(sequence.blocks.pages_missing(len(prompt)))])
    return sequence


def _chunk(sequence: Sequence, start: int, end: int) -> Chunk:
    samples = end == len(sequence.token_ids)
    return Chunk(sequence, start, end - start, samples=samples, slot=None, generation=None)
