"""The reference side of a verification: transformers and peft compute the same base model with the same adapter.

Only this module imports peft, which is an optional dependency (slora[verify]).
"""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from peft import PeftModel
from peft.tuners.lora import Embedding, LoraLayer, ParamWrapper
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import logging as transformers_logging

from slora.core.errors import NotComparable
from slora.models.model_structure import find_auto_class, without_timm

_NAME = "default"
_PREFIX = "base_model.model."


class PeftReference:
    """The model in transformers and peft. Raises NotComparable with the error of either library.

    notes: warnings of peft while it loaded the adapter.
    """

    def __init__(self, model: Path, adapter: Path, dtype: torch.dtype, device: torch.device) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self._model = _load(model, adapter, dtype).to(device).eval()
        self.notes = tuple(str(entry.message) for entry in caught if entry.category is UserWarning)
        self._rope_switch = find_rope_switch(self._model.config)
        self._device = device
        self._layers = {
            _find_path(name.removeprefix(_PREFIX), module): module
            for name, module in self._model.named_modules()
            if isinstance(module, LoraLayer) and _NAME in module.scaling
        }

    @property
    def adapted(self) -> frozenset[str]:
        """Paths of the modules that peft adapts, from the base model's root."""
        return frozenset(self._layers)

    @torch.inference_mode()
    def logits(self, prompt: Sequence[int], answer: Sequence[int], *, adapted: bool) -> Tensor:
        """float32 [T, vocab_size] for T tokens of prompt and answer. Row t holds the logits of the token after token t.

        adapted: whether the adapter is applied.

        With longrope, each row of the answer uses the factors that applied when the next token was sampled
        (`compute_forced_logits`).
        """
        if adapted:
            return compute_forced_logits(self._forward, prompt, answer, self._rope_switch)
        with self._model.disable_adapter():
            return compute_forced_logits(self._forward, prompt, answer, self._rope_switch)

    @torch.inference_mode()
    def delta(self, path: str, inputs: Tensor, *, is_transposed: bool) -> Tensor:
        """float32 [T, out]: what peft adds to the output of module `path`. Of E experts, float32 [E * T, out].

        inputs: [T, in]; for an embedding, one-hot rows. is_transposed: see `LoraPair`.
        """
        layer = self._layers[path]
        weight: Tensor = layer.get_delta_weight(_NAME).float().cpu()
        if isinstance(layer, ParamWrapper):
            # As the base model stores it: [E, out, in], [out, in], [E, in, out] or [in, out].
            is_in_out = is_transposed or (
                weight.dim() > inputs.dim() and getattr(layer.get_base_layer(), "is_transposed", False)
            )
            return (inputs.float() @ (weight if is_in_out else weight.mT)).flatten(0, -2)
        # Weights of embeddings and of GPT-2's Conv1D are [in, out].
        is_in_out = isinstance(layer, Embedding) or layer.fan_in_fan_out
        return inputs.float() @ (weight if is_in_out else weight.T)

    def _forward(self, token_ids: Sequence[int]) -> Tensor:
        logits: Tensor = self._model(torch.tensor([list(token_ids)], device=self._device)).logits[0]
        return logits.float().cpu()


def _find_path(name: str, module: LoraLayer) -> str:
    """The path of a module that peft adapts. A module has a wrapper for each of its adapted parameters."""
    if not isinstance(module, ParamWrapper):
        return name
    path = name.replace(".base_layer", "")
    return path if module.parameter_name == "weight" else f"{path}.{module.parameter_name}"


def find_rope_switch(config: PreTrainedConfig) -> int | None:
    """The longest sequence, in tokens, that uses longrope's short factors. None if nothing switches.

    Read from transformers' config, because the reference must not depend on our own parser.
    """
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    by_layer_type = [table for table in rope.values() if isinstance(table, dict)]
    switches = (
        int(table["original_max_position_embeddings"])
        for table in (rope, *by_layer_type)
        if table.get("rope_type") == "longrope"
    )
    return next(switches, None)


def compute_forced_logits(
    forward: Callable[[Sequence[int]], Tensor],
    prompt: Sequence[int],
    answer: Sequence[int],
    rope_switch: int | None,
) -> Tensor:
    """[T, vocab_size] for T tokens of prompt and answer. Row t holds the logits of the token after token t.

    forward: one pass over tokens, which returns [number of tokens, vocab_size].

    Longrope chooses its factors by the current length of the sequence, for all of its tokens. So a token that was
    sampled while the sequence had at most `rope_switch` tokens must be compared with a pass over at most `rope_switch`
    tokens.

    Worked example: with a switch of 48, a prompt of 40 tokens and an answer of 20 tokens, rows 0 to 47 come from a pass
    over 48 tokens, and rows 48 to 59 from a pass over 60 tokens.
    """
    tokens = [*prompt, *answer]
    logits = forward(tokens)
    if rope_switch is None or not len(prompt) <= rope_switch < len(tokens):
        return logits
    return torch.cat((forward(tokens[:rope_switch]), logits[rope_switch:]))


def _load(model: Path, adapter: Path, dtype: torch.dtype) -> PeftModel:
    transformers_logging.disable_progress_bar()
    try:
        # The default implementation of attention ignores Gemma 2's softcap in transformers 5.17.
        with without_timm():
            base = find_auto_class(AutoConfig.from_pretrained(model)).from_pretrained(
                model, dtype=dtype, local_files_only=True, attn_implementation="eager"
            )
        # By default, autocast_adapter_dtype converts 16-bit adapters to float32, which only training needs.
        return PeftModel.from_pretrained(base, adapter, _NAME, autocast_adapter_dtype=False)
    except (ImportError, OSError, RuntimeError, TypeError, ValueError, LookupError) as error:
        raise NotComparable(f"transformers and peft can't load {adapter} on {model}: {error}") from error
