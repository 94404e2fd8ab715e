"""Checks at start that a transformers model computes the same logits with paged attention as with its own attention.

Two random prompts are computed with transformers' plain attention, and then through the pages in two ways. First each
prompt is alone in a step. Then the prompts are cut into chunks that share steps, and the last token of each prompt is a
decode step. If tokens of different sequences mix outside attention (convolutions, recurrent state, a batch index used
as a position), the logits change.

A model may change its arithmetic at each length in its config (windows, chunks, floors). These lengths are often
thousands of tokens, and longer prompts would take minutes on a CPU. So only lengths up to `_MAX_REAL_LENGTH` tokens are
tested as they are. For greater lengths, the check is repeated while the model itself is changed to use `_SHORT_LENGTH`
instead. The check computes at most about 900 tokens for any model. `slora.models.model_structure` compares windows at
their real lengths.

The pages of this check hold K and V in the model's dtype, even if the engine stores K and V in fp8. Rounding to 8 bits
would hide real differences.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Tokens
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from slora.core.engine_config import KVFootprint
from slora.core.errors import ConfigError
from slora.core.request import EngineRequest
from slora.core.sampling_params import SamplingParams
from slora.memory.device_memory import DeviceMemory
from slora.memory.kv_cache import BlockTable
from slora.memory.tenant_account import TenantAccount
from slora.models.lora_deltas import LoraDeltas
from slora.models.model import Model
from slora.models.model_spec import ModelSpec
from slora.models.model_traces import find_lengths, shorten_lengths
from slora.models.step_batch import StepBatch
from slora.models.token_selection import shorten_selection
from slora.scheduler.sequence import Sequence
from slora.scheduler.step_plan import Chunk, StepPlan
from slora_kernels.batch import KVGeometry
from slora_kernels.kv_format import KVFormat
from slora_kernels.ops import Kernels

if TYPE_CHECKING:
    from slora.models.transformers_decoder import TransformersDecoder

# Limits of the root mean square of the difference, relative to the standard deviation of the logits. Over ten
# architectures of two layers, rounding gave at most 2e-6 in float32 and 0.02 in bfloat16. Deeper models accumulate
# more. A prompt that sees one token of the other prompt differs by 0.1 to 1.
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.15}
_PROMPT_LENGTHS = (41, 17)
_MAX_REAL_LENGTH = 128
_SHORT_LENGTH = 11
# The longer prompt exceeds each length that it tests by at least this many tokens.
_MARGIN_TOKENS = 9


def check_parity(model: "TransformersDecoder", geometry: KVGeometry, kernels: Kernels) -> None:
    """Compares the logits. Raises ConfigError if they differ, or if the model fails while it computes them."""
    lengths, spec = find_lengths(model.module.config), model.spec
    # A chunk is a number of whole blocks.
    short = geometry.block_tokens if spec.chunked_layers else _SHORT_LENGTH
    crossed = [length for length in lengths.values() if length <= _MAX_REAL_LENGTH]
    unquantized = replace(geometry, kv_format=KVFormat.MODEL)
    longest = max([_PROMPT_LENGTHS[0], *(length + _MARGIN_TOKENS for length in (short, *crossed))])
    prompts = _make_prompts(spec, longest)
    with shorten_selection(model.module, len(prompts[0])):
        _compare(model, unquantized, kernels, prompts, "")
    far = [name for name, length in lengths.items() if length > _MAX_REAL_LENGTH]
    if far:
        condition = f" once {', '.join(far)} {'is' if len(far) == 1 else 'are'} reduced to {short} tokens"
        with shorten_lengths(model.module, _MAX_REAL_LENGTH, short):
            _compare(model, unquantized, kernels, prompts, condition)


def _make_prompts(spec: ModelSpec, longest: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    most = max(3, spec.max_positions - 1)
    return [
        rng.integers(0, spec.vocab_size, min(length, most)).tolist()
        for length in (longest, *_PROMPT_LENGTHS[1:])
    ]


def _compare(
    model: "TransformersDecoder",
    geometry: KVGeometry,
    kernels: Kernels,
    prompts: list[list[int]],
    condition: str,
) -> None:
    spec = model.spec
    try:
        expected = [model.reference_logits(prompt).double() for prompt in prompts]
        runs = compute_paged_logits(model, spec, geometry, kernels, model.device, prompts)
    except Exception as error:
        # The model's code belongs to transformers and may raise any exception.
        raise ConfigError(
            f"model_type {spec.family!r} can't be served, because computing two short prompts{condition} failed: "
            f"{type(error).__name__}: {error}"
        ) from error
    most = _TOLERANCES[geometry.dtype]
    for how, answers in runs.items():
        for wanted, logits in zip(expected, answers, strict=True):
            spread = (wanted - wanted.mean()).square().mean().sqrt()
            off = float((logits.double() - wanted).square().mean().sqrt() / spread)
            if not off <= most:
                raise ConfigError(
                    f"model_type {spec.family!r} can't be served: with paged attention, {how}{condition}, its logits "
                    f"differ from those of transformers' own attention by {off:.2g} standard deviations; rounding "
                    f"explains at most {most:.2g}"
                )


@torch.inference_mode()
def compute_paged_logits(
    model: Model,
    spec: ModelSpec,
    geometry: KVGeometry,
    kernels: Kernels,
    device: torch.device,
    prompts: Tokens[list[int]],
    long_rows: int = 0,
) -> dict[str, list[Tensor]]:
    """Returns the logits [vocab_size] after each prompt, once computed alone and once in chunks with other prompts.

    long_rows: the row of the rotary table at which the positions of long sequences begin.
    """
    dtype_name = str(geometry.dtype).removeprefix("torch.")
    page_bytes = geometry.num_layers * geometry.layout.num_bytes
    footprint = spec.footprint(geometry.block_tokens, dtype_name, page_bytes)
    num_pages = 2 * sum(footprint.state_pages - (-len(prompt) // geometry.block_tokens) for prompt in prompts)
    sizes = {"num_slots": 1, "max_adapter_pages": 1, "num_state_pages": footprint.state_pages}
    memory = DeviceMemory(
        geometry,
        spec.shape(dtype_name),
        page_bytes,
        num_pages,
        device=device,
        continues_states=spec.continues_states,
        **sizes,
    )
    # All bits set: reading a page before it is written gives NaN.
    memory.pages.fill_(0xFF)
    free = iter(range(num_pages))

    def make_sequence(prompt: list[int]) -> Sequence:
        sequence = _make_sequence(prompt, free, footprint)
        sequence.uses_long_rope = spec.rope_switch is not None and len(prompt) > spec.rope_switch
        return sequence

    def run(chunks: list[Chunk]) -> list[Tensor]:
        batch = StepBatch.build(StepPlan(chunks=chunks), memory, kernels.tile_limits, long_rows)
        hidden = model.forward(batch, memory, kernels)
        return list(model.logits(hidden, LoraDeltas((), memory, kernels))) if len(hidden) else []

    alone = [run(_split_into_chunks(make_sequence(prompt), [len(prompt)]))[0] for prompt in prompts]
    # The batch order changes: the first prompt leads in the first and third step and comes last in the second one.
    pieces = [
        _split_into_chunks(make_sequence(prompt), [len(prompt) // 2, len(prompt) - 1]) for prompt in prompts
    ]
    steps = [
        [each[0] for each in pieces],
        [each[1] for each in reversed(pieces)],
        [each[2] for each in pieces],
    ]
    batched = [run(chunks) for chunks in steps][-1]
    return {"alone": alone, "in chunks beside other prompts": batched}


def _make_sequence(prompt: list[int], free_pages: Iterator[int], footprint: KVFootprint) -> Sequence:
    request = EngineRequest("check", "", prompt, (), SamplingParams(temperature=0.0))
    blocks = BlockTable(footprint.block_tokens, footprint.state_pages)
    sequence = Sequence(request, TenantAccount("check"), 1, frozenset(), 0, blocks)
    sequence.blocks.extend([next(free_pages) for _ in range(sequence.blocks.pages_missing(len(prompt)))])
    return sequence


def _split_into_chunks(sequence: Sequence, ends: list[int]) -> list[Chunk]:
    """Returns chunks that end at each of `ends` and at the end of the sequence."""
    length = len(sequence.token_ids)
    bounds = [0, *ends] if ends[-1] == length else [0, *ends, length]
    return [
        Chunk(sequence, start, end - start, samples=end == length, slots=())
        for start, end in pairwise(bounds)
    ]
