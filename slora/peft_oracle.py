"""transformers + peft as the judge of what we serve: the same base, the same adapter directory, their arithmetic.

The only module that imports peft, which is optional; the command that needs it loads it by name.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from peft import PeftModel
from peft.tuners.lora import Embedding, LoraLayer
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from slora.errors import NotComparable

__all__ = ["PeftOracle"]

_NAME = "default"
_PREFIX = "base_model.model."


class PeftOracle:
    """`notes`: what peft warned of when it loaded the adapter. Raises NotComparable with what either said."""

    def __init__(self, model: Path, adapter: Path, dtype: torch.dtype, device: torch.device) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self._model = _load(model, adapter, dtype).to(device).eval()
        self.notes = tuple(str(entry.message) for entry in caught if entry.category is UserWarning)
        self._device = device
        self._layers = {
            name.removeprefix(_PREFIX): module
            for name, module in self._model.named_modules()
            if isinstance(module, LoraLayer) and _NAME in module.scaling
        }

    @property
    def adapted(self) -> frozenset[str]:
        """Paths of the modules that peft adapts, from the base model's root."""
        return frozenset(self._layers)

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int], *, adapted: bool) -> Tensor:
        """float32 [T, vocab_size]: row t says what comes after token t, with the adapter or without."""
        inputs = torch.tensor([list(token_ids)], device=self._device)
        if adapted:
            found: Tensor = self._model(inputs).logits[0]
        else:
            with self._model.disable_adapter():
                found = self._model(inputs).logits[0]
        return found.float().cpu()

    @torch.inference_mode()
    def delta(self, path: str, inputs: Tensor) -> Tensor:
        """float32 [T, out]: what peft adds to the output of module `path` for `inputs` [T, in], one-hot for tokens."""
        layer = self._layers[path]
        weight: Tensor = layer.get_delta_weight(_NAME).float().cpu()
        # Of embeddings, and of GPT-2's Conv1D, weights are [in, out].
        is_in_out = isinstance(layer, Embedding) or layer.fan_in_fan_out
        return inputs.float() @ (weight if is_in_out else weight.T)


def _load(model: Path, adapter: Path, dtype: torch.dtype) -> PeftModel:
    transformers_logging.disable_progress_bar()
    try:
        base = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, local_files_only=True)
        # autocast_adapter_dtype would hold 16-bit adapters in float32, which is for training.
        return PeftModel.from_pretrained(base, adapter, _NAME, autocast_adapter_dtype=False)
    except (OSError, RuntimeError, TypeError, ValueError, LookupError) as error:
        raise NotComparable(f"transformers and peft can't load {adapter} on {model}: {error}") from error
