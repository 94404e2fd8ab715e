"""The protocol between a model and its kernels. `kernel_selector` chooses the implementation at start."""

from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from slora_kernels.batch import (
    Activation,
    AdapterTables,
    AttentionBatch,
    AttentionRule,
    AttentionStep,
    KVGeometry,
    LoraStep,
    LoraTiles,
    QueryKeyNorm,
    TileLimits,
)
from slora_kernels.draws import Draws
from slora_kernels.layout import LoraSite

# An implementation's own.
Bridge: TypeAlias = Any


class Kernels(Protocol):
    """Tensors in, tensors out. T tokens, H hidden, I intermediate, Hq query heads, Hk KV heads, D head dim.

    `pages` is uint8 [num_pages, full_page_bytes]; what K and V are in it, the geometry says. A step goes:

        step = kernels.prepare_attention(batch)     # once a step, for all layers
        q = kernels.rotate_and_write_kv(qkv, cos_sin, pages, geometry, layer, step)
        y = kernels.attend(q, pages, geometry, layer, step, rule)

        lora = kernels.prepare_lora(tiles, tables)  # once a step, if anybody in it has an adapter
        bridge = kernels.shrink(x, pages, site, lora)   # of the embedding: kernels.look_up(token_ids, ...)
        kernels.expand(out, bridge, pages, site, lora)

    The bridge between shrink and expand belongs to the implementation: pass it on, never look into it, and leave x as
    it is until then.
    """

    @property
    def name(self) -> str: ...

    @property
    def tile_limits(self) -> TileLimits:
        """How the tokens of a step are to be cut into LoRA tiles."""

    def warm_up(self, geometry: KVGeometry) -> float:
        """Compiles what a first step of these formats would otherwise wait for; returns the seconds that it took."""

    def prepare_attention(self, batch: AttentionBatch) -> AttentionStep:
        """Works out, once a step, what the attention of all layers shares."""

    def prepare_lora(self, tiles: LoraTiles, tables: AdapterTables) -> LoraStep:
        """Works out, once a step, what all sites share whose tokens are cut into these tiles."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [T, H], weight [H] -> [T, H]: x / sqrt(mean(x^2) + eps) * weight, rounded once.

        weight: the dtype of x, or float32 (Gemma's 1 + w is not a number of 8 bits).
        """

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual += x in place (rounded to its dtype), then the norm of the new residual. All [T, H]."""

    def act_mul(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """[T, 2I] (gate | up) -> [T, I]: activation(gate) * up."""

    def quantized_linear(self, x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, K] times (values * scales[:, None]) transposed, plus bias -> [T, N] of x's dtype.

        values int8 or float8_e4m3fn [N, K], scales float32 [N], bias [N] of x's dtype or None.
        """

    def rotate_and_write_kv(
        self,
        qkv: Tensor,
        cos_sin: Tensor | None,
        pages: Tensor,
        geometry: KVGeometry,
        layer: int,
        step: AttentionStep,
        norms: QueryKeyNorm | None = None,
    ) -> Tensor:
        """Norms and rotates q and k, writes k and v at `kv_slots`, returns q [T, Hq, D], which may alias qkv.

        qkv [T, (Hq + 2 Hk) * D]; cos_sin float32 [max_positions, R], R <= D even, cos (R/2) then sin (R/2) of
        each position. The first R dimensions of a head are rotated, halves of R as Llama does: (a, b) ->
        (a cos - b sin, b cos + a sin); None: nothing is. norms: of each head, before it is rotated.
        """

    def attend(
        self,
        q: Tensor,
        pages: Tensor,
        geometry: KVGeometry,
        layer: int,
        step: AttentionStep,
        rule: AttentionRule,
    ) -> Tensor:
        """Causal attention of q [T, Hq, D] over the pages of each sequence -> [T, Hq * D].

        Pages that nobody sees, past a context or behind a window, are not read into a result.
        """

    def likeliest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits [B, V], float32 or the model dtype -> the greatest of each row, float32 [B], and its token, int64 [B].

        The first of equals. A row with a NaN has NaN for its greatest, and any token.
        """

    def draw(self, logits: Tensor, peaks: Tensor, draws: Draws) -> Tensor:
        """logits [B, V], float32 or the model dtype, and the greatest of each row, float32 [B] -> a token of each row
        that draws, int64 [N].

        Temperature, then the filters, then chance. A row depends on nothing but itself; one whose peak is not finite
        gets any token.
        """

    def shrink(self, x: Tensor, pages: Tensor, site: LoraSite, step: LoraStep) -> Bridge:
        """x [T, in] times A of each tile's adapter, all modules of the site at once -> the bridge."""

    def look_up(
        self, token_ids: Tensor, pages: Tensor, site: LoraSite, step: LoraStep, dtype: torch.dtype
    ) -> Bridge:
        """Columns of A of each tile's adapter for its tokens int64 [T], whose x are one-hot -> the bridge.

        dtype: the model's. What is then expanded is the embedding's output.
        """

    def expand(self, out: Tensor, bridge: Bridge, pages: Tensor, site: LoraSite, step: LoraStep) -> None:
        """out [T, sum(site.widths)] += weight * scale * bridge times B, module by module, in place."""
