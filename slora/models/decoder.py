"""Our decoder over flat tokens: fused qkv and gate_up, paged attention, experts, and LoRA on each linear.

It serves every family that `ModelConfig` can describe. The families differ only in data, which is read when the weights
are loaded. One forward pass computes prefill chunks and decode rows of many sequences. There is no batch axis, only the
tokens of the step. Sequences, adapters and pages appear only as the batch's tables.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from slora.memory.device_memory import DeviceMemory
from slora.models.collectives import ALONE, Collectives
from slora.models.expert_choice import ExpertChoice
from slora.models.expert_parts import find_expert_parts
from slora.models.lora_deltas import LoraDeltas
from slora.models.mlp import DenseMlp, Mlp, SharedExpert, SparseMlp
from slora.models.model_config import ModelConfig
from slora.models.rotary import cos_sin_tables
from slora.models.side_stream import SideStream
from slora.models.step_batch import StepBatch
from slora.weights.expert_linear import ExpertLinear
from slora.weights.linear import Linear, multiply
from slora.weights.packed_weight import pack_weight
from slora.weights.weight_reader import LinearPart, WeightReader
from slora_kernels.batch import AttentionRule, QueryKeyNorm
from slora_kernels.layout import LoraSite
from slora_kernels.ops import Kernels
from slora_kernels.partition import Partition

_LARGE_HEAD_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one layer. cos_sin: the rotary table of this layer.

    attention_post_norm, mlp_post_norm: applied before the output is added to the residual; None if the family has none.
    """

    attention_rule: AttentionRule
    cos_sin: Tensor
    query_key_norm: QueryKeyNorm | None
    attention_norm: Tensor
    attention_post_norm: Tensor | None
    mlp_norm: Tensor
    mlp_post_norm: Tensor | None
    qkv: Linear
    output: Linear
    mlp: Mlp

    def packed(self) -> "DecoderLayer":
        return replace(self, qkv=self.qkv.packed(), output=self.output.packed(), mlp=self.mlp.packed())


class Decoder:
    """The model's weights on `device` in `dtype`. Loading reads each tensor directly into its final memory."""

    can_embed = True

    def __init__(
        self,
        config: ModelConfig,
        reader: WeightReader,
        max_model_len: int,
        collectives: Collectives = ALONE,
    ) -> None:
        # With save_original_format=False, transformers 5 saves the names of its modules.
        if f"{config.stored_root}.embed_tokens.weight" not in reader:
            config = replace(config, stored_root=config.root)
        self.config = config
        self.dtype = reader.dtype
        self.device = reader.device
        self._collectives = collectives
        partition = Partition(config.shape(self.dtype.itemsize), collectives.size)
        self._shape = partition.rank_shape
        self._tokens = partition.tokens(collectives.rank)
        self._side = SideStream(self.device) if self.device.type == "cuda" else None
        loader = _WeightLoader(config, reader, max_model_len, partition, collectives.rank)
        embedding_name = f"{config.stored_root}.embed_tokens.weight"
        self._embedding = loader.vocabulary(embedding_name)
        # Rounded to the model's dtype, as transformers does: sqrt(3072) is 55.5 in bfloat16.
        scale = config.embedding_scale
        self._embedding_scale = None if scale is None else torch.tensor(scale).to(self.device, self.dtype)
        self._layers = [loader.layer(index) for index in range(config.num_layers)]
        self._norm = loader.norm(f"{config.stored_root}.norm", config.hidden_size)
        # As in transformers: a stored head that differs from the embedding is used, even if config.json ties them.
        head_prefix = "" if config.stored_root == config.root else config.stored_root.removesuffix("model")
        head_name = f"{head_prefix}lm_head.weight"
        tied = config.tie_word_embeddings and reader.is_absent_or_same(head_name, embedding_name)
        head = self._embedding if tied else loader.vocabulary(head_name)
        reader.skip_prefixes(
            config.skipped_prefixes + tuple(f"model.{one}" for one in config.skipped_prefixes)
        )
        reader.read()
        # Layers are packed one by one, because packing holds a second copy of the layer for a moment.
        for index in range(config.num_layers):
            self._layers[index] = self._layers[index].packed()
        # The embedding lookup needs the unpacked weight of a tied head. A packed copy of a large head would take too
        # much memory.
        self._lm_head = pack_weight(head) if not tied or head.nbytes <= _LARGE_HEAD_BYTES else head

    def forward(self, batch: StepBatch, memory: DeviceMemory, kernels: Kernels) -> Tensor:
        """Writes the step's KV into its pages. Returns the hidden states [B', H] of the rows in `output_rows`."""
        only_decodes = batch.attention.max_query_len == 1
        deltas = LoraDeltas(batch.lora, memory, kernels, self._side, only_decodes=only_decodes)
        hidden = self._embed(batch, deltas)
        if self._embedding_scale is not None:
            hidden = hidden * self._embedding_scale
        forward = _Forward(self.config, batch, memory, kernels, deltas, self._collectives)
        return forward.run(self._layers, hidden, self._norm)

    def logits(self, hidden: Tensor, deltas: LoraDeltas) -> Tensor:
        """Computes logits [N, vocab_size] from hidden states [N, H]. deltas: LoRA at the output head."""
        logits = multiply(hidden, self._lm_head)
        deltas.add(logits, hidden, self._shape.head_site)
        if self._collectives.size > 1:
            # The vocabulary of the last rank may be padded.
            logits = self._collectives.gather_columns(logits)[:, : self.config.vocab_size].contiguous()
        softcap = self.config.final_softcap
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    def _embed(self, batch: StepBatch, deltas: LoraDeltas) -> Tensor:
        """Returns the embeddings [T, H] of the step's tokens. A rank adds nothing for tokens of other ranks."""
        ids = batch.token_ids
        if self._collectives.size > 1:
            ids = ids - self._tokens.start
            is_elsewhere = (ids < 0) | (ids >= len(self._tokens))
            ids = ids.masked_fill(is_elsewhere, 0)
        hidden = F.embedding(ids, self._embedding)
        if batch.adapts_embedding:
            deltas.add_embedding(hidden, ids, self._shape.embedding_site)
        if self._collectives.size > 1:
            hidden = self._collectives.sum(hidden.masked_fill_(is_elsewhere[:, None], 0))
        return hidden


class _Forward:
    """The inputs that all layers of one forward pass share."""

    def __init__(
        self,
        config: ModelConfig,
        batch: StepBatch,
        memory: DeviceMemory,
        kernels: Kernels,
        deltas: LoraDeltas,
        collectives: Collectives,
    ) -> None:
        self._collectives = collectives
        self._activation = config.activation
        self._experts = config.experts
        self._eps = config.rms_norm_eps
        self._batch = batch
        self._memory = memory
        self._kernels = kernels
        self._step = kernels.prepare_attention(batch.attention)
        self._deltas = deltas

    def run(self, layers: list[DecoderLayer], residual: Tensor, last_norm: Tensor) -> Tensor:
        """Runs all layers. residual [T, H] is overwritten.

        Returns normalized hidden states [B', H] of the rows in `output_rows`.
        """
        kernels, eps = self._kernels, self._eps
        hidden = kernels.rms_norm(residual, layers[0].attention_norm, eps)
        for index, layer in enumerate(layers):
            attended, delta = self._attend(hidden, layer, index)
            hidden = kernels.add_rms_norm(attended, residual, layer.mlp_norm, eps, delta)
            output, delta = self._transform(hidden, layer)
            if index + 1 < len(layers):
                hidden = kernels.add_rms_norm(output, residual, layers[index + 1].attention_norm, eps, delta)
        rows = self._batch.output_rows
        delta = None if delta is None else delta[rows]
        return kernels.add_rms_norm(output[rows], residual[rows], last_norm, eps, delta)

    def _attend(self, hidden: Tensor, layer: DecoderLayer, index: int) -> tuple[Tensor, Tensor | None]:
        """Returns the output of attention, and a delta that is to be added to it, if there is one."""
        kernels, pages, geometry = self._kernels, self._memory.pages, self._memory.geometry
        qkv, delta = self._apply_apart(hidden, layer.qkv)
        query = kernels.rotate_and_write_kv(
            qkv, layer.cos_sin, pages, geometry, index, self._step, layer.query_key_norm, delta
        )
        attended = kernels.attend(query, pages, geometry, index, self._step, layer.attention_rule)
        return self._finish(attended, layer.output, layer.attention_post_norm)

    def _transform(self, hidden: Tensor, layer: DecoderLayer) -> tuple[Tensor, Tensor | None]:
        """Returns the output of the MLP, and a delta that is to be added to it, if there is one."""
        if isinstance(layer.mlp, DenseMlp):
            return self._finish(self._gate(hidden, layer.mlp), layer.mlp.down, layer.mlp_post_norm)
        mixed = self._collectives.sum(self._mix_experts(hidden, layer.mlp))
        return self._norm(mixed, layer.mlp_post_norm), None

    def _finish(self, x: Tensor, linear: Linear, post_norm: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Applies the last linear of attention or of an MLP. Other ranks and the post norm need the whole sum."""
        if self._collectives.size == 1 and post_norm is None:
            return self._apply_apart(x, linear)
        return self._norm(self._collectives.sum(self._apply(x, linear)), post_norm), None

    def _gate(self, hidden: Tensor, mlp: DenseMlp) -> Tensor:
        gate_up, delta = self._apply_apart(hidden, mlp.gate_up)
        return self._kernels.act_mul(gate_up, self._activation, delta)

    def _mix_experts(self, hidden: Tensor, mlp: SparseMlp) -> Tensor:
        kernels, experts = self._kernels, self._experts
        assert experts is not None, "a layer has experts that the config does not describe"
        choice = ExpertChoice.of(multiply(hidden, mlp.router), experts)
        gate_up = mlp.gate_up.apply(choice.spread(hidden), choice.starts, kernels)
        gated = kernels.act_mul(gate_up, self._activation)
        mixed = choice.combine(mlp.down.apply(gated, choice.starts, kernels))
        if mlp.shared is None:
            return mixed
        gate = self._apply(hidden, mlp.shared.gate)
        # On a CPU, torch.sigmoid rounds an element by its place in the tensor.
        gate = (1 / (1 + torch.exp(-gate.float()))).to(gate.dtype)
        return mixed + gate * self._apply(self._gate(hidden, mlp.shared.mlp), mlp.shared.mlp.down)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else self._kernels.rms_norm(x, weight, self._eps)

    def _apply_apart(self, x: Tensor, linear: Linear) -> tuple[Tensor, Tensor | None]:
        """Like `_apply`, but the adapters' part of the sum may be returned on its own."""
        return self._deltas.compute_apart(lambda: linear.apply(x, self._kernels), x, linear.site)

    def _apply(self, x: Tensor, linear: Linear) -> Tensor:
        """x W^T + b, plus scale * (x A^T) B^T for the tokens that have an adapter."""
        return self._deltas.compute(lambda: linear.apply(x, self._kernels), x, linear.site)


class _WeightLoader:
    """Finds a layer's tensors by their Hugging Face names and fuses the linears that read the same input.

    Reads the parts of one rank of the partition.
    """

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

    def vocabulary(self, name: str) -> Tensor:
        """The rank's rows of an embedding or a head, padded to the same number on all ranks."""
        config, tokens = self._config, self._partition.tokens(self._rank)
        num_held = self._partition.rank_shape.vocab_size
        return self._reader.matrix(name, config.vocab_size, config.hidden_size, tokens, num_held)

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

    def _experts(self, layer: str, shared_sites: Sequence[LoraSite]) -> SparseMlp:
        """layer: prefix of the layer's tensors. shared_sites: the sites of the shared expert, if there is one."""
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
            router=reader.matrix(f"{parts.block}.gate.weight", experts.count, hidden),
            gate_up=ExpertLinear(reader.linear(parts.gate_up), experts.count),
            down=ExpertLinear(reader.linear(parts.down), experts.count),
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
