"""Latent attention of transformers models: pages hold the latent instead of whole keys and values.

In latent attention (arXiv 2405.04434, section 2.1), a token has one latent c for all heads, and a rotated key r that
the heads share. Head h has the key [K_h c, r] and the value V_h c. The matrices K_h and V_h are the rows of one linear.
Attention needs only c and r of earlier tokens:

    score of the query [q, p]:  q (K_h c) + p r = (q K_h) c + p r       The head's query becomes [q K_h, p].
    sum of weighted values:     sum_j w_j V_h c_j = V_h (sum_j w_j c_j)   The latent is the value of all heads.

So a page has one row [c, r] of each token, which all heads read. A module is recognised by its method `expand_kv`,
which gets latents and returns keys and values that the module passes to attention unchanged. The rest of the module's
forward pass stays: its rotation, its scale, and adapters on its other linears. `LatentLayer.check` compares the
products with those of `expand_kv`.

An adapter that changes the linear changes K_h and V_h for all tokens of a sequence: the products get its factors, and
the scales and offsets of DoRA and of trained biases (`slora.models.affine`). An offset of keys adds the same number to
all scores of a query, which does not change their softmax, so it is left out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from slora.core.errors import ConfigError
from slora.models.lora_deltas import LoraDeltas
from slora.models.mixture_layers import FindStep
from slora.models.weights.packed_weight import PackedWeight, pack_weight
from slora_kernels.layout import LatentShape, LoraSite
from slora_kernels.torch.lora_matmuls import HostLoraTile, read_rows
from slora_kernels.torch.row_blocks import multiply_heads, multiply_rows

_LINEAR, _EXPAND = "kv_b_proj", "expand_kv"
# Kernels may compute as many heads of one KV head together.
_MOST_HEADS = 128
# Limits of the difference of two ways to compute the same numbers, relative to their root mean square.
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}
_CHECKED_TOKENS = 5


class LatentTrace:
    """Records how modules of a model on the meta device expand latents in a forward pass."""

    def __init__(self, model: nn.Module) -> None:
        # By the module's id: the latents and rotated keys, and the keys and values.
        self._calls: dict[int, tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = {}
        for module in model.modules():
            if isinstance(getattr(module, _LINEAR, None), nn.Linear) and hasattr(module, _EXPAND):
                setattr(module, _EXPAND, partial(self._record, module, getattr(module, _EXPAND)))

    def _record(self, module: nn.Module, expand: Callable[..., Any], *latents: Tensor, **options: Any) -> Any:
        self._calls.pop(id(module), None)
        expanded = expand(*latents, **options)
        if not options and len(latents) == len(expanded) == len(("latent", "rotated")):
            self._calls[id(module)] = latents, expanded
        return expanded

    def describe(
        self, module: Any, path: str, query: Tensor, key: Tensor, value: Tensor
    ) -> LatentShape | None:
        """Describes the latents of the module at `path`, which calls attention. None if it does not attend to what it
        expanded. The path of the linear is the full one.

        query, key: [1, H, T, D]. value: [1, H, T, Dv].
        """
        latents, expanded = self._calls.get(id(module), ((), ()))
        if not latents or expanded[0] is not key or expanded[1] is not value or key.shape != query.shape:
            return None
        (_, num_heads, num_tokens, head_dim), linear = key.shape, getattr(module, _LINEAR)
        (width, rope_width), value_width = (part.shape[-1] for part in latents), value.shape[3]
        key_width = head_dim - rope_width
        sizes = linear.in_features, linear.out_features
        widths = width, rope_width, key_width, value_width
        is_known = (
            [part.shape for part in latents] == [(1, 1, num_tokens, width), (1, 1, num_tokens, rope_width)]
            and sizes == (width, num_heads * (key_width + value_width))
            and linear.bias is None
            and num_heads <= _MOST_HEADS
            # Some CPUs multiply elements of half precision in pairs.
            and all(number > 0 and number % 2 == 0 for number in widths)
        )
        return LatentShape(f"{path}.{_LINEAR}", width, rope_width, key_width, num_heads) if is_known else None


@dataclass(frozen=True, slots=True)
class _Change:
    """What an adapter changes of the linear, for the rows in `span`. Without factors or scales, these are None."""

    span: slice
    a: Tensor | None  # float32 [rank, width].
    b: Tensor | None  # float32 [H, key_width + value_width, rank].
    scale: float  # Of the product of the factors.
    scales: Tensor | None  # float32 [H, key_width + value_width], of the outputs.
    offsets: Tensor | None


Changes = list[list[_Change]]


class LatentLayer:
    """The latent attention of one layer. Within a step, its module attends to latents.

    site: of the linear that expands latents. heads: those that this rank computes.
    """

    def __init__(
        self, module: Any, latent: LatentShape, heads: range, site: LoraSite, find_step: FindStep
    ) -> None:
        self._expand, self._find_step = getattr(module, _EXPAND), find_step
        self._latent, self._site = latent, site
        self._num_heads, self._heads = latent.num_heads, slice(heads.start, heads.stop)
        stack = getattr(module, _LINEAR).weight.data.view(self._num_heads, -1, latent.width)[self._heads]
        self._keys, self._values = stack[:, : latent.key_width], stack[:, latent.key_width :]
        self._packed_keys, self._packed_values = _pack_heads(self._keys), _pack_heads(self._values.mT)
        setattr(module, _EXPAND, self.keep)

    def keep(self, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """Takes the place of the module's `expand_kv`.

        latent [1, 1, T, width], rotated [1, 1, T, rope_width] -> keys and values. In a step, those of a page.
        """
        if self._find_step() is None:
            keys, values = self._expand(latent, rotated)
            return keys, values
        return torch.cat((latent, rotated), dim=-1), latent

    def read_changes(self, deltas: LoraDeltas) -> Changes:
        """Reads what the step's adapters change of the linear: for each layer of LoRA work, that of its tiles."""
        return [
            [self._read_change(tile, deltas) for tile in tiles] for tiles in deltas.find_tiles(self._site)
        ]

    def _read_change(self, tile: HostLoraTile, deltas: LoraDeltas) -> _Change:
        (module,), (width,) = self._site.module_ids, self._site.widths
        (rank, _, first_b), first_a = tile.modules[module], tile.groups[self._site.group][1]
        is_affine, first_scale = tile.affine[module][:2]
        a = b = scales = offsets = None
        if rank:
            dtype = self._keys.dtype
            a = read_rows(deltas.pages, tile.pages, first_a, rank, self._site.in_width, dtype).float()
            rows = read_rows(deltas.pages, tile.pages, first_b, rank, width, dtype).float()
            b = rows.view(rank, self._num_heads, -1)[:, self._heads].permute(1, 2, 0)
        if is_affine:
            rows = read_rows(deltas.pages, tile.pages, first_scale, 2, width, torch.float32)
            scales, offsets = rows.reshape(2, self._num_heads, -1)[:, self._heads]
            offsets = offsets * tile.weight
        span = slice(tile.first, tile.first + tile.tokens)
        return _Change(span, a, b, tile.weight * tile.scales[module], scales, offsets)

    def absorb(self, query: Tensor, changes: Changes) -> Tensor:
        """Turns queries of keys [T, H, key_width + rope_width] into those of latents [T, H, width + rope_width]."""
        key_width, own, parts = self._latent.key_width, query[..., : self._latent.key_width], []
        if any(change.scales is not None for tiles in changes for change in tiles):
            own = own.clone()
        # A later layer of adapters changes the output of the ones before it, so its scales are the first ones here.
        for change in (change for tiles in reversed(changes) for change in tiles):
            span = change.span
            if change.scales is not None:
                own[span] = (own[span].float() * change.scales[:, :key_width]).to(own.dtype)
            if change.a is not None and change.b is not None:
                shrunk = multiply_heads(own[span].float(), change.b[:, :key_width])
                parts.append((span, _multiply_rows(shrunk, change.a.T) * change.scale))
        latent = _multiply_heads(own, self._keys, self._packed_keys)
        for span, delta in parts:
            latent[span] += delta.to(latent.dtype)
        return torch.cat((latent, query[..., key_width:]), dim=2)

    def expand_values(self, sums: Tensor, changes: Changes) -> Tensor:
        """Turns sums of latents [T, H, width] into sums of values [T, H, value_width]."""
        key_width = self._latent.key_width
        out = _multiply_heads(sums, self._values.mT, self._packed_values)
        for change in (change for tiles in changes for change in tiles):
            span = change.span
            if change.a is not None and change.b is not None:
                shrunk = _multiply_rows(sums[span].float(), change.a)
                delta = multiply_heads(shrunk, change.b[:, key_width:].mT)
                out[span] += (delta * change.scale).to(out.dtype)
            if change.scales is not None and change.offsets is not None:
                scaled = out[span].float() * change.scales[:, key_width:]
                out[span] = (scaled + change.offsets[:, key_width:]).to(out.dtype)
        return out

    @torch.inference_mode()
    def check(self, path: str) -> None:
        """Raises ConfigError if the module's keys and values give other scores and sums for random tokens."""
        latent, stack = self._latent, self._keys
        random = torch.Generator().manual_seed(0)

        def draw(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=random).to(stack.device, stack.dtype)

        tokens, heads = _CHECKED_TOKENS, len(stack)
        latents, rotated = draw(1, 1, tokens, latent.width), draw(1, 1, tokens, latent.rope_width)
        query, weights = (
            draw(tokens, heads, latent.key_width + latent.rope_width),
            draw(tokens, heads, tokens),
        )
        keys, values = (part[:, self._heads] for part in self._expand(latents, rotated))
        rows = torch.cat((latents, rotated), dim=-1)[0, 0].float()
        sums = torch.einsum("tns,sc->tnc", weights.float(), latents[0, 0].float()).to(stack.dtype)
        for expected, found in (
            (
                torch.einsum("tnd,nsd->tns", query.float(), keys[0].float()),
                torch.einsum("tnd,sd->tns", self.absorb(query, []).float(), rows),
            ),
            (
                torch.einsum("tns,nsd->tnd", weights.float(), values[0].float()),
                self.expand_values(sums, []).float(),
            ),
        ):
            error = (found - expected).square().mean()
            if not error <= _TOLERANCES[stack.dtype] ** 2 * expected.square().mean():
                raise ConfigError(
                    f"{path} can't be served: its class expands latents in another way than by the rows of {_LINEAR}"
                )


def _pack_heads(weight: Tensor) -> tuple[PackedWeight, ...]:
    """Packs the weights of heads [H, K, N] for our own products. Without them, `multiply_heads` is faster."""
    packed = []
    for head in weight:
        part = pack_weight(head.T.contiguous())
        if not isinstance(part, PackedWeight) or part.tiles is None:
            return ()
        packed.append(part)
    return tuple(packed)


def _multiply_heads(x: Tensor, weight: Tensor, packed: tuple[PackedWeight, ...]) -> Tensor:
    """x [T, H, K] times weight [H, K, N] -> [T, H, N]. packed: the same weight, or nothing."""
    if not packed:
        return multiply_heads(x, weight)
    rows = x.transpose(0, 1).contiguous()
    return torch.stack([part.multiply(own) for part, own in zip(packed, rows, strict=True)], dim=1)


def _multiply_rows(x: Tensor, weight: Tensor) -> Tensor:
    """x float32 [T, H, K], weight [N, K] -> [T, H, N]: x W^T."""
    rows = x.reshape(-1, x.shape[2])
    weight = weight.contiguous()
    product = multiply_rows(rows, weight) if x.device.type == "cpu" else rows @ weight.T
    return product.view(*x.shape[:2], -1)
