"""The Llama family's decoder over flat tokens: fused qkv and gate_up, paged attention, LoRA beside each linear.

One forward pass serves prefill chunks and decode steps of many sequences at once; there is no batch axis, only the
tokens of the step. Knows no sequence, no adapter and no page: those are in the batch's tables.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from slora.checkpoint import Checkpoint
from slora.errors import ConfigError
from slora.linear import Linear
from slora.model_config import ModelConfig
from slora.page_memory import PageMemory
from slora.rotary import cos_sin_tables
from slora.step_batch import StepBatch
from slora_kernels.batch import AttentionRule
from slora_kernels.layout import LoraSite
from slora_kernels.ops import Kernels


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    input_norm: Tensor
    post_attention_norm: Tensor
    qkv: Linear
    output: Linear
    gate_up: Linear
    down: Linear


class Decoder:
    """Weights on `device` in `dtype`. Loading takes each tensor straight from its file, one layer at a time."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
    ) -> None:
        _refuse_what_forward_ignores(config)
        self.config = config
        self.dtype = dtype
        self.device = device
        loader = _WeightLoader(config, checkpoint, dtype, device)
        self._embedding = loader.tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._layers = [loader.layer(index) for index in range(config.num_layers)]
        self._norm = loader.tensor("model.norm.weight", config.hidden_size)
        self._lm_head = (
            self._embedding
            if config.tie_word_embeddings
            else loader.tensor("lm_head.weight", config.vocab_size, config.hidden_size)
        )
        self._cos_sin = cos_sin_tables(config, max_model_len, device)[0]

    def forward(self, batch: StepBatch, memory: PageMemory, kernels: Kernels) -> Tensor:
        """Writes the step's KV into its pages; returns the hidden states [B', H] of the rows in `sample_rows`."""
        step = _Forward(self, batch, memory, kernels)
        return step.run(self._layers, F.embedding(batch.token_ids, self._embedding))

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, vocab_size] of hidden states [N, H]."""
        return F.linear(hidden, self._lm_head)

    @property
    def norm(self) -> Tensor:
        return self._norm

    @property
    def cos_sin(self) -> Tensor:
        return self._cos_sin


def _refuse_what_forward_ignores(config: ModelConfig) -> None:
    plain = config.activation == "silu" and not any(config.window_of_layer)
    plain = plain and not (config.qk_norm or config.norm_offset or config.fused_linears or config.rope_switch)
    if not plain:
        raise ConfigError(
            f"model_type is {config.family!r}; this version's decoder has no windows, soft-caps or extra norms yet"
        )


class _Forward:
    """One forward pass: what every layer of it shares."""

    def __init__(self, decoder: Decoder, batch: StepBatch, memory: PageMemory, kernels: Kernels) -> None:
        self._decoder = decoder
        self._batch = batch
        self._memory = memory
        self._kernels = kernels
        self._eps = decoder.config.rms_norm_eps
        self._rule = AttentionRule(decoder.config.head_dim**-0.5)
        self._step = kernels.prepare_attention(batch.attention)
        self._lora = kernels.prepare_lora(batch.lora, memory.tables) if batch.lora is not None else None

    def run(self, layers: list[DecoderLayer], residual: Tensor) -> Tensor:
        """residual [T, H] is written to; returns the normalised hidden states [B', H] of the rows in `sample_rows`."""
        kernels, eps = self._kernels, self._eps
        hidden = kernels.rms_norm(residual, layers[0].input_norm, eps)
        for index, layer in enumerate(layers):
            attended = self._attend(hidden, layer, index)
            hidden = kernels.add_rms_norm(attended, residual, layer.post_attention_norm, eps)
            gated = kernels.act_mul(self._apply(hidden, layer.gate_up), "silu")
            output = self._apply(gated, layer.down)
            if index + 1 < len(layers):
                hidden = kernels.add_rms_norm(output, residual, layers[index + 1].input_norm, eps)
        rows = self._batch.sample_rows
        return kernels.add_rms_norm(output[rows], residual[rows], self._decoder.norm, eps)

    def _attend(self, hidden: Tensor, layer: DecoderLayer, index: int) -> Tensor:
        kernels, memory = self._kernels, self._memory
        qkv = self._apply(hidden, layer.qkv)
        query = kernels.rotate_and_write_kv(
            qkv, self._decoder.cos_sin, memory.pages, memory.geometry, index, self._step
        )
        attended = kernels.attend(query, memory.pages, memory.geometry, index, self._step, self._rule)
        return self._apply(attended, layer.output)

    def _apply(self, x: Tensor, linear: Linear) -> Tensor:
        """x W^T + b, plus scale * (x A^T) B^T for the tokens that have an adapter."""
        out = linear.apply(x, self._kernels)
        if self._lora is not None:
            pages = self._memory.pages
            bridge = self._kernels.shrink(x, pages, linear.site, self._lora)
            self._kernels.expand(out, bridge, pages, linear.site, self._lora)
        return out


class _WeightLoader:
    """Finds a layer's tensors under their Hugging Face names and fuses those that read the same input."""

    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._shape = config.shape(dtype.itemsize)

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self._checkpoint.tensor(name, shape).to(device=self._device, dtype=self._dtype)

    def layer(self, index: int) -> DecoderLayer:
        prefix, hidden = f"model.layers.{index}", self._config.hidden_size
        config, sites = self._config, self._shape.layer_sites(index)
        biased = (config.qkv_bias, config.output_bias, config.mlp_bias, config.mlp_bias)
        return DecoderLayer(
            self.tensor(f"{prefix}.input_layernorm.weight", hidden),
            self.tensor(f"{prefix}.post_attention_layernorm.weight", hidden),
            *(self._linear(site, biased=bias) for site, bias in zip(sites, biased, strict=True)),
        )

    def _linear(self, site: LoraSite, *, biased: bool) -> Linear:
        modules = self._shape.modules[site.first_module : site.first_module + len(site.widths)]
        weights = [self.tensor(f"{m.path}.weight", m.out_width, m.in_width) for m in modules]
        biases = [self.tensor(f"{m.path}.bias", m.out_width) for m in modules] if biased else None
        return Linear(torch.cat(weights), torch.cat(biases) if biases is not None else None, site)
