"""The weights of our decoder's layers, and their names in checkpoints.

Linears that read the same input are fused: q, k and v, and gate and up. Each rank of a partition reads its own part.

Checkpoints for transformers 4 have a tensor for each linear of each expert, and transformers 5 writes the same by
default. It can also write the parameters of its own modules: a stack of all experts' matrices, in which the rows of
gate precede those of up.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slora.models.model_config import ExpertConfig, ModelConfig
from slora.models.rotary import cos_sin_tables
from slora.models.weights.linear import ExpertLinear, Linear, QuantizedWeight
from slora.models.weights.packed_weight import PackedWeight
from slora.models.weights.weight_reader import LinearPart, WeightReader
from slora_kernels.batch import AttentionRule, QueryKeyNorm
from slora_kernels.layout import LoraSite
from slora_kernels.partition import Partition


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """A gated MLP that computes all tokens."""

    gate_up: Linear
    down: Linear

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.gate_up, self.down

    def packed(self, dtype: torch.dtype) -> "DenseMlp":
        return DenseMlp(self.gate_up.packed(dtype), self.down.packed(dtype))


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An expert that computes all tokens."""

    mlp: DenseMlp
    gate: Linear  # Its single output scales the expert's output for the token.

    def packed(self, dtype: torch.dtype) -> "SharedExpert":
        return SharedExpert(self.mlp.packed(dtype), self.gate.packed(dtype))


@dataclass(frozen=True, slots=True)
class SparseMlp:
    """Experts of which each token uses a few."""

    router: Linear  # Its outputs are the logits of the experts.
    gate_up: ExpertLinear
    down: ExpertLinear
    shared: SharedExpert | None

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The linears that compute all tokens."""
        shared = () if self.shared is None else (*self.shared.mlp.linears, self.shared.gate)
        return *shared, self.router

    def packed(self, dtype: torch.dtype) -> "SparseMlp":
        return replace(
            self,
            router=self.router.packed(dtype),
            gate_up=self.gate_up.packed(dtype),
            down=self.down.packed(dtype),
            shared=None if self.shared is None else self.shared.packed(dtype),
        )


Mlp = DenseMlp | SparseMlp


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one layer."""

    attention_rule: AttentionRule
    cos_sin: Tensor  # The rotary table of this layer.
    query_key_norm: QueryKeyNorm | None
    attention_norm: Tensor
    attention_post_norm: Tensor | None  # Applied before the output is added to the residual.
    mlp_norm: Tensor
    mlp_post_norm: Tensor | None  # Applied before the output is added to the residual.
    qkv: Linear
    output: Linear
    mlp: Mlp

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The linears that compute all tokens."""
        return self.qkv, self.output, *self.mlp.linears

    @property
    def is_in_tiles(self) -> bool:
        """Whether all products are those of weights in tiles."""
        weights = (linear.weight for linear in self.linears)
        in_tiles = (isinstance(weight, PackedWeight) and weight.tiles is not None for weight in weights)
        return isinstance(self.mlp, DenseMlp) and all(in_tiles)

    def packed(self, dtype: torch.dtype) -> "DecoderLayer":
        return replace(
            self, qkv=self.qkv.packed(dtype), output=self.output.packed(dtype), mlp=self.mlp.packed(dtype)
        )


class LayerLoader:
    """Finds the tensors of one rank's part by their Hugging Face names."""

    def __init__(
        self,
        config: ModelConfig,
        reader: WeightReader,
        max_model_len: int,
        partition: Partition,
        rank: int,
    ) -> None:
        self._config = config
        self._reader = reader
        self._partition = partition
        self._rank = rank
        self._cos_sin = cos_sin_tables(config, max_model_len, reader.device)

    def norm(self, name: str, width: int) -> Tensor:
        """The weight of a norm. With norm_offset it is float32, because 1 + a small number needs more than 16 bits."""
        weight = self._reader.vector(f"{name}.weight", width)
        return 1.0 + weight.float() if self._config.norm_offset else weight

    def embedding(self, name: str) -> Tensor:
        """The rank's rows of an embedding, padded to the same number on all ranks."""
        return self._reader.matrix(name, *self._vocabulary)

    def head(self, name: str) -> Tensor | QuantizedWeight:
        """The same of an output head that is not the embedding's weight."""
        return self._reader.head(name, *self._vocabulary)

    @property
    def _vocabulary(self) -> tuple[int, int, range, int]:
        """Rows and columns of the whole matrix, the rows of this rank, and their number with padding."""
        held = self._partition.rank_shape.vocab_size
        return self._config.vocab_size, self._config.hidden_size, self._partition.tokens(self._rank), held

    def layer(self, index: int) -> DecoderLayer:
        config, prefix = self._config, f"{self._config.stored_root}.layers.{index}"
        window = config.window_of_layer[index]
        qkv, output, *mlp_sites = self._partition.rank_shape.layer_sites(index)
        is_sparse = config.experts is not None and index in config.experts.layers

        def norm(place: str) -> Tensor:
            return self.norm(f"{prefix}.{place}_layernorm", config.hidden_size)

        return DecoderLayer(
            attention_rule=AttentionRule(config.attention_scale, window, config.attention_softcap),
            cos_sin=self._cos_sin[config.rope_of_layer[index]],
            query_key_norm=self._query_key_norm(f"{prefix}.self_attn") if config.qk_norm else None,
            attention_norm=norm("input"),
            attention_post_norm=norm("post_attention") if config.post_norms else None,
            # Without post norms, the norm before the MLP is stored as post_attention_layernorm.
            mlp_norm=norm("pre_feedforward" if config.post_norms else "post_attention"),
            mlp_post_norm=norm("post_feedforward") if config.post_norms else None,
            qkv=self._linear(qkv, biased=config.qkv_bias),
            output=self._linear(output, biased=config.output_bias),
            mlp=self._experts(prefix, mlp_sites) if is_sparse else self._mlp(mlp_sites),
        )

    def _mlp(self, sites: Sequence[LoraSite]) -> DenseMlp:
        gate_up, down = (self._linear(site, biased=self._config.mlp_bias) for site in sites)
        return DenseMlp(gate_up, down)

    def _experts(self, layer: str, sites: Sequence[LoraSite]) -> SparseMlp:
        """layer: prefix of the layer's tensors. sites: those of the shared expert, if there is one, then of the router
        and of the experts.
        """
        *shared_sites, router, gate_up, down = sites
        config, reader = self._config, self._reader
        assert config.experts is not None
        experts, hidden = config.experts, config.hidden_size
        cut = self._partition.cut(experts.width, self._rank)
        parts = find_expert_parts(reader, layer, experts, hidden, cut)
        shared = None
        if shared_sites:
            *mlp_sites, gate_site = shared_sites
            gate = reader.matrix(f"{parts.block}.shared_expert_gate.weight", 1, hidden)
            shared = SharedExpert(self._mlp(mlp_sites), Linear(gate, None, gate_site))
        return SparseMlp(
            router=Linear(reader.matrix(f"{parts.block}.gate.weight", experts.count, hidden), None, router),
            gate_up=ExpertLinear(reader.linear(parts.gate_up), gate_up),
            down=ExpertLinear(reader.linear(parts.down), down),
            shared=shared,
        )

    def _query_key_norm(self, prefix: str) -> QueryKeyNorm:
        head_dim = self._config.head_dim
        query, key = (self.norm(f"{prefix}.{name}", head_dim) for name in ("q_norm", "k_norm"))
        return QueryKeyNorm(query, key, self._config.rms_norm_eps)

    def _linear(self, site: LoraSite, *, biased: bool) -> Linear:
        reader = self._reader
        parts = [self._part(site.first_module + offset) for offset in range(len(site.widths))]
        weight = reader.linear(parts)
        biases = [self._bias(part) for part in parts] if biased else []
        # One rank adds the bias of a linear whose outputs are partial sums.
        adds_bias = self._rank == 0 or len(parts[0].columns) == parts[0].shape[1]
        return Linear(weight, torch.cat(biases) if biases and adds_bias else None, site)

    def _part(self, module_id: int) -> LinearPart:
        module = self._partition.shape.modules[module_id]
        part = self._partition.part(module_id, self._rank)
        name = module.path.replace(self._config.root, self._config.stored_root, 1)
        return LinearPart(f"{name}.weight", (module.out_width, module.in_width), part.outputs, part.inputs)

    def _bias(self, part: LinearPart) -> Tensor:
        bias = self._reader.vector(f"{part.name.removesuffix('.weight')}.bias", part.shape[0])
        return torch.cat([bias[rows.start : rows.stop] for rows in part.rows])


@dataclass(frozen=True, slots=True)
class ExpertParts:
    """The tensors of a layer's experts. block: prefix of the router and of the shared expert.

    gate_up: for each expert, gate and then up. down: one part for each expert.
    """

    block: str
    gate_up: list[LinearPart]
    down: list[LinearPart]


def find_expert_parts(
    reader: WeightReader, layer: str, experts: ExpertConfig, hidden_size: int, cut: range
) -> ExpertParts:
    """layer: prefix of the layer's tensors. cut: the rank's part of each expert's intermediate columns."""
    width, whole = experts.width, range(hidden_size)
    stacks = f"{layer}.mlp.experts"
    if f"{stacks}.gate_up_proj" in reader:
        rows = (cut, range(width + cut.start, width + cut.stop))
        places = [(expert, experts.count) for expert in range(experts.count)]
        return ExpertParts(
            block=f"{layer}.mlp",
            gate_up=[
                LinearPart(f"{stacks}.gate_up_proj", (2 * width, hidden_size), rows, whole, place)
                for place in places
            ],
            down=[
                LinearPart(f"{stacks}.down_proj", (hidden_size, width), (whole,), cut, place)
                for place in places
            ],
        )
    block = f"{layer}.{experts.block}"
    names = [f"{block}.experts.{expert}" for expert in range(experts.count)]
    return ExpertParts(
        block=block,
        gate_up=[
            LinearPart(f"{name}.{linear}.weight", (width, hidden_size), (cut,), whole)
            for name in names
            for linear in (experts.gate, experts.up)
        ],
        down=[
            LinearPart(f"{name}.{experts.down}.weight", (hidden_size, width), (whole,), cut) for name in names
        ],
    )
