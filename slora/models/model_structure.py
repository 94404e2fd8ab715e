"""Finds the structure of a transformers model by running it once on tensors without data.

    python -P -m slora.models.model_structure DIR      prints a ModelSpec as JSON

There is no table of architectures. The model is built on torch's meta device, which needs no memory and no weights. The
model runs with an attention function that records how each layer calls the function. Hooks record which linears project
all tokens of the step. A second run records the states of recurrent layers, and a third one the masks that transformers
would build. A model that paged attention or LoRA would compute wrongly is refused here, with the reason. A process that
has not imported torch runs this module in a subprocess.
"""

import argparse
import copy
import inspect
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from slora.core.errors import ConfigError
from slora.models.config_fields import ConfigFields, read_eos_token_ids
from slora.models.config_fields import read_config as read_json_config
from slora.models.early_attention import (
    KEY_BIAS,
    NUM_BIAS_COLUMNS,
    find_first_implementation,
    install_attention,
    is_early,
    is_early_linear,
)
from slora.models.fused_modules import find_mlp_division
from slora.models.latent_attention import LatentTrace
from slora.models.mixture_layers import MixtureTrace
from slora.models.model_spec import REFUSED_EXIT_CODE, ModelSpec, StateTensor
from slora.models.model_traces import (
    CHUNK_FIELD,
    BatchIndexTrace,
    ConstantTrace,
    MaskRecord,
    ReadTrace,
    TokenCounter,
    WithoutHits,
    describe_mask_difference,
    find_lengths,
    install_counter,
)
from slora.models.recurrent_layers import (
    LayerStates,
    StatefulCall,
    describe_states,
    find_stateful_modules,
)
from slora.models.stored_quantization import StoredQuantization, read_quantization
from slora.models.token_selection import OWN_MASK, AllTokens, find_selection, install_selection
from slora.models.weights.checkpoint import find_stored_dtype
from slora_kernels.layout import LatentShape, LinearDivision, LinearShape, ModelShape, NormShape

# The methods that store 8 bits with scales, which are widened.
_METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors")
# Four bits with a power of two for each 32 numbers, which bfloat16 and float32 hold exactly.
MXFP4 = "mxfp4"
_ATTENTION = "slora_probe"
_MASKED_ATTENTION = "slora_mask_probe"
# A number of tokens that is unlikely to equal any size of a model.
_TOKENS = 13
_MOST_ERROR_CHARS = 300
# For a model without attention, a head has this width, and nothing limits its positions but this.
_STAND_IN_WIDTH, _MOST_POSITIONS = 64, 1 << 20
_TIMM_CLASS = "TimmWrapperModel"
# The argument with the tokens that a model passes to its output head.
ROWS_ARGUMENT = "logits_to_keep"
# What transformers' classes call the attention of a decoder's layer to the output of an encoder.
_CROSS_ATTENTION = ("encoder_attn", "crossattention", "EncDecAttention", "encoder_decoder_attention")
# Fields that models use as divisors without checking them.
_COUNTS = (
    "num_hidden_layers",
    "hidden_size",
    "vocab_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_key_value_heads",
)
# Rotary embeddings whose angles depend on the position alone. `dynamic` and `longrope` depend on the longest sequence
# of the batch, so one request would change the answers of others.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional")
_ROPE_REMEDY = (
    f"with transformers' classes, this server supports {', '.join(_ROPE_TYPES)}, whose angles do not depend on the "
    "longest sequence of a batch"
)
_LAYER_TYPES = (
    "full_attention", "sliding_attention", "chunked_attention",
    "conv", "linear_attention", "hybrid",  # Recurrent layers, see `recurrent_layers`.
    "mlp", "moe",  # Layers that compute each token by itself.
    "indexed_attention", "minimax_m3_sparse",  # See `token_selection`.
)  # fmt: skip
# Mamba-2 raises shorter time steps to the lower one of its limits. One this small changes no bit of a state.
_NO_TIME_STEP = 1e-30
# Arguments of attention functions, other than query, key and value, that paged attention obeys or that change nothing.
_ARGUMENTS = (
    "scaling", "sliding_window", "softcap", "s_aux",
    "position_ids", "use_cache", "dropout", "output_attentions", "cu_seq_lens_q", "cu_seq_lens_k",
    "logits_to_keep", KEY_BIAS,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _AttentionCall:
    """The attention module of one layer, and the sizes with which the model calls it."""

    module: str
    num_heads: int
    num_kv_heads: int
    head_dim: int  # The greater one of the widths of keys and values.
    window: int | None
    latent: LatentShape | None = None  # The path of its linear is the full one.

    @staticmethod
    def stand_in(hidden_size: int) -> "_AttentionCall":
        """A call that a model without attention never makes. Its pages hold states and adapters, and nothing else.

        With this window, the prefix cache finds a state by the block before it.
        """
        num_heads = max(1, hidden_size // _STAND_IN_WIDTH)
        return _AttentionCall("", num_heads, num_heads, _STAND_IN_WIDTH, window=2)


class _ForwardTrace:
    """Records the first forward pass: the attention calls in order, and the input shapes of each linear."""

    def __init__(self) -> None:
        self.calls: list[_AttentionCall] = []
        self.linear_calls: dict[str, list[tuple[int, ...]]] = {}
        # For each call of a norm, whether it normalized the tokens of the step one by one.
        self.norm_calls: dict[str, list[bool]] = {}
        self.indices = BatchIndexTrace(_TOKENS)
        self.counting: list[str] = []  # The attention modules that compute with indexes in the batch.
        self.is_complete = False  # Set after the pass. Later passes are not recorded.
        self._names: dict[int, str] = {}
        self._latents: LatentTrace | None = None

    def hook_latents(self, model: PreTrainedModel) -> None:
        self._latents = LatentTrace(model)

    def hook_linears(self, model: PreTrainedModel) -> None:
        """Installs a hook on each linear. Attention needs no hook, because transformers' attention registry calls
        `attend`.
        """
        for name, module in model.named_modules():
            self._names[id(module)] = name
            if isinstance(module, nn.Linear | Conv1D):
                module.register_forward_hook(
                    lambda _, inputs, output, name=name: self.record_linear(name, inputs[0], output)
                )

    def hook_norms(self, model: PreTrainedModel) -> None:
        """Installs a hook on each module whose parameters are vectors: a weight, or a weight and a bias."""
        for name, module in model.named_modules():
            parameters = dict(module.named_parameters())
            vectors = {parameter.shape for parameter in parameters.values() if parameter.dim() == 1}
            is_norm = "weight" in parameters and parameters.keys() <= {"weight", "bias"} and len(vectors) == 1
            if is_norm and not any(module.buffers()) and len(module.weight.shape) == 1:
                module.register_forward_hook(partial(self.record_norm, name))

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | AllTokens | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        name = self._names.get(id(module), type(module).__name__)
        _refuse_attention(name, module, query, key, value, attention_mask, options)
        if any(map(self.indices.is_traced, (query, key, value))):
            self.counting.append(name)
        _, num_heads, num_tokens, key_width = query.shape
        key_width += NUM_BIAS_COLUMNS if options.get(KEY_BIAS) is not None else 0
        width, window = max(key_width, value.shape[3]), options.get("sliding_window") or None
        if not self.is_complete:
            latent = None
            # A bias of keys, a cap or a sink would be computed with the whole keys, or change the sum of the weights.
            if self._latents is not None and not any(
                options.get(option) is not None for option in (KEY_BIAS, "softcap", "s_aux")
            ):
                latent = self._latents.describe(module, name, query, key, value)
            self.calls.append(_AttentionCall(name, num_heads, key.shape[1], width, window, latent))
        return query.new_empty(1, num_tokens, num_heads, value.shape[3]), None

    def find_counting(self, model: PreTrainedModel, mixtures: MixtureTrace) -> tuple[str, ...]:
        """Runs the model, and returns the attention modules that need a `TokenCounter`.

        Raises ConfigError if an attention module computes with indexes in the batch even if it has one.
        """
        with mixtures.record():
            _run(model)
        if not self.counting:
            return ()
        counter = TokenCounter(self.indices.offsets)
        found = tuple(dict.fromkeys(self.counting))
        hooks = [install_counter(model.get_submodule(name), lambda: counter) for name in found]
        self.calls, self.linear_calls, self.norm_calls, self.counting = [], {}, {}, []
        _run(model)
        for hook in hooks:
            hook.remove()
        if self.counting:
            raise ConfigError(
                f"{self.counting[0]}: paged attention can't serve it, because its queries, keys or values depend "
                "on the index of a token in the batch instead of its position in the sequence"
            )
        return found

    def record_norm(self, name: str, module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        if not self.is_complete:
            self.norm_calls.setdefault(name, []).append(_acts_on_rows(module, inputs, output))

    def record_linear(self, name: str, x: Tensor, output: object) -> None:
        """Records a linear's input shape.

        The shape is recorded as () for a subclass that returns something other than the product, as PhiMoE's router
        does.
        """
        if self.is_complete:
            return
        is_product = isinstance(output, Tensor) and output.shape[:-1] == x.shape[:-1]
        self.linear_calls.setdefault(name, []).append(tuple(x.shape[:-1]) if is_product else ())

    def can_adapt(self, name: str) -> bool:
        """Whether LoRA on this linear is one product over all tokens of the step.

        An expert in a mixture of experts sees only some of the tokens.
        """
        return self.linear_calls.get(name) in ([(1, _TOKENS)], [(_TOKENS,)], [(1, 1, _TOKENS)])


def read_transformers_spec(directory: Path) -> ModelSpec:
    """Runs the model in `directory` on the meta device, and returns what engine, API and loader need to know.

    Raises ConfigError with the reason if the model can't be served.
    """
    config = _read_config(directory)
    title = f"{directory}: model_type {config.model_type!r}"
    # The dtype is read before the model is built, because building it in another dtype changes its config.
    # A model that also reads images may name it only for its text part.
    dtype = config.dtype or config.get_text_config().dtype or find_stored_dtype(directory)
    if dtype is None:
        # There are no weights, as for `slora plan`. Published checkpoints with MXFP4 are otherwise in bfloat16.
        dtype = torch.bfloat16 if has_mxfp4(config) else torch.float32
    trace = _ForwardTrace()
    AttentionInterface.register(_ATTENTION, trace.attend)
    text = config.get_text_config()
    model = _build(config, title)
    head = find_head(model)
    if is_early(config):
        install_attention(model, _ATTENTION, _count_positions(text, directory))
    selection = find_selection(model)
    install_selection(model)
    _refuse_cross_attention(model, title)
    _refuse_ropes(model, title)
    trace.hook_linears(model)
    trace.hook_norms(model)
    trace.hook_latents(model)
    mixtures = MixtureTrace(model, _TOKENS)
    with _refusing(f"{title} can't be run with paged attention"), trace.indices:
        counting = trace.find_counting(model, mixtures)
    trace.is_complete, calls = True, trace.calls
    states = _find_states(model, calls, title)
    layers_path = _layers_path(model, calls, states, title)
    num_layers = len(model.get_submodule(layers_path))
    latent = _find_latent(calls, layers_path, trace)
    linears, groups_of_layer = _linears(model, layers_path, trace, mixtures, latent)
    norms = tuple(_layer_norms(model, layers_path, states, trace))
    final_norm = _final_norm(model, layers_path, trace)
    if not linears:
        raise ConfigError(f"{title} has no linear in its layers that an adapter could change")
    max_positions = _count_positions(text, directory, default=None if calls else _MOST_POSITIONS)
    if selection is not None:
        max_positions = min(max_positions, selection.num_tokens)
    has_masks = bool(calls) and not is_early(config)
    chunked_layers = _find_chunked_layers(model, calls, max_positions, title) if has_masks else ()
    calls = calls or [_AttentionCall.stand_in(_size(text, "hidden_size", directory))]
    return ModelSpec(
        family=str(config.model_type),
        max_positions=max_positions,
        window_of_layer=tuple(call.window for call in calls),
        rope_switch=None,
        dtype=str(dtype).removeprefix("torch."),
        eos_token_ids=read_eos_token_ids(read_json_config(directory), directory),
        sizes=ModelShape(
            num_layers=num_layers,
            num_heads=calls[0].num_heads,
            # A layer with fewer KV heads stores each of them several times, and one with narrower heads adds zeros.
            num_kv_heads=max(call.num_kv_heads for call in calls) if latent is None else 1,
            head_dim=(
                max(call.head_dim for call in calls) if latent is None else latent.width + latent.rope_width
            ),
            hidden_size=_size(text, "hidden_size", directory),
            vocab_size=_size(text, "vocab_size", directory),
            element_bytes=4,
            linears=linears,
            groups=tuple((linear,) for linear in range(len(linears))),
            groups_of_layer=groups_of_layer,
            num_layers_without_kv=num_layers - len(calls),
            layers_path=layers_path,
            embedding_path=_path_of(model, model.get_input_embeddings()),
            head_path=_path_of(model, head),
            ties_head=bool(getattr(config, "tie_word_embeddings", False)),
            head_has_bias=head.bias is not None,
            layer_norms=norms,
            final_norm=final_norm,
            latent=latent,
            has_indexers=selection is not None,
        ),
        attention_paths=tuple(call.module for call in calls if call.module),
        chunked_layers=tuple(chunked_layers),
        counting_paths=counting,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        states=states,
        selection=selection,
    )


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Turns any error of transformers' code into ConfigError, on one line after `what`."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        if isinstance(error, KeyError) and error.args == (_ATTENTION,):
            raise ConfigError(
                f"{what}: its class has attention functions of its own, so it can't call another one"
            ) from error
        reason = " ".join(str(error).split())[:_MOST_ERROR_CHARS] or type(error).__name__
        raise ConfigError(f"{what}: {reason}") from error


def _read_config(directory: Path) -> PreTrainedConfig:
    """Reads config.json. Raises ConfigError if transformers can't read it, or if this server does not support it."""
    path = directory / "config.json"
    if not path.is_file():
        raise ConfigError(f"no model at {directory}: there is no {path.name}")
    # Config classes validate themselves and raise many types of errors, which name the field.
    with _refusing(f"{path}: transformers can't read it"):
        config = AutoConfig.from_pretrained(directory)
        _refuse_fields(config, config.get_text_config(), path)
    return config


def _refuse_fields(config: PreTrainedConfig, text: PreTrainedConfig, path: Path) -> None:
    """Raises ConfigError for a field that this server does not support.

    text: the part of the config that describes the decoder.
    """
    # A config whose layers differ has one for each layer.
    for layer in text.per_layer_config if getattr(text, "is_heterogeneous", False) else (text,):
        for name in _COUNTS:
            if getattr(layer, name, None) is not None:
                _size(layer, name, path.parent)
        _refuse_uneven_heads(layer, path)
    for name, table in _rope_tables(text):
        kind = str(table["rope_type"])
        if kind not in _ROPE_TYPES and not (kind == "dynamic" and table.get("alpha")):
            raise ConfigError(f"{path}: rope_type of {name} is {kind!r}; {_ROPE_REMEDY}")
    odd = sorted({kind for kind in getattr(text, "layer_types", None) or () if kind not in _LAYER_TYPES})
    if odd:
        raise ConfigError(
            f"{path}: layer_types has {odd[0]!r}; this server supports {', '.join(_LAYER_TYPES)}"
        )
    find_stored_quantization(config, path)


def find_auto_class(config: PreTrainedConfig) -> Any:
    """Returns the class of transformers that builds the model. A model that also reads images may have no class for
    text alone. Its text part is served.
    """
    kind = type(config)
    has_text_class = kind in MODEL_FOR_CAUSAL_LM_MAPPING or kind not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForCausalLM if has_text_class else AutoModelForImageTextToText


def find_stored_quantization(config: PreTrainedConfig, path: Path) -> StoredQuantization | None:
    """Returns how the checkpoint stores its weights in 8 bits, None if they are not quantized or have MXFP4.

    path: of config.json. Raises ConfigError for other quantizations.
    """
    fields = next((part.quantization_config for part in _find_quantized(config)), None)
    if fields is None or fields.get("quant_method") == MXFP4:
        return None
    stored = None
    if fields.get("quant_method") in _METHODS:
        stored = read_quantization(ConfigFields({"quantization_config": dict(fields)}, path))
    if stored is None or stored.codes is not None:
        raise ConfigError(
            f"{path}: quantization_config has quant_method {fields.get('quant_method')!r}; transformers' classes are "
            f"served only without quantization, with {MXFP4}, or with 8 bits of {', '.join(_METHODS)}"
        )
    return stored


def has_mxfp4(config: PreTrainedConfig) -> bool:
    return any(part.quantization_config.get("quant_method") == MXFP4 for part in _find_quantized(config))


def without_quantization(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns a copy of the config from which transformers concludes that the weights are not quantized."""
    config = copy.deepcopy(config)
    for part in list(_find_quantized(config)):
        del part.quantization_config
    return config


def _find_quantized(config: PreTrainedConfig) -> Iterator[Any]:
    """Yields the parts of a config with `quantization_config`. In a model that also reads images, transformers obeys
    the field of the whole model or of its text part.
    """
    for part in {id(part): part for part in (config, config.get_text_config(decoder=True))}.values():
        if getattr(part, "quantization_config", None):
            yield part


class _NoImages(PreTrainedModel):  # type: ignore[misc]
    """Takes the place of a part that reads images with timm. It has no weights, and is never called."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.post_init()


@contextmanager
def without_timm() -> Iterator[None]:
    """Within this context, transformers builds models without the parts that read images with timm. Text does not reach
    these parts, and slora does not need timm.
    """
    added = MODEL_MAPPING._extra_content
    before = dict(added)
    kinds = (CONFIG_MAPPING[name] for name, kind in MODEL_MAPPING_NAMES.items() if kind == _TIMM_CLASS)
    added.update(dict.fromkeys(kinds, _NoImages))
    try:
        yield
    finally:
        added.clear()
        added.update(before)


def _build(config: PreTrainedConfig, title: str) -> PreTrainedModel:
    # Built in bfloat16, because mixtures of experts do not run in float32 on the meta device. Shapes are the same in
    # any dtype.
    what = f"{title} can't be built with paged attention by transformers {transformers.__version__}"
    with _refusing(what), torch.device("meta"), without_timm():
        model = find_auto_class(config).from_config(
            config, attn_implementation=find_first_implementation(config, _ATTENTION), dtype=torch.bfloat16
        )
    ignore_padding(model)
    return model.eval()


def find_head(model: PreTrainedModel) -> Any:
    """Returns the output head. A model that also reads images may have it in its text part. Raises ConfigError if there
    is none.
    """
    parts = (model, getattr(model, "language_model", None))
    heads = (part.get_output_embeddings() for part in parts if isinstance(part, PreTrainedModel))
    head = next((head for head in heads if head is not None), None)
    if head is None:
        raise ConfigError(f"{type(model).__name__} of transformers has no output head")
    return head


def selects_rows(model: PreTrainedModel) -> bool:
    """Whether the model's class can pass only some tokens to the output head. The others pass all of them."""
    return ROWS_ARGUMENT in inspect.signature(model.forward).parameters


@torch.inference_mode()
def _run(model: PreTrainedModel) -> None:
    tokens = torch.zeros(1, _TOKENS, dtype=torch.int64, device="meta")
    positions = torch.zeros_like(tokens)
    rows = torch.zeros(2, dtype=torch.int64, device="meta")
    with WithoutHits():  # type: ignore[no-untyped-call]
        options = {ROWS_ARGUMENT: rows} if selects_rows(model) else {}
        logits = model(input_ids=tokens, position_ids=positions, use_cache=False, **options).logits
    if logits.shape[1] != (len(rows) if options else _TOKENS):
        raise ConfigError(
            f"{type(model).__name__} computes the logits of {logits.shape[1]} of {_TOKENS} tokens"
        )


def _find_chunked_layers(
    model: PreTrainedModel, calls: list[_AttentionCall], max_positions: int, title: str
) -> Iterator[int]:
    """Yields the layers in which a token sees only its own chunk.

    Raises ConfigError for another layer whose mask differs from the mask that its attention call describes.
    """
    record = MaskRecord()
    AttentionInterface.register(_MASKED_ATTENTION, record.attend)
    AttentionMaskInterface.register(_MASKED_ATTENTION, record.make_mask)
    model.set_attn_implementation(_MASKED_ATTENTION)
    what = f"{title} can't be run to read its attention masks"
    constants = ConstantTrace()
    with _refusing(what), torch.inference_mode(), WithoutHits(), constants:  # type: ignore[no-untyped-call]
        tokens = torch.zeros(1, _TOKENS, dtype=torch.int64, device="meta")
        # Without an explicit mask, transformers reads the positions to look for packed sequences. Without positions,
        # models that also hear sound compute them from the mask. The mask has data, because some models look for
        # padding in it.
        padding = torch.ones(1, _TOKENS, dtype=torch.int64)
        # With the rows as a tensor, as in a step, no model leaves tokens out before its last layers.
        rows = torch.zeros(2, dtype=torch.int64, device="meta")
        options = {ROWS_ARGUMENT: rows} if selects_rows(model) else {}
        positions = torch.zeros_like(tokens)
        model(input_ids=tokens, attention_mask=padding, position_ids=positions, use_cache=False, **options)
    lengths, chunk = find_lengths(model.config), getattr(model.config.get_text_config(), CHUNK_FIELD, None)
    # Chunks that no sequence outgrows are chunks, too: the check at start makes them shorter.
    reach = max(max_positions, 2 * (chunk or 0))
    for layer, (call, mask) in enumerate(zip(calls, record.given, strict=True)):
        refusal = f"{call.module}: paged attention can't serve it, because"
        if mask is OWN_MASK:
            continue
        if mask is None:
            raise ConfigError(f"{refusal} it is given no mask by the model")
        function = record.find_function(mask)
        if function is None:
            raise ConfigError(f"{refusal} it is given a mask that the model changed")
        with _refusing(f"{refusal} its mask can't be read"):
            given = (function, call.window, lengths.values(), reach)
            compare = partial(describe_mask_difference, *given, constants=constants)
            difference = compare()
            is_chunked = difference is not None and chunk is not None and compare(chunk=chunk) is None
        if is_chunked:
            yield layer
        elif difference is not None:
            raise ConfigError(f"{refusal} {difference}")


def _refuse_attention(
    name: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | AllTokens | None,
    others: dict[str, Any],
) -> None:
    """Raises ConfigError for an attention call that is not plain causal attention over the sequence's own tokens."""
    extra = sorted(
        name
        for name, value in others.items()
        if value is not None
        and value is not False
        and not isinstance(value, AllTokens)
        and name not in _ARGUMENTS
    )
    problems = (
        (not getattr(module, "is_causal", True), "it is not causal"),
        (
            attention_mask is not None and not isinstance(attention_mask, AllTokens),
            "it needs its own mask",
        ),
        (query.shape[:1] != (1,) or query.shape[2] != _TOKENS, f"its queries have shape {list(query.shape)}"),
        (key.shape[2] != _TOKENS, f"it has {key.shape[2]} keys for {_TOKENS} tokens"),
        (
            key.shape[3] != query.shape[3],
            f"its keys have {key.shape[3]} elements and its queries {query.shape[3]}",
        ),
        (value.shape[:3] != key.shape[:3], f"its values have shape {list(value.shape)}"),
        (_has_odd_sinks(query, others.get("s_aux")), "its sinks are not one number for each head"),
        (
            others.get(KEY_BIAS) is not None and key.shape[1] != query.shape[1],
            "its heads share KV heads, but add different numbers to the scores of a key",
        ),
        (query.shape[1] % key.shape[1] != 0, f"{query.shape[1]} heads share {key.shape[1]} KV heads"),
        (bool(extra), f"it uses {', '.join(extra)}"),
    )
    for is_so, what in problems:
        if is_so:
            raise ConfigError(f"{name}: paged attention can't serve it, because {what}")


def _has_odd_sinks(query: Tensor, sinks: Tensor | None) -> bool:
    return sinks is not None and sinks.shape != (query.shape[1],)


def _refuse_time_steps(config: PreTrainedConfig, name: str, module: nn.Module, title: str) -> None:
    """Raises ConfigError for a Mamba-2 layer that limits its time steps. transformers then limits those of a prompt,
    but not those of the tokens after it, so a token's state would depend on the step in which it is computed.
    """
    limit = getattr(module, "time_step_limit", None)
    if not isinstance(limit, tuple | list) or len(limit) != 2:
        return
    least, most = limit
    if least <= _NO_TIME_STEP and most == math.inf:
        return
    own = getattr(config.get_text_config(), "time_step_limit", None)
    is_own = own is not None and tuple(own) == tuple(limit)
    remedy = "remove time_step_limit from" if is_own else f"set time_step_min to {_NO_TIME_STEP:g} in"
    raise ConfigError(
        f"{title}: {name} has time_step_limit {tuple(limit)}, which transformers' class obeys in a prompt and ignores "
        f"in the tokens after it; only (0, inf) is computed exactly. If the model was trained without this limit, "
        f"{remedy} config.json"
    )


def _find_states(model: PreTrainedModel, calls: list[_AttentionCall], title: str) -> tuple[StateTensor, ...]:
    """Runs the model with a cache in each of its recurrent layers, and returns the states that they leave there."""
    attending = [call.module for call in calls]
    found: dict[str, tuple[StateTensor, ...]] = {}

    def record(name: str, forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
        states, given = LayerStates(), inspect.signature(forward).bind(*args, **options)
        given.arguments["cache"] = states
        out = forward(*given.args, **given.kwargs)
        if states.tensors:
            if name in found:
                raise ConfigError(f"{title} runs {name} several times, so it would need several states")
            first = tuple(describe_states(name, states))
            hidden = args[0] if args else options["hidden_states"]
            width = (out[0] if isinstance(out, tuple) else out).shape[-1]
            call, reads = StatefulCall(forward), ReadTrace(states.tensors.values())
            for num_tokens in (_TOKENS, 1):
                with reads if num_tokens > 1 else nullcontext():
                    again = call.compute(hidden[:, :num_tokens], states)
                if again.shape != (1, num_tokens, width) or tuple(describe_states(name, states)) != first:
                    raise ConfigError(f"{name}: its states change their shapes or their dtype")
            found[name] = tuple(
                replace(state, is_continued=is_read)
                for state, is_read in zip(first, reads.are_read, strict=True)
            )
        return out

    stateful = [
        (name, module)
        for name, module in find_stateful_modules(model)
        if not any(f"{other}.".startswith(f"{name}.") for other in attending)
    ]
    if not stateful:
        return ()
    for name, module in stateful:
        _refuse_time_steps(model.config, name, module, title)
        module.forward = partial(record, name, module.forward)
    why = "" if calls else " never calls an attention function, and"
    with _refusing(f"{title}{why} can't be run with the states of its recurrent layers in pages"):
        _run(model)
    for _, module in stateful:
        del module.forward
    return tuple(state for states in found.values() for state in states)


def _layers_path(
    model: PreTrainedModel, calls: list[_AttentionCall], states: tuple[StateTensor, ...], title: str
) -> str:
    """Returns the path of the module list whose members each made attention calls, in order, or have a state."""
    if not calls and not states:
        raise ConfigError(f"{title} never calls an attention function")
    most = max((call.num_kv_heads for call in calls), default=1)
    for call in calls:
        if call.num_heads != calls[0].num_heads or most % call.num_kv_heads or call.num_heads % most:
            shapes = sorted({(call.num_heads, call.num_kv_heads) for call in calls})
            raise ConfigError(
                f"{title} has layers of different (heads, KV heads): {shapes}; pages need the same number of heads, "
                "and a number of KV heads that is a multiple of those of all layers"
            )
    attending = [call.module for call in calls]
    if len(set(attending)) < len(attending):
        twice = next(name for name in attending if attending.count(name) > 1)
        raise ConfigError(f"{title} calls attention several times in {twice}, which pages have no place for")
    stateful = list(dict.fromkeys(state.module for state in states))
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList):
            continue
        names = [f"{path}.{layer}." for layer in range(len(module))]
        with_attention, with_states = (
            [at for path in paths for at, name in enumerate(names) if path.startswith(name)]
            for paths in (attending, stateful)
        )
        is_complete = len(with_attention) == len(attending) and len(with_states) == len(stateful)
        in_order = with_attention == sorted(with_attention) and with_states == sorted(set(with_states))
        if is_complete and in_order and (states or len(set(with_attention)) == len(module)):
            return str(path)
    raise ConfigError(
        f"{title} makes {len(calls)} attention calls, but none in some layers; layers without attention, or with "
        "another kind of state, can't be served"
    )


def _find_latent(calls: list[_AttentionCall], layers_path: str, trace: _ForwardTrace) -> LatentShape | None:
    """Returns the latents of all layers with attention. None if a layer has none, or if they differ."""
    found = set()
    for call in calls:
        if call.latent is None or not trace.can_adapt(call.latent.linear):
            return None
        path = call.latent.linear.removeprefix(f"{layers_path}.").partition(".")[2]
        found.add(replace(call.latent, linear=path))
    return found.pop() if len(found) == 1 else None


def _linears(
    model: PreTrainedModel,
    layers_path: str,
    trace: _ForwardTrace,
    mixtures: MixtureTrace,
    latent: LatentShape | None,
) -> tuple[tuple[LinearShape, ...], tuple[tuple[int, ...], ...]]:
    """Returns the linears that LoRA can adapt, in the order of the layers' modules, and those of each layer.

    Routers and experts come last, see `mix_experts`. The second result is empty if all layers have the same linears.
    """
    layers: Any = model.get_submodule(layers_path)
    weights = Counter(id(weight) for part in model.modules() for weight in part.parameters(recurse=False))
    shared = {weight for weight, count in weights.items() if count > 1}
    plain = [
        list(_layer_linears(block, partial(_can_adapt, trace, f"{layers_path}.{layer}"), latent, shared))
        for layer, block in enumerate(layers)
    ]
    known = [{linear.path for linear in own} for own in plain]
    mixed = [
        [linear for linear in mixtures.list_linears(f"{layers_path}.{layer}") if linear.path not in paths]
        for layer, paths in enumerate(known)
    ]
    found = {linear: index for index, linear in enumerate(dict.fromkeys(chain(*plain, *mixed)))}
    of_layer = [tuple(sorted(found[linear] for linear in own)) for own in map(chain, plain, mixed)]
    is_even = len(set(of_layer)) == 1
    return tuple(found), () if is_even else tuple(of_layer)


def _can_adapt(trace: _ForwardTrace, layer: str, path: str) -> bool:
    return trace.can_adapt(f"{layer}.{path}")


def _layer_linears(
    block: nn.Module, can_adapt: Callable[[str], bool], latent: LatentShape | None, shared: Container[int]
) -> Iterator[LinearShape]:
    """Yields the linears of a layer that LoRA can adapt, with how ranks divide them.

    shared: the ids of the parameters that several modules have.
    """
    linears = {
        path: module
        for path, module in block.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and can_adapt(path)
    }
    divisions: dict[str, LinearDivision] = {}
    for path, module in linears.items():
        is_plain = type(module) in (nn.Linear, Conv1D) or is_early_linear(module)
        is_plain = is_plain and id(module.weight) not in shared
        # Each rank needs all of the linear that expands latents, to compare its heads with the class at start.
        is_whole = not is_plain or (latent is not None and path == latent.linear)
        divisions[path] = "whole" if is_whole else "gathered"
    for path, module in block.named_modules():
        own = {f"{path}.{name}": division for name, division in find_mlp_division(module).items()}
        if all(divisions.get(name) == "gathered" for name in own):
            divisions |= own
    for path, module in linears.items():
        yield _describe_linear(path, module, divisions[path])


def _describe_linear(path: str, module: nn.Linear | Conv1D, division: LinearDivision) -> LinearShape:
    sizes = (
        (module.nx, module.nf) if isinstance(module, Conv1D) else (module.in_features, module.out_features)
    )
    return LinearShape(
        path,
        *sizes,
        has_bias=module.bias is not None,
        is_transposed=isinstance(module, Conv1D),
        division=division,
    )


def _acts_on_rows(module: nn.Module, inputs: tuple[object, ...], output: object) -> bool:
    """Whether a call of a norm has one input [1, T, ..., width] and an output of the same shape."""
    (x,) = inputs if len(inputs) == 1 else (None,)
    if not isinstance(x, Tensor) or not isinstance(output, Tensor):
        return False
    width = len(module.get_parameter("weight"))
    return x.shape == output.shape and x.shape[:2] == (1, _TOKENS) and x.shape[-1] == width


def _layer_norms(
    model: PreTrainedModel, layers_path: str, states: tuple[StateTensor, ...], trace: _ForwardTrace
) -> Iterator[NormShape]:
    """Yields the norms that every layer calls once, for all tokens, outside its recurrence."""
    layers: Any = model.get_submodule(layers_path)
    for path, module in layers[0].named_modules():
        names = [f"{layers_path}.{layer}.{path}" for layer in range(len(layers))]
        if any(name.startswith(f"{state.module}.") for name in names for state in states):
            continue
        if all(trace.norm_calls.get(name) == [True] for name in names):
            shape = _norm_shape(path, module)
            if all(_norm_shape(path, model.get_submodule(name)) == shape for name in names):
                yield shape


def _final_norm(model: PreTrainedModel, layers_path: str, trace: _ForwardTrace) -> NormShape | None:
    """The only norm after the layers, beside them in the module tree."""
    parent, _, layers = layers_path.rpartition(".")
    siblings = [name for name, _ in model.get_submodule(parent).named_children()]
    found = [
        f"{parent}.{name}"
        for name in siblings[siblings.index(layers) + 1 :]
        if trace.norm_calls.get(f"{parent}.{name}") == [True]
    ]
    return _norm_shape(found[0], model.get_submodule(found[0])) if len(found) == 1 else None


def _norm_shape(path: str, module: nn.Module) -> NormShape:
    bias = getattr(module, "bias", None)
    return NormShape(path, len(module.get_parameter("weight")), has_bias=isinstance(bias, nn.Parameter))


def ignore_padding(model: PreTrainedModel) -> None:
    """Tells the model that its input never contains padding.

    Otherwise some models copy the token ids to the host in each step to look for padding.
    """
    # Write to vars(), because some config classes refuse to set the attribute to None.
    vars(model.config)["pad_token_id"] = None


def _path_of(model: PreTrainedModel, wanted: nn.Module) -> str:
    return next(str(name) for name, module in model.named_modules() if module is wanted)


def _rope_tables(config: PreTrainedConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """The descriptions of rotary embedding: one for the model, or one per layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    tables = {"rope_parameters": parameters} if "rope_type" in parameters else parameters
    for name, table in tables.items():
        if isinstance(table, dict) and "rope_type" in table:
            yield name, table


def _refuse_cross_attention(model: PreTrainedModel, title: str) -> None:
    """Raises ConfigError for a decoder whose layers attend to the output of an encoder."""
    # The parts that read images may have such layers.
    for name, _ in model.get_decoder().named_modules():
        if name.rpartition(".")[2] in _CROSS_ATTENTION:
            raise ConfigError(
                f"{title}: {name} attends to the output of an encoder, and this server computes decoders only"
            )


def _refuse_ropes(model: PreTrainedModel, title: str) -> None:
    """Raises ConfigError for a rotary module that changes its angles. Hunyuan's module does not, if its `dynamic` rope
    has a factor `alpha`.
    """
    for name, module in model.named_modules():
        kinds = getattr(module, "rope_type", ())
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds] if isinstance(kinds, str) else ():
            if "dynamic" in kind or kind == "longrope":
                raise ConfigError(f"{title}: {name} has rope_type {kind!r}; {_ROPE_REMEDY}")


def _refuse_uneven_heads(config: PreTrainedConfig, path: Path) -> None:
    num_heads, num_kv_heads = (
        getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")
    )
    if num_heads is not None and num_kv_heads is not None and num_heads % num_kv_heads:
        raise ConfigError(
            f"{path}: num_key_value_heads is {num_kv_heads}; num_attention_heads {num_heads} must be a multiple of it"
        )


def _count_positions(config: PreTrainedConfig, directory: Path, default: int | None = None) -> int:
    """default: for a config without such a field."""
    # The last two names are those of MPT and Bloom.
    names = ("max_position_embeddings", "max_seq_len", "seq_length")
    found = next((name for name in names if getattr(config, name, None) is not None), None)
    return default if found is None and default is not None else _size(config, found or names[0], directory)


def _size(config: PreTrainedConfig, name: str, directory: Path) -> int:
    value = getattr(config, name, None)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"{directory / 'config.json'}: {name} is {value!r}; give a positive number")
    return value


def main() -> int:
    """Prints the spec. If the model is refused, prints the reason and returns the exit code `REFUSED_EXIT_CODE`."""
    parser = argparse.ArgumentParser(description="Describes a model that transformers' classes compute.")
    parser.add_argument("directory", type=Path)
    options = parser.parse_args()
    logging.set_verbosity_error()
    try:
        spec = read_transformers_spec(options.directory)
    except ConfigError as error:
        print(error)
        return REFUSED_EXIT_CODE
    print(json.dumps(asdict(spec)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
