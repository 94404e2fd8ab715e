"""Runs any decoder that transformers supports on our pages, with our kernels for attention and LoRA.

The tokens of a step pass through the model as one row with explicit positions. The model's attention modules call
`_attend_paged` instead of their own function. Hooks on its linears add the adapters' outputs, so the module tree stays
as transformers built it. This is slower than our own decoder: every linear needs a shrink of its own, and only norms
and gated MLPs are fused (`fused_modules`). It is exact for every architecture whose tokens interact only in attention.
`slora.models.parity_check` checks this for each model at start.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AttentionInterface, AutoConfig, Mxfp4Config, PreTrainedModel
from transformers.activations import GELUActivation, GELUTanh, SiLUActivation
from transformers.pytorch_utils import Conv1D

from slora.core.errors import ConfigError
from slora.memory.device_memory import DeviceMemory
from slora.models.affine import SiteWeight
from slora.models.collectives import ALONE, Collectives
from slora.models.divided_modules import divide_modules, gather_outputs, sum_outputs, take_turns
from slora.models.early_attention import (
    KEY_BIAS,
    find_first_implementation,
    has_key_bias,
    install_attention,
    is_early_linear,
    join_bias,
    set_attention,
)
from slora.models.fused_modules import FusedMlp, MlpForm, find_mlp_form, fuse_norms
from slora.models.latent_attention import LatentLayer
from slora.models.lora_deltas import LoraDeltas, OwnLogits, hide_absent, widen_logits
from slora.models.mixture_layers import ExpertLayer, MixtureBlock, avoid_grouped_products
from slora.models.model_spec import ModelSpec
from slora.models.model_structure import (
    MXFP4,
    ROWS_ARGUMENT,
    find_auto_class,
    find_head,
    find_stored_quantization,
    has_mxfp4,
    ignore_padding,
    selects_rows,
    without_quantization,
    without_timm,
)
from slora.models.model_traces import CHUNK_FIELD, TokenCounter, install_counter
from slora.models.parity_check import check_parity
from slora.models.recurrent_layers import (
    StatefulCall,
    StatePages,
    bind_forward,
    check_recurrent_layers,
    warm_up_layers,
)
from slora.models.step_batch import StateRows, StepBatch
from slora.models.token_selection import install_selection
from slora.models.weights.checkpoint import Checkpoint
from slora.models.weights.linear import multiply, sum_column_squares, sum_squares
from slora.models.weights.packed_weight import PackedWeight, pack_head, pack_weight
from slora.models.weights.weight_reader import open_widened
from slora_kernels.batch import Activation, AttentionRule, AttentionStep, KVGeometry
from slora_kernels.kv_format import KVFormat
from slora_kernels.layout import LatentShape, LinearShape, LoraSite, ModelShape, NormShape
from slora_kernels.ops import Kernels
from slora_kernels.partition import Partition
from slora_kernels.torch.torch_kernels import apply_activation

_ATTENTION = "slora_paged"
# Masks, and the score of a masked token, that the first releases of GPT-2 and of classes like it stored.
_MASKS = (".attn.bias", ".attn.masked_bias", ".attn.causal_mask")


@dataclass(frozen=True, slots=True)
class _StepInputs:
    """The inputs that all layers of one forward pass share."""

    memory: DeviceMemory
    kernels: Kernels
    attention: AttentionStep
    deltas: LoraDeltas  # LoRA for the tokens of the step.
    adapted_ids: Tensor | None  # The tokens of the step, if an adapter changes the embedding.
    counter: TokenCounter
    # The parts that recurrent layers compute, each with its inputs, which have LoRA for its tokens alone.
    states: "list[tuple[StateRows, _StepInputs]]" = field(default_factory=list)
    # Attention within chunks, by their length.
    within_chunks: dict[int, AttentionStep] = field(default_factory=dict)

    def find_attention(self, chunk: int | None) -> AttentionStep:
        """chunk: the tokens of a chunk, if a token sees only its own."""
        if chunk is None:
            return self.attention
        if chunk not in self.within_chunks:
            batch = self.attention.batch.split(chunk, self.memory.geometry.block_tokens)
            self.within_chunks[chunk] = self.kernels.prepare_attention(batch)
        return self.within_chunks[chunk]


class _CurrentStep:
    """Gives the modules of one model access to the inputs of the current step."""

    def __init__(self) -> None:
        self._step: _StepInputs | None = None

    @property
    def step(self) -> _StepInputs:
        assert self._step is not None, "a module of the model was called outside a step"
        return self._step

    @property
    def is_set(self) -> bool:
        return self._step is not None

    def find_deltas(self) -> tuple[LoraDeltas, Kernels] | None:
        return None if self._step is None else (self._step.deltas, self._step.kernels)

    def find_counter(self) -> TokenCounter | None:
        return None if self._step is None else self._step.counter

    @contextmanager
    def activate(self, step: _StepInputs) -> Iterator[None]:
        before, self._step = self._step, step
        try:
            yield
        finally:
            self._step = before


class _HeadHooks:
    """Hooks on the model's output head. They record the head's input, or replace it.

    combine: makes the logits of the whole vocabulary from those of this rank's tokens. None: they are the same.
    """

    def __init__(self, module: nn.Module, site: LoraSite, combine: Callable[[Tensor], Tensor] | None) -> None:
        self._site, self._combine = site, combine
        self._hidden: Tensor | None = None
        self._replacement: tuple[Tensor, LoraDeltas] | None = None
        # The logits of the replacement that adapters have computed with rows of their own.
        self.own: list[OwnLogits] = []
        self._is_capturing = False
        module.register_forward_pre_hook(self._before_forward)
        module.register_forward_hook(self._after_forward)

    @property
    def hidden(self) -> Tensor:
        """[1, B', H] or [1, T, H]: the input of the head in the last forward pass, see `selects_rows`."""
        assert self._hidden is not None, "no forward pass has reached the output head"
        return self._hidden

    @contextmanager
    def capture_input(self) -> Iterator[None]:
        self._hidden, self._is_capturing = None, True
        try:
            yield
        finally:
            self._is_capturing = False

    @contextmanager
    def replace_input(self, hidden: Tensor, deltas: LoraDeltas) -> Iterator[None]:
        """Within this context, the head projects `hidden` [1, N, H] instead of its own input.

        deltas: the LoRA work at the head for these rows.
        """
        self._replacement = hidden, deltas
        try:
            yield
        finally:
            self._replacement, self.own = None, []

    def _before_forward(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if self._is_capturing:
            self._hidden = inputs[0]
            return (inputs[0][:, :0],)
        return None if self._replacement is None else (self._replacement[0],)

    def _after_forward(self, _: nn.Module, __: tuple[Tensor, ...], logits: Tensor) -> Tensor | None:
        if self._replacement is not None:
            hidden, deltas = self._replacement
            deltas.add(_rows(logits), _rows(hidden), self._site)
        if self._combine is not None:
            logits = self._combine(logits)
        if self._replacement is None:
            return logits
        self.own = deltas.multiply_own_rows(_rows(hidden))
        logits = widen_logits(logits, self.own)
        for part in self.own:
            part.replace(_rows(logits))
        return logits


class _LastHiddenState:
    """A hook on the model without its output head. It records `last_hidden_state`.

    Most models pass this state to the head unchanged, and some models scale it first.

    was_seen: whether a forward pass of the model has produced a `last_hidden_state`.
    """

    def __init__(self, module: nn.Module) -> None:
        self.was_seen = False
        self._hidden: Tensor | None = None
        self._is_capturing = False
        module.register_forward_hook(self._after_forward)

    @contextmanager
    def capture(self, *, is_wanted: bool) -> Iterator[None]:
        self._is_capturing = is_wanted
        try:
            yield
        finally:
            self._is_capturing = False

    def pop_rows(self, rows: Tensor) -> Tensor:
        """Returns the hidden states [N, H] of `rows` in the last forward pass. Called at most once per pass."""
        hidden, self._hidden = self._hidden, None
        assert hidden is not None, "the forward pass had no last_hidden_state"
        return hidden[0, rows]

    def _after_forward(self, _: nn.Module, __: tuple[Tensor, ...], output: Any) -> None:
        hidden = getattr(output, "last_hidden_state", None)
        self.was_seen = self.was_seen or hidden is not None
        if self._is_capturing:
            self._hidden = hidden


class _LayerAttention:
    """One layer's attention over the pages of the current step. The attention module stores it under `ATTRIBUTE`."""

    ATTRIBUTE = "slora_attention"

    def __init__(
        self,
        current: _CurrentStep,
        layer: int,
        latent: LatentLayer | None,
        partition: Partition,
        collectives: Collectives,
        *,
        is_chunked: bool,
    ) -> None:
        self._current = current
        self._layer = layer
        self._latent = latent
        self._num_heads, self._num_kv_heads = partition.shape.num_heads, partition.shape.num_kv_heads
        heads, kv_heads = partition.heads(collectives.rank), partition.kv_heads(collectives.rank)
        self._heads, self._kv_heads = slice(heads.start, heads.stop), slice(kv_heads.start, kv_heads.stop)
        self._gathers, self._collectives = len(heads) < self._num_heads, collectives
        self.is_chunked = is_chunked

    def attend(
        self, qkv: tuple[Tensor, Tensor, Tensor], rule: AttentionRule, chunk: int | None, bias: Tensor | None
    ) -> Tensor:
        """Computes attention of the step's tokens over the pages. chunk: a token sees only its own chunk. bias: see
        `KEY_BIAS`.

        query [1, Hq, T, Dk], key [1, Hk, T, Dk] and value [1, Hk, T, Dv], already rotated -> [1, T, Hq, Dv].

        Pages hold heads of the model's widest keys or values. Zeros beside narrower ones change neither scores nor
        sums. If the pages hold more KV heads than the layer has, each of its heads is stored several times.

        If pages hold latents, the key and the value are those that `LatentLayer.keep` returned.

        All heads are passed. This rank computes some of them, and the pages hold the KV heads that these read.
        """
        step, (query, key, value) = self._current.step, qkv
        memory, kernels = step.memory, step.kernels
        if bias is not None:
            bias = bias[:, step.attention.batch.positions]
            query, key = join_bias(query, key, bias, rule.scale)
        width, changes = memory.geometry.head_dim, []
        query = query[:, self._heads]
        if rule.sinks is not None:
            rule = replace(rule, sinks=rule.sinks[self._heads].contiguous())
        if self._latent is not None:
            changes = self._latent.read_changes(step.deltas)
            absorbed = self._latent.absorb(query[0].transpose(0, 1), changes)
            heads = torch.cat((absorbed, key[0].transpose(0, 1)), dim=1)
        else:
            copies = self._num_kv_heads // key.shape[1]
            own = (side.repeat_interleave(copies, dim=1)[:, self._kv_heads] for side in (key, value))
            padded = [F.pad(part[0], (0, width - part.shape[3])) for part in (query, *own)]
            heads = torch.cat(padded).transpose(0, 1)
        rows = kernels.rotate_and_write_kv(
            heads.flatten(1),
            None,
            memory.pages,
            memory.geometry,
            self._layer,
            step.attention,
        )
        attention = step.find_attention(chunk)
        out = kernels.attend(rows, memory.pages, memory.geometry, self._layer, attention, rule)
        out = out.view(query.shape[2], query.shape[1], width)[..., : value.shape[3]]
        if self._latent is not None:
            out = self._latent.expand_values(out, changes)
        if self._gathers:
            width = self._num_heads * out.shape[2]
            out = gather_outputs(self._collectives, width, out.flatten(1)).view(len(out), self._num_heads, -1)
        return out[None]


class _RecurrentLayer:
    """One recurrent layer. Within a step, its states are in the pages of the step's sequences."""

    def __init__(self, current: _CurrentStep, pages: StatePages, forward: Callable[..., Any]) -> None:
        self._current = current
        self._pages = pages
        self._forward = forward
        self._call = StatefulCall(forward)

    def forward(self, hidden_states: Tensor, *others: Any, **options: Any) -> Any:
        """hidden_states: [1, T, H] -> [1, T, H], or a tuple that begins with it, as the class returns it. The cache and
        the mask in the other arguments are replaced.
        """
        if not self._current.is_set:
            return self._forward(hidden_states, *others, **options)
        out = self._compute(hidden_states[0])[None]
        count = self._call.num_outputs
        return out if count is None else (out, *[None] * (count - 1))

    def _compute(self, hidden: Tensor) -> Tensor:
        step, computed = self._current.step, []
        for part, inputs in step.states:
            # A single part has all rows, in their order.
            own = hidden if len(step.states) == 1 else hidden[part.rows]
            with self._current.activate(inputs):
                computed.append(self._pages.compute(self._call, own, part, step.memory))
        if len(computed) == 1:
            return computed[0]
        out = computed[0].new_empty(len(hidden), computed[0].shape[1])
        for (part, _), rows in zip(step.states, computed, strict=True):
            out[part.rows] = rows
        return out


def _attend_paged(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface. `model_structure` has refused models that pass other arguments."""
    attention: _LayerAttention = getattr(module, _LayerAttention.ATTRIBUTE)
    scaling = options.get("scaling")
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    sinks = options.get("s_aux")
    rule = AttentionRule(
        scale,
        options.get("sliding_window") or None,
        options.get("softcap") or None,
        None if sinks is None else sinks.float(),
    )
    # Read at each call, because the check at start makes it shorter.
    chunk = getattr(module.config, CHUNK_FIELD) if attention.is_chunked else None
    return attention.attend((query, key, value), rule, chunk, options.get(KEY_BIAS)), None


AttentionInterface.register(_ATTENTION, _attend_paged)


class TransformersDecoder:
    """The model in `directory`, in `dtype` on `device`. Raises ConfigError if it can't be loaded.

    collectives: the group of ranks, of which this process holds one's part (`slora.models.divided_modules`).
    """

    def __init__(
        self,
        spec: ModelSpec,
        directory: Path,
        dtype: torch.dtype,
        device: torch.device,
        collectives: Collectives = ALONE,
    ) -> None:
        self.spec = spec
        self._collectives = collectives
        dtype_name = str(dtype).removeprefix("torch.")
        partition = self._partition = spec.partition(dtype_name, collectives.size)
        self._shape = partition.rank_shape
        self.dtype = dtype
        self.device = device
        self._current = _CurrentStep()
        # By the site's group, from the first adapter on that needs them.
        self._squares: dict[int, Tensor] = {}
        for is_own in take_turns(collectives, device):
            if is_own:
                self._model = _load(spec, directory, dtype, device, partition, collectives.rank)
        self._selects_rows = selects_rows(self._model)
        self._latents = dict(self._install_latents())
        mlps: dict[str, MlpForm] = {}
        if device.type == "cpu":
            fuse_norms(self._model, self._current.find_deltas)
            mlps = {path: form for path, form in _find_mlps(self._model) if self._can_fuse(path, form)}
            _fix_order_of_sums(self._model, spec.sizes.latent, list(_list_pairs(self._model, mlps)))
        combine = None
        if collectives.size > 1:
            combine = partial(gather_outputs, collectives, spec.vocab_size)
        self._head = _HeadHooks(find_head(self._model), self._shape.head_site, combine)
        self._body = _LastHiddenState(self._model.get_decoder())
        self._install_attention()
        for path, module in self._find_recurrent_layers():
            layer = _RecurrentLayer(self._current, StatePages(spec, path, dtype), bind_forward(module))
            module.forward = layer.forward
        self._experts = list(self._install_experts())
        self._install_lora_hooks()
        self._fuse_mlps(mlps)

    @property
    def module(self) -> PreTrainedModel:
        """transformers' own module."""
        return self._model

    @property
    def can_embed(self) -> bool:
        """Whether the model has a `last_hidden_state`. This is known only after the first forward pass.

        A model that is not a decoder with a head may have none.
        """
        return self._body.was_seen

    def forward(self, batch: StepBatch, memory: DeviceMemory, kernels: Kernels) -> Tensor:
        """Writes the step's KV into its pages. Returns hidden states [B', H] of the rows in `output_rows`."""
        positions = batch.attention.positions
        step = _StepInputs(
            memory,
            kernels,
            kernels.prepare_attention(batch.attention),
            LoraDeltas(batch.lora, memory, kernels),
            batch.token_ids if batch.adapts_embedding else None,
            TokenCounter(positions - torch.arange(len(positions), device=self.device)),
        )
        for part in batch.states:
            step.states.append((part, replace(step, deltas=LoraDeltas(part.lora, memory, kernels))))
        num_pooled = sum(len(rows.tokens) for rows in batch.pooled)
        with (
            self._current.activate(step),
            self._head.capture_input(),
            self._body.capture(is_wanted=num_pooled > 0),
        ):
            # The embeddings of added tokens are replaced by a hook.
            ids = batch.token_ids
            if batch.adapts_embedding:
                ids = ids.clamp_max(self.spec.vocab_size - 1)
            self._model(
                input_ids=ids[None],
                position_ids=positions[None],
                use_cache=False,
                **({ROWS_ARGUMENT: batch.output_rows} if self._selects_rows else {}),
            )
        hidden = self._head.hidden[0]
        if not self._selects_rows:
            hidden = hidden[batch.output_rows]
        if not num_pooled:
            return hidden
        first = len(hidden) - num_pooled
        return torch.cat((hidden[:first], self._body.pop_rows(batch.output_rows[first:])))

    def logits(self, hidden: Tensor, deltas: LoraDeltas) -> Tensor:
        """See `Model.logits`. The result includes the scales and softcaps that the architecture applies to logits.

        The model's own forward pass applies these scales and softcaps. So the forward pass runs on one token without
        the layers, and a hook replaces the input of the head by `hidden`.
        """
        with self._head.replace_input(hidden[None], deltas), self._without_layers():
            logits: Tensor = self._model(
                input_ids=torch.zeros(1, 1, dtype=torch.int64, device=self.device), use_cache=False
            ).logits
            if logits.shape[2] > self.spec.vocab_size:
                hide_absent(logits[0], self._head.own)
            elif any(part.rows.num_added for part in self._head.own):
                raise RuntimeError(
                    f"{type(self._model).__name__} cuts the logits of an adapter's added tokens"
                )
        return logits[0]

    @torch.inference_mode()
    def reference_logits(self, token_ids: list[int]) -> Tensor:
        """float32 logits [vocab_size] after `token_ids`, with transformers' plain attention and without pages."""
        set_attention(self._model, "eager")
        try:
            logits: Tensor = self._model(
                torch.tensor([token_ids], device=self.device), use_cache=False
            ).logits
        finally:
            set_attention(self._model, _ATTENTION)
        return logits[0, -1].float()

    def find_weight(self, site: LoraSite, kernels: Kernels) -> SiteWeight:
        """The base model's weight at a site."""
        shape = self._shape
        module: Any = self._model.get_submodule(shape.modules[site.first_module].path)
        divided = self._partition.shape.modules[site.first_module].in_width != site.in_width
        if site == shape.embedding_site:
            squares = self._find_squares(site, lambda: sum_column_squares(module.weight))
            return SiteWeight(lambda x: x @ module.weight, squares, None, is_divided=divided)
        if isinstance(module, _PackedLinear):
            squares = self._find_squares(site, lambda: sum_squares(module.unpack()))
            return SiteWeight(module.multiply, squares, module.bias, is_divided=divided)
        weight = module.weight.T if isinstance(module, Conv1D) else module.weight
        squares = self._find_squares(site, lambda: sum_squares(weight))
        return SiteWeight(lambda x: multiply(x, weight), squares, module.bias, is_divided=divided)

    def _find_squares(self, site: LoraSite, compute: Callable[[], Tensor]) -> Tensor:
        if site.group not in self._squares:
            self._squares[site.group] = compute()
        return self._squares[site.group]

    def warm_up(self, kernels: Kernels) -> None:
        warm_up_layers((module for _, module in self._find_recurrent_layers()), self.dtype)

    def check(self, geometry: KVGeometry, kernels: Kernels) -> None:
        """Raises ConfigError if paged attention changes the logits, if a KV block would be in two chunks, if a
        recurrent layer computes a prompt otherwise than single tokens, or if the class has other experts.
        """
        chunk = getattr(self._model.config.get_text_config(), CHUNK_FIELD, 0)
        if self.spec.chunked_layers and chunk % geometry.block_tokens:
            raise ConfigError(
                f"{CHUNK_FIELD} is {chunk}, which is not a multiple of the block size {geometry.block_tokens}; set "
                "another block_tokens"
            )
        if geometry.kv_format is not KVFormat.MODEL and has_key_bias(self._model):
            raise ConfigError(
                f"kv_cache_dtype is fp8, but the keys of this model ({self.spec.family}) hold a linear bias of scores "
                "(ALiBi), which 8 bits can't hold; set kv_cache_dtype to auto"
            )
        check_recurrent_layers(self._model, self.spec)
        for path, block, experts in self._experts:
            experts.check(path, block, kernels)
        for path, latent in self._latents.items():
            latent.check(path)
        check_parity(self, geometry, kernels)

    def _find_recurrent_layers(self) -> Iterator[tuple[str, nn.Module]]:
        for path in dict.fromkeys(state.module for state in self.spec.states):
            yield path, self._model.get_submodule(path)

    @contextmanager
    def _without_layers(self) -> Iterator[None]:
        parent_path, _, name = self.spec.sizes.layers_path.rpartition(".")
        parent = self._model.get_submodule(parent_path)
        layers = getattr(parent, name)
        setattr(parent, name, nn.ModuleList())
        try:
            yield
        finally:
            setattr(parent, name, layers)

    def _install_attention(self) -> None:
        for layer, path in enumerate(self.spec.attention_paths):
            module = self._model.get_submodule(path)
            is_chunked = layer in self.spec.chunked_layers
            latent = self._latents.get(path)
            attention = _LayerAttention(
                self._current, layer, latent, self._partition, self._collectives, is_chunked=is_chunked
            )
            setattr(module, _LayerAttention.ATTRIBUTE, attention)
        for path in self.spec.counting_paths:
            install_counter(self._model.get_submodule(path), self._current.find_counter)

    def _install_latents(self) -> Iterator[tuple[str, LatentLayer]]:
        """Lets attention modules pass on latents, if pages hold them. Yields their layers by path."""
        shape, heads = self._shape, self._partition.heads(self._collectives.rank)
        if shape.latent is None:
            return
        sites = dict(zip((module.path for module in shape.modules[:-2]), shape.sites[:-2], strict=True))
        name = shape.latent.linear.rpartition(".")[2]
        for path in self.spec.attention_paths:
            module, site = self._model.get_submodule(path), sites[f"{path}.{name}"]
            yield path, LatentLayer(module, shape.latent, heads, site, self._current.find_deltas)

    def _install_experts(self) -> Iterator[tuple[str, nn.Module, ExpertLayer]]:
        """Replaces the forward passes of experts and of the modules that hold them. Yields the path of each layer's
        experts, the module that holds them, and the experts.
        """
        shape, find_step = self._shape, self._current.find_deltas
        combines: dict[str, Callable[[Tensor], Tensor] | None] = {}
        sites: dict[str, list[LoraSite]] = {}
        routers: dict[str, tuple[Tensor, LoraSite]] = {}
        for module, site in zip(shape.modules[:-2], shape.sites[:-2], strict=True):
            if module.role == "experts":
                path = module.path.rpartition(".")[0]
                sites.setdefault(path, []).append(site)
                combines[path] = self._find_combine(site)
            elif module.role == "router":
                routers[module.path] = self._model.get_submodule(module.path).get_parameter("weight"), site
        for path, own in sites.items():
            parent = path.rpartition(".")[0]
            inside = {name: router for name, router in routers.items() if name.startswith(f"{parent}.")}
            block, module = self._model.get_submodule(parent), self._model.get_submodule(path)
            block.forward = MixtureBlock(block, inside, find_step).forward
            experts = ExpertLayer(module, own, find_step, combines[path])
            module.forward = experts.forward
            yield path, block, experts

    def _install_lora_hooks(self) -> None:
        """Hooks each linear. The hook adds the adapter's output in place, as peft would add it."""
        shape = self._shape
        for module, site in zip(shape.modules[:-2], shape.sites[:-2], strict=True):
            if module.role == "linear":
                self._model.get_submodule(module.path).register_forward_hook(
                    _linear_hook(self._current, site, self._find_combine(site))
                )
        for norm_id, norm in enumerate(shape.norms):
            self._model.get_submodule(norm.path).register_forward_hook(
                _norm_hook(self._current, norm_id, norm)
            )
        embedding = self._model.get_submodule(shape.embedding_path)
        hooks = _EmbeddingHooks(self._current, shape.embedding_site, self._partition, self._collectives)
        embedding.register_forward_pre_hook(hooks.find_own_tokens)
        embedding.register_forward_hook(hooks.add)

    def _find_combine(self, site: LoraSite) -> Callable[[Tensor], Tensor] | None:
        """What makes the outputs of the model's linear from those of this rank's part. None: nothing has to."""
        module = self._partition.shape.modules[site.first_module]
        if module.division == "columns" and site.in_width < module.in_width:
            return partial(sum_outputs, self._collectives)
        if self._is_gathered(module, sum(site.widths)):
            return partial(gather_outputs, self._collectives, module.out_width)
        return None

    @staticmethod
    def _is_gathered(module: LinearShape, width: int) -> bool:
        return module.division == "gathered" and width < module.out_width

    def _can_fuse(self, path: str, form: MlpForm) -> bool:
        """Whether no outputs within an MLP are gathered, which the fused one would not do."""
        names = {f"{path}.{name}" for name in form.first}
        modules = zip(self._partition.shape.modules, self._shape.modules, strict=True)
        return not any(
            whole.path in names and self._is_gathered(whole, part.out_width) for whole, part in modules
        )

    def _fuse_mlps(self, forms: Mapping[str, MlpForm]) -> None:
        shape = self._shape
        sites = {
            module.path: site
            for module, site in zip(shape.modules, shape.sites, strict=True)
            if module.role == "linear"
        }
        for path, form in forms.items():
            module = self._model.get_submodule(path)
            first: Any = module.get_submodule(form.first[0])
            is_joined = isinstance(first, _PackedLinear) and first.columns is not None
            own = {name: sites[f"{path}.{name}"] for name in form.first if f"{path}.{name}" in sites}
            joined = first.packed if is_joined else None
            fused = FusedMlp(module, form, joined, own, self._current.find_deltas, self.dtype)
            module.forward = fused.forward


_Hook = Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor | None]


def _linear_hook(current: _CurrentStep, site: LoraSite, combine: Callable[[Tensor], Tensor] | None) -> _Hook:
    """combine: see `TransformersDecoder._find_combine`."""

    def add(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        if current.is_set and current.step.deltas.has_layers:
            current.step.deltas.add(_rows(output), _rows(inputs[0].contiguous()), site)
        return None if combine is None else combine(output)

    return add


def _norm_hook(current: _CurrentStep, norm_id: int, norm: NormShape) -> _Hook:
    """Computes the rows of adapters that have a weight of their own again, with the module's own function."""
    is_replacing = False

    def replace(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal is_replacing
        if is_replacing or not current.is_set or not current.step.deltas.norm_runs:
            return
        is_replacing = True
        try:
            for rows, own in current.step.deltas.find_norms(norm_id, norm.width, has_bias=norm.has_bias):
                tensors = dict(
                    zip(("weight", "bias"), own.to(module.get_parameter("weight").dtype), strict=False)
                )
                output[:, rows] = functional_call(module, tensors, (inputs[0][:, rows],))
        finally:
            is_replacing = False

    return replace


class _EmbeddingHooks:
    """Hooks on the embedding. Each rank embeds the tokens that it holds, and the ranks add up what they embedded."""

    def __init__(
        self, current: _CurrentStep, site: LoraSite, partition: Partition, collectives: Collectives
    ) -> None:
        self._current, self._site, self._collectives = current, site, collectives
        self._tokens = partition.tokens(collectives.rank)
        # Bool, of the shape of the ids: the tokens of other ranks, in the present call.
        self._is_elsewhere: Tensor | None = None

    def find_own_tokens(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if self._collectives.size == 1:
            return None
        ids = inputs[0] - self._tokens.start
        self._is_elsewhere = (ids < 0) | (ids >= len(self._tokens))
        return (ids.masked_fill(self._is_elsewhere, 0), *inputs[1:])

    def add(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        step = self._current.step if self._current.is_set else None
        adapted_ids = None if step is None else step.adapted_ids
        # As in peft: if the embedding module scales its output, the adapter's output is also scaled.
        scale = getattr(module, "embed_scale", 1.0)
        if step is not None and adapted_ids is not None:
            step.deltas.add_embedding(_rows(output), inputs[0].view(-1), self._site, scale)
        is_divided = self._is_elsewhere is not None
        if self._is_elsewhere is not None:
            output = sum_outputs(self._collectives, output.masked_fill(self._is_elsewhere[..., None], 0))
            self._is_elsewhere = None
        if step is not None and adapted_ids is not None:
            step.deltas.replace_embeddings(_rows(output), adapted_ids, scale)
        return output if is_divided else None


# Modules whose functions round an element by its place in the tensor, on a CPU.
_ACTIVATIONS: dict[type[nn.Module], Activation] = {
    nn.SiLU: "silu",
    SiLUActivation: "silu",
    nn.GELU: "gelu",
    GELUActivation: "gelu",
    GELUTanh: "gelu_tanh",
}


class _PackedLinear(nn.Linear):
    """A linear of the model whose weight was packed. The module's class is changed to this one in place.

    columns: those of its product, if its weight is packed together with others. None: it has a pack of its own.
    """

    packed: PackedWeight
    dtype: torch.dtype
    columns: slice | None = None

    def forward(self, input: Tensor) -> Tensor:
        if input.dtype != self.dtype:
            raise TypeError(f"a linear in {self.dtype} got an input in {input.dtype}")
        rows = input.reshape(-1, self.in_features)
        if self.columns is None:
            out = self.packed.multiply(rows, self.bias)
        else:
            out = self.multiply(rows)
            out = out if self.bias is None else out + self.bias
        return out.view(*input.shape[:-1], self.out_features)

    def multiply(self, rows: Tensor) -> Tensor:
        """[n, in] -> [n, out], without bias."""
        product = self.packed.multiply(rows)
        return product if self.columns is None else product[:, self.columns].contiguous()

    def unpack(self) -> Tensor:
        """Returns the weight [out, in]."""
        weight = self.packed.unpack(self.in_features)
        return weight if self.columns is None else weight[self.columns].contiguous()

    def __getattr__(self, name: str) -> Any:
        """Unpacks the weight when the model's code reads it, and keeps it from then on. Few classes do that."""
        if name == "weight" and name not in self._parameters:
            self._parameters[name] = nn.Parameter(self.unpack(), requires_grad=False)
        return super().__getattr__(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Linear:
        """Returns a plain linear with the same hooks, because a packed weight can't be cast."""
        linear = nn.Linear(self.in_features, self.out_features, bias=False)
        linear._forward_hooks = self._forward_hooks.copy()
        linear.weight = nn.Parameter(self.unpack(), requires_grad=False)
        linear.bias = copy.deepcopy(self.bias, memo)
        return linear


def _find_mlps(model: PreTrainedModel) -> Iterator[tuple[str, MlpForm]]:
    """The gated MLPs that kernels can compute."""
    for path, module in model.named_modules():
        form = find_mlp_form(module)
        if form is not None:
            yield path, form


def _list_pairs(model: PreTrainedModel, mlps: Mapping[str, MlpForm]) -> Iterator[list[nn.Linear]]:
    """The gate and up of each MLP that has two such linears."""
    for path, form in mlps.items():
        pair = [model.get_submodule(f"{path}.{name}") for name in form.first]
        linears = [linear for linear in pair if type(linear) is nn.Linear]
        if len(linears) > 1:
            yield linears


def _fix_order_of_sums(
    model: PreTrainedModel, latent: LatentShape | None, together: Iterable[Sequence[nn.Linear]]
) -> None:
    """Replaces linears and activations on a CPU by functions in which a row's bits do not depend on the other rows.

    together: linears whose weights are packed together if possible.
    """
    linears: defaultdict[Tensor, list[nn.Linear]] = defaultdict(list)
    for path, module in model.named_modules():
        if latent is not None and path.endswith(f".{latent.linear}"):
            # Steps multiply with its rows.
            module.forward = partial(_multiply, module)
        elif isinstance(module, nn.Linear) and (type(module) is nn.Linear or is_early_linear(module)):
            linears[module.weight].append(module)
        elif type(module) is Conv1D:
            # Its weight is [in, out]. Afterwards, `weight.T` is contiguous.
            assert isinstance(module.weight, nn.Parameter)
            module.weight.data = torch.t(torch.t(module.weight).contiguous())
            module.forward = partial(_multiply_transposed, module)
        elif type(module) in _ACTIVATIONS and getattr(module, "approximate", "none") == "none":
            module.forward = partial(_activate, _ACTIVATIONS[type(module)])
    for group in together:
        weights = [linear.weight for linear in group]
        is_alike = len({linear.bias is None for linear in group}) == 1
        if (
            is_alike
            and all(len(linears.get(weight, ())) == 1 for weight in weights)
            and _pack_together(group)
        ):
            for weight in weights:
                del linears[weight]
    embedding = model.get_input_embeddings().weight
    while linears:
        weight, sharing = linears.popitem()
        is_biased = any(linear.bias is not None for linear in sharing)
        packed = pack_head(weight.data, is_tied=weight is embedding, is_biased=is_biased)
        for linear in sharing:
            _replace_linear(linear, packed)


def _pack_together(linears: Sequence[nn.Linear]) -> bool:
    """Packs the weights of linears with the same input below each other, if this machine supports that."""
    weight = torch.cat([linear.weight.data for linear in linears])
    packed = pack_weight(weight, is_biased=linears[0].bias is not None)
    if not isinstance(packed, PackedWeight):
        return False
    start = 0
    for linear in linears:
        _replace_linear(linear, packed)
        assert isinstance(linear, _PackedLinear)
        linear.columns = slice(start, start + linear.out_features)
        start += linear.out_features
    return True


def _replace_linear(module: nn.Linear, weight: Tensor | PackedWeight) -> None:
    if not isinstance(weight, PackedWeight):
        module.forward = partial(_multiply, module)  # type: ignore[method-assign]
        return
    module.__class__ = _PackedLinear
    assert isinstance(module, _PackedLinear)
    module.packed, module.dtype = weight, module.weight.dtype
    del module.weight


def _multiply(module: nn.Linear, x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return multiply(rows, module.weight, module.bias).view(*x.shape[:-1], len(module.weight))


def _multiply_transposed(module: Conv1D, x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return multiply(rows, module.weight.T, module.bias).view(*x.shape[:-1], module.weight.shape[1])


def _activate(activation: Activation, x: Tensor) -> Tensor:
    return apply_activation(x.float(), activation).to(x.dtype)


def _rows(x: Tensor) -> Tensor:
    """Returns a view [T, width] of `x`, so writing to the result writes to `x`."""
    return x.view(-1, x.shape[-1])


def _load(
    spec: ModelSpec,
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    partition: Partition,
    rank: int,
) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(directory)
    options: dict[str, Any] = {"use_safetensors": True}
    if has_mxfp4(config):
        if dtype == torch.float16:
            raise ConfigError(f"{directory}: float16 can't hold weights of {MXFP4}; set dtype to bfloat16")
        options["quantization_config"] = Mxfp4Config(dequantize=True)
    stored = find_stored_quantization(config, directory / "config.json")
    if stored is not None:
        config = without_quantization(config)
        options = {"config": config, "state_dict": open_widened(Checkpoint(directory), stored.block)}
    try:
        model: PreTrainedModel
        # Only the class itself reads weights that are not in a directory.
        with torch.device("meta"), without_timm():
            kind = (
                find_auto_class(config)
                if stored is None
                else type(find_auto_class(config).from_config(config))
            )
        with without_timm():
            model, loading = kind.from_pretrained(
                directory if stored is None else None,
                **options,
                dtype=dtype,
                attn_implementation=find_first_implementation(config, _ATTENTION),
                output_loading_info=True,
            )
    except Exception as error:
        # The model's code belongs to transformers and may raise any exception.
        raise ConfigError(f"transformers can't load {directory}: {error}") from error
    missing = sorted(loading["missing_keys"])
    if missing:
        raise ConfigError(
            f"{directory} lacks {len(missing)} weights that the model needs, such as {missing[0]}; "
            "transformers would initialise them randomly"
        )
    ignored = sorted(_find_ignored(model, spec.sizes, loading["unexpected_keys"]))
    if ignored:
        raise ConfigError(
            f"{directory} has {len(ignored)} tensors of the decoder that transformers' {type(model).__name__} would "
            f"ignore, such as {ignored[0]}; correct the fields of config.json that describe them, or remove them if "
            "the model was trained without them"
        )
    ignore_padding(model)
    install_attention(model, _ATTENTION, spec.max_positions)
    install_selection(model)
    divide_modules(model, partition, rank)
    avoid_grouped_products(model)
    return model.to(device).eval()


def _find_ignored(model: PreTrainedModel, shape: ModelShape, unread: Iterable[str]) -> Iterator[str]:
    """Yields the names in `unread` that belong to the layers, embedding, head or final norm of the served decoder.

    unread: the tensors of the checkpoint that `model` has no parameters for. They may belong to layers that predict
    further tokens or to the part that reads images, which are not served, or be buffers, which the model computes.
    """
    modules = [f"{shape.layers_path}.{layer}" for layer in range(shape.num_layers)]
    modules += [shape.embedding_path, shape.head_path]
    if shape.final_norm is not None:
        modules.append(shape.final_norm.path)
    served = tuple(f"{module}." for module in modules)
    buffers = {name for name, _ in model.named_buffers()}
    root = f"{model.base_model_prefix}."
    for name in unread:
        # A checkpoint may have one level of names less than the model, or one more.
        spellings = (name, root + name, name.removeprefix(root))
        is_served = any(spelling.startswith(served) for spelling in spellings)
        is_buffer = name.endswith(_MASKS) or not buffers.isdisjoint(spellings)
        if is_served and not is_buffer:
            yield name
