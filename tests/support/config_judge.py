"""Compares a model with a given config.json with transformers, in float32 on random weights."""

import json
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from slora.core.engine_config import EngineConfig
from slora.core.errors import ConfigError
from slora.models.collectives import ALONE, Collectives
from slora.models.model import Model, load_model
from slora.models.model_spec import ModelSpec, read_model_spec
from slora.models.model_structure import find_auto_class, without_timm
from slora.models.parity_check import compute_paged_logits
from slora_kernels.batch import KVGeometry
from slora_kernels.kernel_selector import select_kernels
from tests.support.thread_group import ThreadCollectives, compute_on_ranks
from tests.support.tiny_models import fill_randomly

_CPU = torch.device("cpu")
_TOLERANCE = 1e-3
# The parity check at start uses prompts of other lengths than these.
_LENGTHS = (53, 29, 7)
_LONGEST_TABLE = 8192


class Verdict(Enum):
    """UNJUDGED: transformers itself can't build or run a config that slora accepts. WRONG: the logits differ from
    those of transformers."""

    EQUAL = "equal"
    REFUSED = "refused"
    UNJUDGED = "unjudged"
    WRONG = "wrong"


def judge_config(
    directory: Path, raw: dict[str, Any], model_impl: str, num_ranks: int = 1
) -> tuple[Verdict, str]:
    """The verdict on a config.json with the fields `raw`, and the reason of a refusal or the errors."""
    path = directory / "config.json"
    path.write_text(json.dumps(raw), encoding="utf-8")
    try:
        spec = read_model_spec(directory, model_impl)
    except ConfigError as error:
        return Verdict.REFUSED, str(error)
    rng = torch.Generator().manual_seed(0)
    lengths = [max(3, min(length, spec.max_positions - 1)) for length in _LENGTHS]
    prompts = [torch.randint(0, spec.vocab_size, (length,), generator=rng).tolist() for length in lengths]
    try:
        oracle = _make_oracle(directory, str(raw["model_type"]))
        expected = [last_logits(oracle, prompt) for prompt in prompts]
        oracle.save_pretrained(directory)
    except Exception as error:
        return Verdict.UNJUDGED, f"{type(error).__name__}: {error}"
    path.write_text(json.dumps(raw), encoding="utf-8")
    try:
        answers = serve_logits(directory, spec, prompts, num_ranks=num_ranks)
    except ConfigError as error:
        return Verdict.REFUSED, str(error)
    errors = [
        float(
            (ours.double() - theirs).square().mean().sqrt() / (theirs - theirs.mean()).square().mean().sqrt()
        )
        for runs in answers
        for ours, theirs in zip(runs, expected, strict=True)
    ]
    is_equal = all(error < _TOLERANCE for error in errors)
    return (Verdict.EQUAL if is_equal else Verdict.WRONG), f"errors {errors}"


def _make_oracle(directory: Path, model_type: str) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(directory)
    with without_timm():
        model: PreTrainedModel = find_auto_class(config).from_config(
            config, attn_implementation="eager", dtype=torch.float32
        )
    fill_randomly(model, model_type)
    return model.eval()


@torch.inference_mode()
def last_logits(oracle: PreTrainedModel, prompt: list[int]) -> Tensor:
    logits: Tensor = oracle(torch.tensor([prompt]), use_cache=False).logits
    return logits[0, -1].double()


def serve_logits(
    directory: Path,
    spec: ModelSpec,
    prompts: Sequence[list[int]],
    quantization: str = "auto",
    num_ranks: int = 1,
) -> list[list[Tensor]]:
    """The last logits of each prompt, for each way to compute them. Raises ConfigError as the engine does at start."""
    num_rows = min(spec.max_positions, _LONGEST_TABLE)
    kernels = select_kernels("torch", _CPU)
    config = EngineConfig(directory, quantization=quantization)
    shape = spec.partition("float32", num_ranks).rank_shape

    def serve(collectives: Collectives | ThreadCollectives) -> list[list[Tensor]]:
        model: Model = load_model(config, spec, torch.float32, _CPU, num_rows, collectives)  # type: ignore[arg-type]
        geometry = KVGeometry.of(shape, 16, torch.float32)
        model.check(geometry, kernels)
        runs = compute_paged_logits(model, spec, geometry, kernels, _CPU, prompts, num_rows)
        return list(runs.values())

    return serve(ALONE) if num_ranks == 1 else compute_on_ranks(num_ranks, serve)
