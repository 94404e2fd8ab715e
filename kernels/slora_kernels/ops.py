"""The protocol between a model and its kernels. `kernel_selector` chooses the implementation at start."""

from collections.abc import Callable
from contextlib import AbstractContextManager
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
    TokenRows,
)
from slora_kernels.coded_weight import CodedWeight
from slora_kernels.layout import LoraSite
from slora_kernels.sampling_tensors import SamplingTensors

# The output of shrink, which expand reads. Its type is private to the implementation.
ShrinkOutput: TypeAlias = Any


class Kernels(Protocol):
    """The kernels of a model. T tokens, H hidden, I intermediate, Hq query heads, Hk KV heads, D head dim.

    `pages` is uint8 [num_pages, full_page_bytes]. The geometry gives the dtype and the layout of K and V in it. A step
    calls:

        step = kernels.prepare_attention(batch)     # once per step, for all layers
        q = kernels.rotate_and_write_kv(qkv, cos_sin, pages, geometry, layer, step)
        y = kernels.attend(q, pages, geometry, layer, step, rule)

        lora = kernels.prepare_lora(tiles, tables)  # once per step, if any token of it has an adapter
        shrunk = kernels.shrink(x, pages, site, lora)   # for the embedding: kernels.shrink_embedding(token_ids, ...)
        kernels.expand(out, shrunk, pages, site, lora)
        kernels.apply_affine(out, pages, site, lora)    # if tiles.has_affine

    The shrink output is opaque: pass it to `expand` without reading it. Do not modify x until `expand` has returned.
    """

    @property
    def name(self) -> str: ...

    @property
    def tile_limits(self) -> TileLimits:
        """The maximum number of tokens that a LoRA tile may hold."""

    def warm_up(self, geometry: KVGeometry) -> float:
        """Compiles the kernels that can be compiled before the first step with this geometry.

        Returns the seconds that this took.
        """

    def collecting_jobs(self) -> AbstractContextManager[Callable[[], None] | None]:
        """Within it, kernels and weights in tiles may wait until its end. Nothing else may read what they return.

        Yields a function that computes all of it once more, from what the same tensors contain then; None if nothing
        waits. Only the same thread may call it, because all that a thread computes shares scratch memory.
        """

    def prepare_attention(self, batch: AttentionBatch) -> AttentionStep:
        """Computes the data that the attention of all layers shares. Called once per step."""

    def prepare_lora(self, tiles: LoraTiles, tables: AdapterTables) -> LoraStep:
        """Computes the data that all sites with these tiles share. Called once per step."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [T, H], weight [H] -> [T, H]: x / sqrt(mean(x^2) + eps) * weight, rounded once.

        weight: of the dtype of x, or float32. Gemma's weight 1 + w needs more than the 8 significant bits of bfloat16.
        """

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None
    ) -> Tensor:
        """residual += x in place (rounded to its dtype), then returns the norm of the new residual. All are [T, H].

        delta: of the shape and dtype of x. It is added to x first, and the sum is rounded to this dtype.
        """

    def act_mul(self, gate_up: Tensor, activation: Activation, delta: Tensor | None = None) -> Tensor:
        """[T, 2I] (gate | up) -> [T, I]: activation(gate) * up. delta: added to gate_up as in `add_rms_norm`."""

    def quantized_linear(self, x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, K] times (values * scales[:, None]) transposed, plus bias -> [T, N] of x's dtype.

        values: int8 or float8_e4m3fn [N, K]. scales: float32 [N]. bias: [N] of x's dtype, or None.
        """

    def coded_linear(self, x: Tensor, weight: CodedWeight, bias: Tensor | None) -> Tensor:
        """x [T, K] times a weight of 4 bits [N, K] transposed, plus bias [N] of x's dtype or None -> [T, N] of it.

        Numbers are not rounded to x's dtype between the table and the sum.
        """

    def grouped_linear(self, x: Tensor, weight: Tensor, scales: Tensor | None, starts: Tensor) -> Tensor:
        """Multiplies each group of rows with a weight of its own: x [S, K] -> [S, N] of x's dtype.

        Group e has the rows from `starts[e]` to `starts[e + 1]` of x. Its output is x times weight[e] transposed.
        weight: [E, N, K] of x's dtype; or int8 or float8_e4m3fn with scales float32 [E, N], as for `quantized_linear`.
        starts: int32 [E + 1], ascending, from 0 to S.
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
        delta: Tensor | None = None,
    ) -> Tensor:
        """Normalises and rotates q and k, writes k and v at `kv_slots`, and returns q [T, Hq, D], which may alias qkv.

        qkv: [T, (Hq + 2 Hk) * D], or [T, (Hq + Hk) * D] if pages hold latents.
        cos_sin: float32 [max_positions, R]. Each row contains the R/2 cosines of a position, then its R/2 sines. R is
        even and at most D. The first R dimensions of a head are rotated. As in Llama, dimension i is paired with
        i + R/2: (a, b) -> (a cos - b sin, b cos + a sin). None: no rotation.
        norms: applied to each head before the rotation. None: no norm.
        delta: added to qkv first, as in `add_rms_norm`.
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

        If pages hold latents, the first `latent_width` elements of each head are the output; the others are undefined.
        KV that no query sees may hold any bytes, even NaN, without affecting the result.
        """

    def mask_logits(self, logits: Tensor, rows: Tensor, masks: Tensor) -> None:
        """Sets logits to minus infinity, in place, for the tokens that a mask does not allow.

        A logit of NaN or plus infinity may make its whole row NaN, even if the mask does not allow its token.
        logits: [B, V], float32 or the model dtype. rows: int64 [N], distinct and ascending, the rows with a mask.
        masks: int32 [N, ceil(V / 32)]; bit t % 32 of word t // 32 is 1 if token t is allowed.
        """

    def argmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the maximum of each row of logits [B, V], float32 [B], and its argmax, int64 [B].

        The logits are float32 or of the model dtype. Of several equal maxima, the first wins. If a row contains NaN,
        the maximum is NaN and the argmax is an arbitrary token.
        """

    def sample(self, logits: Tensor, max_logits: Tensor, sampling: SamplingTensors) -> Tensor:
        """Samples one token for each of the N rows in `sampling` -> int64 [N].

        logits: [B, V], float32 or the model dtype. max_logits: float32 [B], the maximum of each row.
        Temperature is applied first, then the filters, then the token is sampled. A row's result depends on that row
        only. A row whose maximum is not finite gets an arbitrary token.
        """

    def shrink(self, x: Tensor, pages: Tensor, site: LoraSite, step: LoraStep) -> ShrinkOutput:
        """Multiplies x [T, in] by A of each tile's adapter, for all modules of the site at once.

        Returns the shrink output.
        """

    def shrink_embedding(
        self, token_ids: Tensor, pages: Tensor, site: LoraSite, step: LoraStep, dtype: torch.dtype
    ) -> ShrinkOutput:
        """Like `shrink`, for the one-hot inputs of the embedding: gathers the columns of A at `token_ids`.

        token_ids: int64 [T]. dtype: the model's dtype.
        """

    def expand(
        self, out: Tensor, shrunk: ShrinkOutput, pages: Tensor, site: LoraSite, step: LoraStep
    ) -> None:
        """out [T, sum(site.widths)] += weight * scale * shrunk times B, module by module, in place."""

    def apply_affine(self, out: Tensor, pages: Tensor, site: LoraSite, step: LoraStep) -> None:
        """out [T, sum(site.widths)] = out * scales + weight * offsets, column by column, in place.

        Modules without scales and offsets do not change. The result is rounded once.
        """

    def token_logits(self, hidden: Tensor, rows: TokenRows) -> Tensor:
        """hidden [n, H] times the rows that an adapter has in place of rows of the head -> [n, rows.count]."""

    def write_delta(
        self,
        delta: Tensor,
        shrunk: ShrinkOutput,
        pages: Tensor,
        site: LoraSite,
        step: LoraStep,
    ) -> None:
        """delta [T, sum(site.widths)] = weight * scale * shrunk times B, in the model's dtype.

        Adding this delta in float32 gives the same bits as `expand`. Rows in no tile must be zero, and remain zero.
        """
