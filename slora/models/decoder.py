"""Our decoder over flat tokens: fused qkv and gate_up, paged attention, experts, and LoRA on each linear.

It serves every family that `ModelConfig` can describe. The families differ only in data, which is read when the weights
are loaded. One forward pass computes prefill chunks and decode rows of many sequences. There is no batch axis, only the
tokens of the step. Sequences, adapters and pages appear only as the batch's tables.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from slora.memory.device_memory import DeviceMemory
from slora.models.affine import SiteWeight
from slora.models.collectives import ALONE, Collectives
from slora.models.decoder_weights import DecoderLayer, DenseMlp, LayerLoader, SparseMlp
from slora.models.lora_deltas import LoraDeltas, SideStream, hide_absent, widen_logits
from slora.models.model_config import ExpertConfig, ModelConfig
from slora.models.step_batch import StepBatch
from slora.models.weights.linear import Linear, check_codes, quantize_copy, sum_column_squares
from slora.models.weights.weight_reader import WeightReader
from slora_kernels.batch import AttentionStep, KVGeometry, QueryKeyNorm
from slora_kernels.layout import LoraSite, ModelShape
from slora_kernels.ops import Kernels
from slora_kernels.partition import Partition
from slora_kernels.torch.lora_matmuls import add_delta

# The largest embedding, in numbers, of which a copy in 8 bits is made for a head with the same weight. The copy of a
# larger one would take too much memory.
_LARGE_COPY = 512 << 20
# The most rows, of all layers together, whose kernels wait for each other: what they write is kept until they have run.
_COLLECTED_ROWS = 64
# The most bytes that the kept jobs of a step write, and the most shapes of steps whose jobs are kept. Tenants choose
# lengths and ranks, and so the shapes. In steps that write more, making the jobs takes a small part of the time.
_KEPT_BYTES, _MAX_KEPT = 8 << 20, 32


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
        partition = self._partition = Partition(config.shape(self.dtype.itemsize), collectives.size)
        self._shape = partition.rank_shape
        self._head_site, self._embedding_site = self._shape.head_site, self._shape.embedding_site
        self._tokens = partition.tokens(collectives.rank)
        self.side_stream = SideStream(self.device) if self.device.type == "cuda" else None
        loader = LayerLoader(config, reader, max_model_len, partition, collectives.rank)
        embedding_name = f"{config.stored_root}.embed_tokens.weight"
        self._embedding = loader.embedding(embedding_name)
        # Rounded to the model's dtype, as transformers does: sqrt(3072) is 55.5 in bfloat16.
        scale = config.embedding_scale
        self._embedding_scale = None if scale is None else torch.tensor(scale).to(self.device, self.dtype)
        self._layers = [loader.layer(index) for index in range(config.num_layers)]
        self._norm = loader.norm(f"{config.stored_root}.norm", config.hidden_size)
        # As in transformers: a stored head that differs from the embedding is used, even if config.json ties them.
        head_prefix = "" if config.stored_root == config.root else config.stored_root.removesuffix("model")
        head_name = f"{head_prefix}lm_head.weight"
        tied = config.tie_word_embeddings and reader.is_absent_or_same(head_name, embedding_name)
        head = self._embedding if tied else loader.head(head_name)
        reader.skip_prefixes(
            config.skipped_prefixes + tuple(f"model.{prefix}" for prefix in config.skipped_prefixes)
        )
        reader.read()
        # Layers are packed one by one, because packing holds a second copy of the layer for a moment.
        for index in range(config.num_layers):
            self._layers[index] = self._layers[index].packed(self.dtype)
        form = reader.find_head_form(embedding_name) if tied else None
        if form is not None and self._embedding.numel() <= _LARGE_COPY:
            head, tied = quantize_copy(self._embedding, form), False
        self._head = Linear(head, None, self._head_site).packed(self.dtype, is_tied=tied)
        self._embedding_squares: Tensor | None = None
        # Only kernels and weights in tiles read what the layers compute, unless adapters have norms of their own.
        self._can_collect = collectives.size == 1 and all(layer.is_in_tiles for layer in self._layers)
        self._kept: dict[tuple[object, ...], _KeptLayers] = {}
        sites = [linear.site for layer in self._layers for linear in layer.linears]
        self._row_bytes = sum(site.in_width + sum(site.widths) for site in sites) * self.dtype.itemsize

    def warm_up(self, kernels: Kernels) -> None:
        """Multiplies a row with each linear of a layer, and the head: each form of weights has code of its own."""
        for linear in (*self._layers[0].linears, self._head):
            linear.apply(torch.zeros(1, linear.site.in_width, dtype=self.dtype, device=self.device), kernels)

    def check(self, geometry: KVGeometry, kernels: Kernels) -> None:
        """On a GPU, compares products with 4-bit weights with torch's. Tests compare the rest with transformers."""
        if self.device.type == "cuda":
            for linear in self._layers[0].linears:
                check_codes(linear, self.dtype, kernels)

    def forward(self, batch: StepBatch, memory: DeviceMemory, kernels: Kernels) -> Tensor:
        """Writes the step's KV into its pages. Returns the hidden states [B', H] of the rows in `output_rows`."""
        deltas = LoraDeltas(batch.lora, memory, kernels, self.side_stream)
        hidden = self._embed(batch, deltas)
        if self._embedding_scale is not None:
            hidden = hidden * self._embedding_scale
        # Other kernels compute at once.
        can_collect = self._can_collect and kernels.name == "cpu" and not deltas.norm_runs
        forward = self._begin(batch, memory, kernels, deltas)
        is_small = len(hidden) * self._row_bytes <= _KEPT_BYTES
        if can_collect and is_small and batch.attention.max_query_len == 1:
            output, hidden = self._run_kept(batch, memory, kernels, hidden)
            delta = None
        else:
            num_together = _COLLECTED_ROWS // len(hidden) if can_collect else 0
            output, delta = forward.run(self._layers, hidden, num_together)
        return forward.finish(output, delta, hidden, self._norm)

    def logits(self, hidden: Tensor, deltas: LoraDeltas) -> Tensor:
        """See `Model.logits`."""
        vocab_size, own = self.config.vocab_size, deltas.multiply_own_rows(hidden)
        if sum(
            len(part.places) for part in own if part.rows.count == vocab_size + part.rows.num_added
        ) == len(hidden):
            logits = hidden.new_empty(len(hidden), vocab_size)
        else:
            logits = self._head.apply(hidden, deltas.kernels)
            deltas.add(logits, hidden, self._head_site)
            if self._collectives.size > 1:
                # The vocabulary of the last rank may be padded.
                logits = self._collectives.gather_columns(logits)[:, :vocab_size].contiguous()
        logits = widen_logits(logits, own)
        for part in own:
            part.replace(logits)
        softcap = self.config.final_softcap
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        hide_absent(logits, own)
        return logits

    def find_weight(self, site: LoraSite, kernels: Kernels) -> SiteWeight:
        """The base model's weight at a site of this rank's part."""
        divided = self._partition.shape.modules[site.first_module].in_width != site.in_width
        if site == self._head_site:
            return self._head.describe(kernels, is_divided=divided)
        if site == self._embedding_site:
            weight = self._embedding
            if self._embedding_squares is None:
                self._embedding_squares = sum_column_squares(weight)
            return SiteWeight(lambda x: x @ weight, self._embedding_squares, None, is_divided=divided)
        linears = (linear for layer in self._layers for linear in layer.linears)
        linear = next(linear for linear in linears if linear.site.group == site.group)
        return linear.describe(kernels, is_divided=divided)

    def _begin(
        self, batch: StepBatch, memory: DeviceMemory, kernels: Kernels, deltas: LoraDeltas
    ) -> "_Forward":
        return _Forward(self.config, self._shape, batch, memory, kernels, deltas, self._collectives)

    def _run_kept(
        self, batch: StepBatch, memory: DeviceMemory, kernels: Kernels, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Runs all layers for a decode step. Returns the output of the last one, and the sum of the others' outputs."""
        shape = _describe_decodes(batch)
        kept = self._kept.pop(shape, None)
        if kept is not None and kept.reads(memory, kernels):
            self._kept[shape] = kept  # The shape that was used last is the last.
            return kept.run(batch, hidden)
        kept = _KeptLayers(batch, memory, kernels, hidden)
        with kernels.collecting_jobs() as run_again:
            deltas = LoraDeltas(kept.batch.lora, memory, kernels)
            forward = self._begin(kept.batch, memory, kernels, deltas)
            output, _ = forward.run(self._layers, kept.residual, 0)
        assert run_again is not None
        if len(self._kept) >= _MAX_KEPT:
            del self._kept[next(iter(self._kept))]
        kept.keep(run_again, output)
        self._kept[shape] = kept
        return output, kept.residual

    def _embed(self, batch: StepBatch, deltas: LoraDeltas) -> Tensor:
        """Returns the embeddings [T, H] of the step's tokens. A rank adds nothing for tokens of other ranks."""
        ids = batch.token_ids
        if batch.adapts_embedding:
            # The embeddings of added tokens are replaced below.
            ids = ids.clamp_max(self.config.vocab_size - 1)
        if self._collectives.size > 1:
            ids = ids - self._tokens.start
            is_elsewhere = (ids < 0) | (ids >= len(self._tokens))
            ids = ids.masked_fill(is_elsewhere, 0)
        hidden = F.embedding(ids, self._embedding)
        if batch.adapts_embedding:
            deltas.add_embedding(hidden, ids, self._embedding_site)
        if self._collectives.size > 1:
            hidden = self._collectives.sum(hidden.masked_fill_(is_elsewhere[:, None], 0))
        if batch.adapts_embedding:
            deltas.replace_embeddings(hidden, batch.token_ids)
        return hidden


class _Forward:
    """The inputs that all layers of one forward pass share."""

    def __init__(
        self,
        config: ModelConfig,
        shape: ModelShape,
        batch: StepBatch,
        memory: DeviceMemory,
        kernels: Kernels,
        deltas: LoraDeltas,
        collectives: Collectives,
    ) -> None:
        self._shape = shape
        self._collectives = collectives
        self._activation = config.activation
        self._experts = config.experts
        self._eps = config.rms_norm_eps
        self._batch = batch
        self._memory = memory
        self._kernels = kernels
        self._step = kernels.prepare_attention(batch.attention)
        self._deltas = deltas
        # Without post norms, the norm before the MLP is called post_attention_layernorm.
        self._mlp_norm = ("pre_feedforward" if config.post_norms else "post_attention") + "_layernorm"
        # The tokens that have q and k norms of their own, as batches of their own.
        self._own_steps: dict[int, AttentionStep] = {}

    def run(
        self, layers: list[DecoderLayer], residual: Tensor, num_together: int
    ) -> tuple[Tensor, Tensor | None]:
        """Runs all layers. residual [T, H] is overwritten by the sum of all outputs but the last one.

        num_together: of how many layers the kernels wait for each other, see `Kernels.collecting_jobs`; 0: of none.

        Returns the output of the last layer, and a delta that is to be added to it, if there is one.
        """
        kernels, eps = self._kernels, self._eps
        hidden = kernels.rms_norm(residual, layers[0].attention_norm, eps)
        self._replace_norm(hidden, residual, 0, "input_layernorm")
        num_each = num_together or len(layers)
        for first in range(0, len(layers), num_each):
            with kernels.collecting_jobs() if num_together else nullcontext():
                for index, layer in enumerate(layers[first : first + num_each], first):
                    attended, delta = self._attend(hidden, layer, index)
                    hidden = kernels.add_rms_norm(attended, residual, layer.mlp_norm, eps, delta)
                    self._replace_norm(hidden, residual, index, self._mlp_norm)
                    output, delta = self._transform(hidden, layer, index)
                    if index + 1 < len(layers):
                        norm = layers[index + 1].attention_norm
                        hidden = kernels.add_rms_norm(output, residual, norm, eps, delta)
                        self._replace_norm(hidden, residual, index + 1, "input_layernorm")
        return output, delta

    def finish(self, output: Tensor, delta: Tensor | None, residual: Tensor, norm: Tensor) -> Tensor:
        """Returns normalized hidden states [B', H] of the rows in `output_rows`. residual: as `run` left it."""
        rows = self._batch.output_rows
        delta, last = None if delta is None else delta[rows], residual[rows]
        hidden = self._kernels.add_rms_norm(output[rows], last, norm, self._eps, delta)
        if self._deltas.norm_runs:
            self._replace_final_norm(hidden, last)
        return hidden

    def _replace_norm(self, out: Tensor, x: Tensor, layer: int, name: str) -> None:
        if self._deltas.norm_runs:
            self._deltas.replace_norm(out, x, self._shape.norm_id(layer, name), self._eps)

    def _replace_final_norm(self, out: Tensor, x: Tensor) -> None:
        """Overwrites the rows of out, the final norm of x at `output_rows`, that have a weight of their own."""
        tokens = self._batch.output_rows.tolist()
        for rows, weight in self._deltas.find_norms(len(self._shape.norms) - 1, x.shape[1]):
            places = [place for place, token in enumerate(tokens) if rows.start <= token < rows.stop]
            if places:
                out[places] = self._kernels.rms_norm(x[places], weight[0], self._eps)

    def _attend(self, hidden: Tensor, layer: DecoderLayer, index: int) -> tuple[Tensor, Tensor | None]:
        """Returns the output of attention, and a delta that is to be added to it, if there is one."""
        kernels, pages, geometry = self._kernels, self._memory.pages, self._memory.geometry
        qkv, delta = self._apply_apart(hidden, layer.qkv)
        own = list(self._find_own_heads(qkv, delta, layer, index))
        query = kernels.rotate_and_write_kv(
            qkv, layer.cos_sin, pages, geometry, index, self._step, layer.query_key_norm, delta
        )
        for rows, norm, heads in own:
            # Their K and V are written once more.
            query[rows] = kernels.rotate_and_write_kv(
                heads, layer.cos_sin, pages, geometry, index, self._cut_step(rows), norm
            )
        attended = kernels.attend(query, pages, geometry, index, self._step, layer.attention_rule)
        post_norm = self._post_norm(layer.attention_post_norm, index, "post_attention_layernorm")
        return self._finish(attended, layer.output, post_norm)

    def _find_own_heads(
        self, qkv: Tensor, delta: Tensor | None, layer: DecoderLayer, index: int
    ) -> Iterator[tuple[slice, QueryKeyNorm, Tensor]]:
        """Yields the rows of qkv whose adapter has a q or k norm of its own, the norms, and a copy of the rows."""
        norms, deltas = layer.query_key_norm, self._deltas
        if norms is None or not deltas.norm_runs:
            return
        width = len(norms.query)
        copies: dict[tuple[int, int], dict[str, Tensor]] = {}
        for name in ("q_norm", "k_norm"):
            norm_id = self._shape.norm_id(index, f"self_attn.{name}")
            for rows, weight in deltas.find_norms(norm_id, width):
                copies.setdefault((rows.start, rows.stop), {})[name] = weight[0]
        for (start, stop), weights in copies.items():
            rows = slice(start, stop)
            # Kernels want both weights in one dtype.
            query, key = (
                weights.get(name, base.float())
                for name, base in (("q_norm", norms.query), ("k_norm", norms.key))
            )
            heads = qkv[rows].clone() if delta is None else add_delta(qkv[rows], delta[rows])
            yield rows, QueryKeyNorm(query, key, norms.eps), heads

    def _cut_step(self, rows: slice) -> AttentionStep:
        """The step of these tokens alone, which is only used to write their KV."""
        if rows.start not in self._own_steps:
            batch, count = self._batch.attention, rows.stop - rows.start
            part = replace(
                batch,
                query_starts=batch.query_starts.new_tensor([0, count]),
                context_lens=batch.context_lens.new_tensor([count]),
                block_tables=batch.block_tables[:1],
                positions=batch.positions[rows],
                kv_slots=batch.kv_slots[rows],
                max_query_len=count,
                max_context_len=count,
            )
            self._own_steps[rows.start] = self._kernels.prepare_attention(part)
        return self._own_steps[rows.start]

    def _transform(self, hidden: Tensor, layer: DecoderLayer, index: int) -> tuple[Tensor, Tensor | None]:
        """Returns the output of the MLP, and a delta that is to be added to it, if there is one."""
        post_norm = self._post_norm(layer.mlp_post_norm, index, "post_feedforward_layernorm")
        if isinstance(layer.mlp, DenseMlp):
            return self._finish(self._gate(hidden, layer.mlp), layer.mlp.down, post_norm)
        mixed = self._collectives.sum(self._mix_experts(hidden, layer.mlp))
        return mixed if post_norm is None else post_norm(mixed), None

    def _finish(
        self, x: Tensor, linear: Linear, post_norm: Callable[[Tensor], Tensor] | None
    ) -> tuple[Tensor, Tensor | None]:
        """Applies the last linear of attention or of an MLP. Other ranks and the post norm need the whole sum."""
        if self._collectives.size == 1 and post_norm is None:
            return self._apply_apart(x, linear)
        output = self._collectives.sum(self._apply(x, linear))
        return output if post_norm is None else post_norm(output), None

    def _gate(self, hidden: Tensor, mlp: DenseMlp) -> Tensor:
        gate_up, delta = self._apply_apart(hidden, mlp.gate_up)
        return self._kernels.act_mul(gate_up, self._activation, delta)

    def _mix_experts(self, hidden: Tensor, mlp: SparseMlp) -> Tensor:
        kernels, experts = self._kernels, self._experts
        assert experts is not None, "a layer has experts that the config does not describe"
        choice = ExpertChoice.of(self._apply(hidden, mlp.router), experts)
        routed = self._deltas.route(
            choice.starts, choice.token_of_row, len(hidden), (mlp.gate_up.site, mlp.down.site)
        )
        rows = choice.spread(hidden)
        gate_up = mlp.gate_up.apply(rows, choice.starts, kernels)
        routed.add(gate_up, rows, mlp.gate_up.site)
        gated = kernels.act_mul(gate_up, self._activation)
        outputs = mlp.down.apply(gated, choice.starts, kernels)
        routed.add(outputs, gated, mlp.down.site)
        mixed = choice.combine(outputs)
        if mlp.shared is None:
            return mixed
        gate = self._apply(hidden, mlp.shared.gate)
        # On a CPU, torch.sigmoid rounds an element by its place in the tensor.
        gate = (1 / (1 + torch.exp(-gate.float()))).to(gate.dtype)
        return mixed + gate * self._apply(self._gate(hidden, mlp.shared.mlp), mlp.shared.mlp.down)

    def _post_norm(self, weight: Tensor | None, layer: int, name: str) -> Callable[[Tensor], Tensor] | None:
        """The norm before an output is added to the residual. None: the family has none."""
        if weight is None:
            return None

        def normalize(x: Tensor) -> Tensor:
            out = self._kernels.rms_norm(x, weight, self._eps)
            self._replace_norm(out, x, layer, name)
            return out

        return normalize

    def _apply_apart(self, x: Tensor, linear: Linear) -> tuple[Tensor, Tensor | None]:
        """Like `_apply`, but the adapters' part of the sum may be returned on its own."""
        if not self._deltas.has_layers:
            return linear.apply(x, self._kernels), None
        return self._deltas.compute_apart(lambda: linear.apply(x, self._kernels), x, linear.site)

    def _apply(self, x: Tensor, linear: Linear) -> Tensor:
        """x W^T + b, plus scale * (x A^T) B^T for the tokens that have an adapter."""
        return self._deltas.compute(lambda: linear.apply(x, self._kernels), x, linear.site)


def _describe_decodes(batch: StepBatch) -> tuple[object, ...]:
    """All that the jobs of a decode step depend on, but for the content of its tensors."""
    lora = [
        (len(tiles.tiles), tiles.max_group_rank, tiles.num_groups, tiles.has_affine) for tiles in batch.lora
    ]
    return len(batch.token_ids), batch.attention.max_context_len.bit_length(), *lora


class _KeptLayers:
    """The jobs of all layers for decode steps of one shape: on a CPU, what a CUDA graph is on a GPU.

    A step of a small model makes a hundred jobs of a few microseconds each, and making one takes Python as long.

    batch: a step in tensors of its own, which the jobs read. residual: [T, H], the input of the layers.
    """

    def __init__(self, batch: StepBatch, memory: DeviceMemory, kernels: Kernels, hidden: Tensor) -> None:
        """batch, hidden: those of a step of this shape."""
        self._memory, self._kernels, self._thread = memory, kernels, threading.get_ident()
        attention = batch.attention
        longest = (1 << attention.max_context_len.bit_length()) - 1
        num_blocks = max(attention.block_tables.shape[1], -(-longest // memory.geometry.block_tokens))
        tables = attention.block_tables.new_zeros(len(attention.block_tables), num_blocks)
        self.batch = replace(
            batch,
            attention=replace(
                attention,
                context_lens=attention.context_lens.clone(),
                block_tables=tables,
                positions=attention.positions.clone(),
                kv_slots=attention.kv_slots.clone(),
                max_context_len=longest,
            ),
            lora=tuple(
                replace(tiles, tiles=tiles.tiles.clone(), weights=tiles.weights.clone())
                for tiles in batch.lora
            ),
        )
        self.residual = torch.empty_like(hidden)
        self._output = hidden
        self._run_again: Callable[[], None] | None = None
        self._copy(batch, hidden)

    def reads(self, memory: DeviceMemory, kernels: Kernels) -> bool:
        """Whether the jobs are those of these kernels, on the pages of this pool, and this thread may run them."""
        is_own = self._thread == threading.get_ident()
        return is_own and memory is self._memory and kernels is self._kernels

    def keep(self, run_again: Callable[[], None], output: Tensor) -> None:
        """run_again: see `Kernels.collecting_jobs`. output: of the last layer."""
        self._run_again, self._output = run_again, output

    def run(self, batch: StepBatch, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See `Decoder._run_kept`. The tensors are overwritten by the next step."""
        assert self._run_again is not None
        self._copy(batch, hidden)
        self._run_again()
        return self._output, self.residual

    def _copy(self, batch: StepBatch, hidden: Tensor) -> None:
        source, target = batch.attention, self.batch.attention
        target.context_lens.copy_(source.context_lens)
        target.positions.copy_(source.positions)
        target.kv_slots.copy_(source.kv_slots)
        # No row reads what is behind these blocks.
        width = min(source.block_tables.shape[1], target.block_tables.shape[1])
        target.block_tables[:, :width].copy_(source.block_tables[:, :width])
        for own, new in zip(self.batch.lora, batch.lora, strict=True):
            own.tiles.copy_(new.tiles)
            own.weights.copy_(new.weights)
        self.residual.copy_(hidden)


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """The choice for T tokens, each computed by k of E experts. There are S = T * k rows, sorted by expert.

    A token's result does not depend on the order of the tokens, because its k outputs are added in the order of their
    weights. All tensors have sizes that depend only on the number of tokens, and nothing is read by the host. So the
    steps of a GPU can be recorded.
    """

    weights: Tensor  # float32 [T, k], in the order in which the outputs are added.
    row_of_choice: Tensor  # int64 [T, k], the row that belongs to each weight.
    token_of_row: Tensor  # int64 [S].
    starts: Tensor  # int32 [E + 1], the first row of each expert, and S.
    expert_of_row: Tensor  # int64 [S], ascending.

    @staticmethod
    def of(logits: Tensor, config: ExpertConfig) -> "ExpertChoice":
        """Chooses the experts with the greatest router logits [T, E]."""
        weights, experts = logits.softmax(dim=-1, dtype=torch.float32).topk(config.chosen, dim=-1)
        if config.normalizes:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return ExpertChoice.sort(weights, experts, config.count)

    @staticmethod
    def sort(weights: Tensor, experts: Tensor, count: int) -> "ExpertChoice":
        """weights: float32 [T, k]. experts: int64 [T, k], the chosen ones of `count` experts."""
        # The sort is stable, so the rows of an expert are in the order of the tokens.
        sorted_experts, choices = experts.flatten().sort(stable=True)
        rows = torch.arange(len(choices), device=choices.device)
        bounds = torch.arange(count + 1, device=choices.device)
        return ExpertChoice(
            weights=weights,
            row_of_choice=torch.empty_like(choices).scatter_(0, choices, rows).view_as(experts),
            token_of_row=choices // experts.shape[1],
            starts=torch.searchsorted(sorted_experts, bounds, out_int32=True),
            expert_of_row=sorted_experts,
        )

    def spread(self, x: Tensor) -> Tensor:
        """x [T, H] -> [S, H]: a copy of each token for each of its experts."""
        return x[self.token_of_row]

    def combine(self, rows: Tensor) -> Tensor:
        """rows [S, H] -> [T, H]: the weighted sum of each token's rows, rounded once."""
        mixed = rows[self.row_of_choice[:, 0]] * self.weights[:, :1]
        for choice in range(1, self.weights.shape[1]):
            mixed += rows[self.row_of_choice[:, choice]] * self.weights[:, choice, None]
        return mixed.to(rows.dtype)
