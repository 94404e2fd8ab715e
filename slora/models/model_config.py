"""The config of our decoder: what the families differ in. `families` reads it from a checkpoint's config.json.

This module does not import torch: the API and loader processes need the shapes of adapters.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from slora.models.rope_config import LongRopeScaling, Rope
from slora.models.stored_quantization import StoredQuantization
from slora_kernels.layout import LinearShape, ModelShape, NormShape, fuse_groups, llama_shape, mix_experts

Activation = Literal["silu", "gelu", "gelu_tanh"]

_FUSED_PATHS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """The experts that replace the MLP in some layers. Widths are in elements."""

    count: int  # Experts of a layer.
    chosen: int  # Experts that compute each token.
    width: int  # Intermediate width of one expert.
    width_field: str  # The field of config.json that holds it.
    normalizes: bool  # The weights of a token's chosen experts are divided by their sum.
    layers: frozenset[int]  # The layers with experts, at least one.
    shared_width: int | None = (
        None  # Intermediate width of the expert that computes all tokens, if there is one.
    )
    # Names in checkpoints: the block of the experts and their router within a layer, and the linears of an expert.
    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder with causal attention and gated MLPs. Widths are in elements."""

    family: str
    dtype: str  # The checkpoint's own dtype.
    eos_token_ids: tuple[int, ...] = ()
    vocab_size: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int
    activation: Activation
    rms_norm_eps: float
    tie_word_embeddings: bool
    ropes: tuple[Rope, ...]  # The model's different rotary embeddings.
    rope_of_layer: tuple[int, ...]  # For each layer, the index of its rope.
    window_of_layer: tuple[
        int | None, ...
    ]  # Tokens that a token sees, itself included. None: all earlier tokens.
    attention_scale: float
    attention_softcap: float | None = None  # Scaled scores s become softcap * tanh(s / softcap).
    final_softcap: float | None = None  # The same for logits.
    embedding_scale: float | None = None  # Factor on embeddings. The decoder rounds it to the model's dtype.
    qk_norm: bool = False  # RMSNorm of each query and key head before rotation.
    post_norms: bool = (
        False  # Attention's and the MLP's outputs are normalized before they join the residual.
    )
    norm_offset: bool = False  # Norms multiply by 1 + weight.
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    experts: ExpertConfig | None = None  # None: all layers have MLPs.
    # q, k and v are one linear, gate and up another, in the checkpoint and for adapters.
    fused_linears: bool = False
    root: str = "model"  # Prefix of the decoder's modules.
    stored_root: str = "model"  # Prefix of the decoder's tensors in a checkpoint.
    skipped_prefixes: tuple[str, ...] = ()  # Prefixes of the tensors of other parts of the model.
    quantization: StoredQuantization | None = None  # None: the checkpoint stores numbers of `dtype`.

    @property
    def rope_switch(self) -> int | None:
        """The longest sequence, in tokens, that uses longrope's short factors.

        None if no rope has two sets of factors.
        """
        scalings = (rope.scaling for rope in self.ropes)
        return next((s.original_max_positions for s in scalings if isinstance(s, LongRopeScaling)), None)

    def shape(self, element_bytes: int) -> ModelShape:
        """The sizes that decide the layout of pages and adapters."""
        shape = llama_shape(
            self.num_layers,
            self.hidden_size,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.intermediate_size,
            self.vocab_size,
            element_bytes,
        )
        shape = replace(shape, linears=tuple(map(self._mark_bias, shape.linears)))
        if self.fused_linears:
            shape = fuse_groups(shape, *_FUSED_PATHS)
        if self.experts is not None:
            experts = self.experts
            shape = mix_experts(shape, experts.layers, experts.count, experts.width, experts.shared_width)
        return replace(
            shape,
            layers_path=f"{self.root}.layers",
            embedding_path=f"{self.root}.embed_tokens",
            ties_head=self.tie_word_embeddings,
            layer_norms=tuple(self._list_norms()),
            final_norm=NormShape(f"{self.root}.norm", self.hidden_size, adds_one=self.norm_offset),
        )

    def _list_norms(self) -> Iterator[NormShape]:
        places = ["input", "post_attention"]
        if self.post_norms:
            places += ["pre_feedforward", "post_feedforward"]
        for place in places:
            yield NormShape(f"{place}_layernorm", self.hidden_size, adds_one=self.norm_offset)
        for name in ("q_norm", "k_norm") if self.qk_norm else ():
            yield NormShape(f"self_attn.{name}", self.head_dim, adds_one=self.norm_offset)

    def _mark_bias(self, linear: LinearShape) -> LinearShape:
        name = linear.path.rpartition(".")[2]
        is_mlp = linear.path.startswith("mlp.")
        has_bias = self.mlp_bias if is_mlp else self.output_bias if name == "o_proj" else self.qkv_bias
        return replace(linear, has_bias=has_bias)
