"""The byte layout of the page pool, shared by the loader that fills pages and the kernels that read them.

The pool is one allocation `[num_pages, num_kv_layers * layer_page_bytes]`. Only layers with attention have a part of a
page. A page holds one of three things:

- A KV block: for each layer with attention, K and V of `block_tokens` tokens as
  `[2, num_kv_heads, block_tokens, head_dim]`. The elements are of the model's dtype, or 8-bit floats followed by their
  scales (`KVFormat`). If pages hold latents (`LatentShape`), it has one row of each token, as `[1, 1, block_tokens,
  head_dim]`.
- A part of the state that the recurrent layers of a model keep for one sequence.
- A part of a packed adapter. A packed adapter is one long byte string, cut at page boundaries. A cut may fall inside a
  layer.

Tables of page ids say where KV blocks and adapters lie. `ModelShape` describes any decoder by the linears of a layer
and the groups of linears that read the same input.

A packed adapter is layer-major. In each layer, the part of a group begins with the rows of A of all its modules, so
that one shrink serves the whole group. The rows of transposed B follow, module by module. The input embedding
and the output head come last, as two groups of one module each. A and transposed B are in the dtype that is served. The
scales of LoRA are not multiplied into them: `PackedAdapter.scales` (`slora_adapters/peft/packing.py`) has one for each
module.

A linear of E experts is one module. Its A has the rows of expert 0, then those of expert 1, and so on, and so has its
transposed B. The rank of such a module is that of one expert.

DoRA and trained biases change a module's output column by column: the output is multiplied by a scale, and an offset is
added (`Affine`). Two rows of float32 behind the module's B hold them.

An adapter may replace rows of the embedding and of the head: those of some tokens, or all. It may also have a head of
its own that classifies texts, with a row for each label. They come behind all groups: for each of the three, the
token ids or label ids (int32, ascending), then a row of the hidden size for each id.

An adapter may also replace weights of norms. They come last: for each replaced norm a row of float32, and a second one
for its bias if it has one.

Each row is padded to whole segments of `SEGMENT_BYTES`. A page holds a whole number of segments, so a segment never
crosses a page boundary. A kernel looks up one page id per segment, whatever the rank. Nothing is padded to a maximum
rank.

Worked example: Llama-3.1-8B (32 layers) in bf16 with blocks of 16 tokens. K and V of a block take 2 * 8 * 16 * 128 * 2
bytes = 64 KiB per layer. A page is 2 MiB. A rank-16 adapter on all seven linears is 80 MiB, or 40 pages: as much as the
KV of 640 tokens. With KV in fp8 a page is 32.5 KiB per layer: 32 KiB of elements and 512 bytes of scales. The size of a
packed adapter does not depend on the KV format.

This module does not import torch, because the loader and API processes import it.
"""

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from slora_kernels.kv_format import KVFormat

LAYOUT_VERSION = 4
SEGMENT_BYTES = 256
# The largest `LoraTargets.num_added`. Logits of all rows with added tokens have this many columns more than the base's,
# so that a row is computed alike in every batch.
MAX_ADDED_ROWS = 1024
# The maximum number of modules that one launch of a LoRA kernel handles.
MAX_GROUP_MODULES = 3
# Linears whose output does not change K and V of the same layer.
_WITHOUT_KV = (
    *("q_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj", "shared_expert_gate"),
    *("gate", "router"),
)
# The router of a mixture of experts in our own decoder, and the linears of all experts.
ROUTER_PATH = "mlp.gate"
EXPERT_PATHS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
# What a linear is for PEFT. `router`: a module with a parameter `weight`. `experts`: a parameter with the weights of
# all experts. PEFT adapts both by the names of parameters (`target_parameters`), because they are no linears of torch.
LinearRole = Literal["linear", "router", "experts"]
# How ranks divide a linear, see `slora_kernels.partition`. "by_name": as the linear of our decoder with this name.
LinearDivision = Literal["by_name", "whole", "gathered", "rows", "halves", "columns"]

Int32Array = npt.NDArray[np.int32]


# The largest finite e4m3 value, and the bytes of one scale. Scales add 1.6% to a head of 128 elements.
LARGEST_E4M3 = 448.0
SCALE_BYTES = 2


@dataclass(frozen=True, slots=True)
class KVBlockLayout:
    """The layout of one layer's part of a KV block.

    The elements of K and V come first. If the format has scales, `[2, num_kv_heads, block_tokens]` of them begin at
    byte `scales_start`. Padding fills the rest up to `num_bytes`.
    """

    scales_start: int
    num_bytes: int


@cache
def lay_out_kv_block(
    num_kv_heads: int,
    head_dim: int,
    block_tokens: int,
    element_bytes: int,
    kv_format: KVFormat,
    num_sides: int = 2,
) -> KVBlockLayout:
    """Computes the layout of one layer in a KV block. A block with scales or latents is padded to whole segments.

    element_bytes: size of one element of the model's dtype. num_sides: 2 for keys and values, 1 if the values are in
    the keys.
    """
    vectors = num_sides * num_kv_heads * block_tokens
    if kv_format is KVFormat.MODEL:
        numbers = size = vectors * head_dim * element_bytes
        is_padded = num_sides == 1
    else:
        numbers = vectors * head_dim
        size, is_padded = numbers + vectors * SCALE_BYTES, True
    return KVBlockLayout(numbers, -(-size // SEGMENT_BYTES) * SEGMENT_BYTES if is_padded else size)


@dataclass(frozen=True, slots=True)
class LinearShape:
    """The shape of one linear.

    path: its name in PEFT's spelling. In `ModelShape.linears` it is relative to the layer ("self_attn.q_proj"). In
    `ModelShape.modules` it is the full path from the model's root.
    num_experts: the number of experts that have such a linear. 1: it is not a linear of experts.
    is_transposed: whether the base model stores its weight as [in, out] and PEFT takes it for [out, in], as in GPT-2
        and in the experts of Llama 4.
    role: see `LinearRole`. The path of experts is that of their parameter.
    has_halves: whether it is the gate and the up projection of experts, one after the other.
    division: see `LinearDivision`.
    """

    path: str
    in_width: int
    out_width: int
    has_bias: bool = False
    num_experts: int = 1
    is_transposed: bool = False
    role: LinearRole = "linear"
    has_halves: bool = False
    division: LinearDivision = "by_name"

    @property
    def weight_path(self) -> str:
        """The path of its weight, which `target_parameters` may name."""
        return self.path if self.role == "experts" else f"{self.path}.weight"


@dataclass(frozen=True, slots=True)
class NormShape:
    """A norm whose weight is a vector.

    path: as in `LinearShape`. adds_one: the norm multiplies by 1 + weight.
    """

    path: str
    width: int
    has_bias: bool = False
    adds_one: bool = False


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Latent attention (arXiv 2405.04434, section 2.1). Keys and values of all heads are products of one vector of each
    token, the latent, and the weight of a linear. The heads also share the rotated part of the key.

    linear: path of this linear, as in `LinearShape`. Its output has the keys and the values of a head side by side.
    width, rope_width: number of elements of the latent, and of the rotated part.
    key_width: number of the other elements of a head's key.
    num_heads: number of heads that the linear expands. A rank may compute some of them.
    """

    linear: str
    width: int
    rope_width: int
    key_width: int
    num_heads: int


@dataclass(frozen=True, slots=True)
class LoraSite:
    """A group of modules that read the same input. One shrink and one expand serve all of them.

    group: index of the site in `AdapterLayout.groups`.
    kind: index of the site's group in `ModelShape.groups`. The embedding and the head have no group: -1.
    first_module: index of the site's first module in `AdapterLayout.modules`. The other modules follow.
    widths: number of output columns of each module.
    num_experts: see `LinearShape`.
    """

    group: int
    kind: int
    first_module: int
    in_width: int
    widths: tuple[int, ...]
    num_experts: int = 1

    @property
    def module_ids(self) -> range:
        return range(self.first_module, self.first_module + len(self.widths))


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a decoder that decide the layout of pages and adapters.

    linears: the linears that layers have, in the order that all tables use.
    groups: for each group, the indexes of consecutive linears that read the same input.
    groups_of_layer: for each layer, the indexes of the groups that it has. Empty: each layer has all groups.
    num_layers_without_kv: number of layers without attention. They have no part in a KV block. It is negative if layers
        have attention several times, each with a part of its own.
    layers_path, embedding_path, head_path: where PEFT finds the layers, the embedding and the head.
    head_has_bias: whether the head has a bias.
    ties_head: whether the config ties the head to the embedding.
    latent: set if pages hold latents. A token then has one row in a page, with the latent and the rotated part of the
        key: the key of the one KV head. The latent is its value.
    has_indexers: whether attention reads the tokens that modules named `indexer` select.
    layer_norms: the norms that every layer has. final_norm: the norm before the head, with its full path. Adapters
        replace only these norms.

    A module is one linear of one layer, or the embedding, or the head. A site is one group of one layer, or the
    embedding, or the head. Modules and sites are numbered layer by layer. The embedding and the head come last.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    element_bytes: int
    linears: tuple[LinearShape, ...]
    groups: tuple[tuple[int, ...], ...]
    groups_of_layer: tuple[tuple[int, ...], ...] = ()
    num_layers_without_kv: int = 0
    layers_path: str = "model.layers"
    embedding_path: str = "model.embed_tokens"
    head_path: str = "lm_head"
    head_has_bias: bool = False
    ties_head: bool = False
    layer_norms: tuple[NormShape, ...] = ()
    final_norm: NormShape | None = None
    latent: LatentShape | None = None
    has_indexers: bool = False

    def __post_init__(self) -> None:
        members = [linear for group in self.groups for linear in group]
        assert members == list(range(len(self.linears))), (
            f"groups {self.groups} do not cover all linears in order"
        )
        assert all(0 < len(group) <= MAX_GROUP_MODULES for group in self.groups), (
            f"a group is too long: {self.groups}"
        )
        widths = [{self.linears[m].in_width for m in group} for group in self.groups]
        assert all(len(width) == 1 for width in widths), f"a group reads inputs of different widths: {widths}"
        assert all(len(g) == 1 for g in self.groups if self.linears[g[0]].num_experts > 1), (
            f"a linear of experts has no group of its own: {self.groups}"
        )
        assert len(self.groups_of_layer) in (0, self.num_layers), (
            f"groups_of_layer has {len(self.groups_of_layer)} entries for {self.num_layers} layers"
        )

    def __hash__(self) -> int:
        # The loader looks up cached tables for each tensor of an adapter, with the model's shape as the key. Hashing
        # all linears of the shape each time took most of the time of reading an adapter's header. The hash therefore
        # covers only a few sizes.
        return hash((self.num_layers, self.hidden_size, self.vocab_size, self.layers_path))

    @staticmethod
    def from_plain(fields: Mapping[str, Any]) -> "ModelShape":
        """Rebuilds a shape from `dataclasses.asdict` after a round trip through JSON or msgpack.

        Raises KeyError or TypeError if a field is missing or unknown.
        """
        linears = tuple(LinearShape(**linear) for linear in fields["linears"])
        groups = tuple(tuple(group) for group in fields["groups"])
        of_layer = tuple(tuple(groups) for groups in fields["groups_of_layer"])
        norms = tuple(NormShape(**norm) for norm in fields["layer_norms"])
        final = fields["final_norm"] and NormShape(**fields["final_norm"])
        latent = fields["latent"] and LatentShape(**fields["latent"])
        return ModelShape(
            **{
                **fields,
                "linears": linears,
                "groups": groups,
                "groups_of_layer": of_layer,
                "layer_norms": norms,
                "final_norm": final,
                "latent": latent,
            }
        )

    def count_added_rows(self, sizes: Sequence[int]) -> int:
        """How many rows an embedding or head of these sizes has behind the base model's; 0 if it is no resized one."""
        is_matrix = len(sizes) == 2 and sizes[1] == self.hidden_size
        more = sizes[0] - self.vocab_size if is_matrix else 0
        return more if 0 < more <= MAX_ADDED_ROWS else 0

    @property
    def num_kv_layers(self) -> int:
        return self.num_layers - self.num_layers_without_kv

    @property
    def num_modules(self) -> int:
        return len(self.modules)

    @property
    def num_sites(self) -> int:
        return len(self.sites)

    @property
    def num_weights(self) -> int:
        """The number of elements of all linears' weights. Experts, embedding and head are not counted."""
        return sum(m.in_width * m.out_width for m in self.modules[:-2] if m.num_experts == 1)

    @property
    def attention_flop(self) -> float:
        """The FLOP of one token's attention to one token: two products, with its K and with its V, in each layer."""
        return 4.0 * self.num_kv_layers * self.num_heads * self.head_dim

    @property
    def modules(self) -> tuple[LinearShape, ...]:
        """All modules with their full paths. The embedding's in_width is the vocabulary size."""
        return _list_modules(self)

    @property
    def sites(self) -> tuple[LoraSite, ...]:
        return _list_sites(self)

    @property
    def norms(self) -> tuple[NormShape, ...]:
        """All norms with their full paths, layer by layer. The final norm comes last."""
        return _list_norms(self)

    def norm_id(self, layer: int, path: str) -> int:
        """The index in `norms` of a norm of `layer_norms`."""
        return _find_norm_ids(self)[layer, path]

    @property
    def embedding_module(self) -> int:
        return self.num_modules - 2

    @property
    def head_module(self) -> int:
        return self.num_modules - 1

    @property
    def embedding_site(self) -> LoraSite:
        return self.sites[-2]

    @property
    def head_site(self) -> LoraSite:
        return self.sites[-1]

    def changes_kv(self, adapted: Collection[int], norms: Collection[int] = ()) -> bool:
        """Whether an adapter that changes the modules `adapted` and the norms `norms` changes K or V of any layer.

        The head does not affect K or V. In the last layer, only the linears that compute K and V affect them. Modules
        of earlier layers change the hidden states that the last layer reads.
        """
        last = self.num_layers - 1
        free = {
            self.module_id(last, index)
            for index in self.layer_linears(last)
            if self.linears[index].path.rpartition(".")[2] in _WITHOUT_KV
            # A second attention in the layer reads what the first one changes.
            and self.num_kv_layers <= self.num_layers
        }
        if self.final_norm is not None:
            norms = set(norms) - {len(self.norms) - 1}
        return bool(norms) or not set(adapted) <= free | {self.head_module}

    def layer_groups(self, layer: int) -> tuple[int, ...]:
        """The indexes in `groups` of the groups that the layer has."""
        return self.groups_of_layer[layer] if self.groups_of_layer else tuple(range(len(self.groups)))

    def layer_linears(self, layer: int) -> tuple[int, ...]:
        """The indexes in `linears` of the linears that the layer has."""
        return tuple(index for group in self.layer_groups(layer) for index in self.groups[group])

    def module_id(self, layer: int, linear: int) -> int:
        """The id of module `linears[linear]` in a layer that has it."""
        return _find_first_ids(self)[layer][0] + self.layer_linears(layer).index(linear)

    def layer_sites(self, layer: int) -> tuple[LoraSite, ...]:
        """The sites of one layer, in the order of `groups`."""
        first = _find_first_ids(self)[layer][1]
        return self.sites[first : first + len(self.layer_groups(layer))]

    @property
    def num_sides(self) -> int:
        """See `lay_out_kv_block`."""
        return 2 if self.latent is None else 1

    def layer_page_bytes(self, block_tokens: int, kv_format: KVFormat = KVFormat.MODEL) -> int:
        """Bytes of one page in one layer (K and V of one block).

        Raises ValueError if the page is not a whole number of segments.
        """
        sizes = self.num_kv_heads, self.head_dim, block_tokens, self.element_bytes, kv_format
        size = lay_out_kv_block(*sizes, self.num_sides).num_bytes
        if size % SEGMENT_BYTES:
            raise ValueError(
                f"a page of {block_tokens} tokens takes {size} bytes a layer, which is not a multiple of "
                f"{SEGMENT_BYTES}; choose a larger block size (block_tokens)"
            )
        return size

    def row_segments(self, width: int) -> int:
        """Number of segments of one adapter row of `width` elements."""
        return -(-width * self.element_bytes // SEGMENT_BYTES)


def name_module(path: str) -> str:
    """The name that the module at `path` shares with those of other layers, such as "q_proj"."""
    *parents, name = path.split(".")
    return f"experts.{name}" if parents[-1:] == ["experts"] else name


@cache
def _find_first_ids(shape: ModelShape) -> tuple[tuple[int, int], ...]:
    """For each layer, the ids of its first module and of its first site."""
    firsts, module, site = [], 0, 0
    for layer in range(shape.num_layers):
        firsts.append((module, site))
        module += len(shape.layer_linears(layer))
        site += len(shape.layer_groups(layer))
    return tuple(firsts)


@cache
def _list_modules(shape: ModelShape) -> tuple[LinearShape, ...]:
    linears = (
        replace(linear, path=f"{shape.layers_path}.{layer}.{linear.path}")
        for layer in range(shape.num_layers)
        for linear in (shape.linears[index] for index in shape.layer_linears(layer))
    )
    return (
        *linears,
        LinearShape(shape.embedding_path, shape.vocab_size, shape.hidden_size),
        LinearShape(shape.head_path, shape.hidden_size, shape.vocab_size, shape.head_has_bias),
    )


@cache
def _list_norms(shape: ModelShape) -> tuple[NormShape, ...]:
    of_layers = (
        replace(norm, path=f"{shape.layers_path}.{layer}.{norm.path}")
        for layer in range(shape.num_layers)
        for norm in shape.layer_norms
    )
    return (*of_layers, *(() if shape.final_norm is None else (shape.final_norm,)))


@cache
def _find_norm_ids(shape: ModelShape) -> Mapping[tuple[int, str], int]:
    places = ((layer, norm.path) for layer in range(shape.num_layers) for norm in shape.layer_norms)
    return {place: index for index, place in enumerate(places)}


@cache
def _list_sites(shape: ModelShape) -> tuple[LoraSite, ...]:
    modules = shape.modules
    kinds = [group for layer in range(shape.num_layers) for group in shape.layer_groups(layer)]
    sites, first = [], 0
    for site, kind in enumerate([*kinds, -1, -1]):
        size = 1 if kind < 0 else len(shape.groups[kind])
        members = modules[first : first + size]
        widths = tuple(module.out_width for module in members)
        sites.append(LoraSite(site, kind, first, members[0].in_width, widths, members[0].num_experts))
        first += size
    return tuple(sites)


def llama_shape(
    num_layers: int,
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    intermediate_size: int,
    vocab_size: int,
    element_bytes: int,
) -> ModelShape:
    """Returns the shape of a decoder whose layers have Llama's seven linears, as in most model families."""
    query, key = num_heads * head_dim, num_kv_heads * head_dim
    return ModelShape(
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        element_bytes=element_bytes,
        linears=(
            LinearShape("self_attn.q_proj", hidden_size, query),
            LinearShape("self_attn.k_proj", hidden_size, key),
            LinearShape("self_attn.v_proj", hidden_size, key),
            LinearShape("self_attn.o_proj", query, hidden_size),
            LinearShape("mlp.gate_proj", hidden_size, intermediate_size),
            LinearShape("mlp.up_proj", hidden_size, intermediate_size),
            LinearShape("mlp.down_proj", intermediate_size, hidden_size),
        ),
        groups=((0, 1, 2), (3,), (4, 5), (6,)),
    )


def fuse_groups(shape: ModelShape, *paths: str) -> ModelShape:
    """Returns the shape of the same decoder with the linears of each group fused into one linear.

    The fused linear of group g is called `paths[g]`. Its output is the concatenation of the group's outputs.
    """
    members = [[shape.linears[m] for m in group] for group in shape.groups]
    linears = tuple(
        LinearShape(path, group[0].in_width, sum(linear.out_width for linear in group), group[0].has_bias)
        for path, group in zip(paths, members, strict=True)
    )
    return replace(shape, linears=linears, groups=tuple((m,) for m in range(len(linears))))


def mix_experts(
    shape: ModelShape, sparse_layers: Collection[int], num_experts: int, width: int, shared_width: int | None
) -> ModelShape:
    """Returns the shape of a Llama-like decoder in which experts replace the MLP of `sparse_layers`.

    A sparse layer ends with the router and the two linears of the experts. So a step whose adapters do not change them
    has no work there.

    width: intermediate width of an expert.
    shared_width: intermediate width of the expert that computes all tokens of a sparse layer, and whose output is
    multiplied by a gate. None: there is no such expert.
    """
    groups = [[shape.linears[index] for index in group] for group in shape.groups]
    attention, dense, shared = groups[:2], groups[2:], []
    if len(sparse_layers) == shape.num_layers:
        dense = []
    if shared_width is not None:
        hidden, path = shape.hidden_size, "mlp.shared_expert"
        biased = shape.linears[-1].has_bias
        gate, up = (
            LinearShape(f"{path}.{name}", hidden, shared_width, biased) for name in ("gate_proj", "up_proj")
        )
        down = LinearShape(f"{path}.down_proj", shared_width, hidden, biased)
        shared = [[gate, up], [down], [LinearShape("mlp.shared_expert_gate", hidden, 1)]]
    hidden, (gate_up_path, down_path) = shape.hidden_size, EXPERT_PATHS
    expert = LinearShape("", hidden, hidden, num_experts=num_experts, role="experts")
    routed = [
        [LinearShape(ROUTER_PATH, hidden, num_experts, role="router")],
        [replace(expert, path=gate_up_path, out_width=2 * width, has_halves=True)],
        [replace(expert, path=down_path, in_width=width)],
    ]
    first_shared = len(attention) + len(dense)
    of_dense = tuple(range(first_shared))
    kept = [*attention, *dense, *shared, *routed]
    of_sparse = (*range(len(attention)), *range(first_shared, len(kept)))
    of_layer = (of_sparse if layer in sparse_layers else of_dense for layer in range(shape.num_layers))
    starts = itertools.accumulate(map(len, kept), initial=0)
    return replace(
        shape,
        linears=tuple(linear for group in kept for linear in group),
        groups=tuple(
            tuple(range(start, start + len(group))) for start, group in zip(starts, kept, strict=False)
        ),
        groups_of_layer=tuple(of_layer) if dense else (),
    )


@dataclass(frozen=True, slots=True)
class LoraTargets:
    """The parts of the model that one adapter changes, or that all adapters of a step together change.

    max_group_rank: the greatest rank of a site. The rank of a site is the sum of its modules' ranks.
    num_groups: the adapted linears of all layers are in the first `num_groups` of `ModelShape.groups`.
    embedding, head: whether the input embedding or the output head is adapted.
    kv: whether K or V of any layer changes.
    affine: whether a module has a scale and an offset for each of its output columns.
    rows: whether rows of the embedding or of the head are replaced.
    norms: whether weights of norms are replaced.
    num_labels: labels of the adapter's head that classifies texts. 0: it has none.
    stands_alone: whether the adapter can't be part of a sum, because it scales outputs, replaces rows or norms, or is
        activated.
    invocation: the tokens that activate the adapter. It has no effect on the tokens before their last occurrence in the
        prompt. Empty: it is always active.
    num_added: rows of the adapter's embedding and head behind those of the base model, for tokens of its own.
    """

    max_group_rank: int
    num_groups: int
    embedding: bool
    head: bool
    kv: bool
    affine: bool = False
    rows: bool = False
    norms: bool = False
    num_labels: int = 0
    stands_alone: bool = False
    invocation: tuple[int, ...] = ()
    num_added: int = 0


class Affine(NamedTuple):
    """What an adapter stores for the output columns of one module.

    The adapter's pages first hold what is stored: the magnitudes of DoRA as scales (without DoRA: ones), and the sum of
    trained biases as offsets. The engine then replaces them by the final scales and offsets, which depend on the base
    model's weights (`slora.models.affine`).
    """

    has_magnitude: bool  # DoRA: the scale is the magnitude over the norm of the row of the adapted weight.
    replaces_bias: bool  # The base model's bias was trained, and the stored offset contains it.


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """The position of each row of one packed adapter, in segments from the adapter's first byte.

    groups: int32 [num_sites, 2], (total rank, first segment of A) of each site. Of experts, it is the rank of one.
    modules: int32 [num_modules, 3], (rank, first row within the group's A, first segment of B) of each module.
    affine: int32 [num_modules, 4], (whether the module has scales and offsets, first segment of the scales,
        `Affine.has_magnitude`, `Affine.replaces_bias`) of each module. The offsets follow the scales.
    rows: int32 [3, 3], (number of rows, first segment of their ids, first segment of the rows) of those that replace
        rows of the embedding and of the head, and of the head that classifies texts.
    norms: int32 [num_norms, 2], (whether the weight is replaced, first segment of the weight) of each of
        `ModelShape.norms`. The bias follows the weight.
    num_groups, invocation, num_added: see `LoraTargets`.
    changes_kv: see `ModelShape.changes_kv`.
    """

    groups: Int32Array
    modules: Int32Array
    affine: Int32Array
    rows: Int32Array
    norms: Int32Array
    num_segments: int
    num_groups: int
    changes_kv: bool
    invocation: tuple[int, ...] = ()
    num_added: int = 0

    @property
    def num_bytes(self) -> int:
        return self.num_segments * SEGMENT_BYTES

    @property
    def targets(self) -> LoraTargets:
        embedding, head = (
            bool(number) for number in self.modules[-2:, 0] | self.affine[-2:, 0] | self.rows[:2, 0]
        )
        has_rows, has_norms = (bool(table[:, 0].any()) for table in (self.rows, self.norms))
        return LoraTargets(
            int(self.groups[:, 0].max()),
            self.num_groups,
            embedding=embedding,
            head=head,
            kv=self.changes_kv,
            affine=bool(self.affine[:, 0].any()),
            rows=has_rows,
            norms=has_norms,
            num_labels=int(self.rows[2, 0]),
            stands_alone=has_rows or has_norms or bool(self.affine[:, 2].any() or self.invocation),
            invocation=self.invocation,
            num_added=self.num_added,
        )


# The bytes of a scale or an offset, and of a token id.
AFFINE_BYTES = 4
# Scales or offsets in a segment.
AFFINE_SEGMENT = SEGMENT_BYTES // AFFINE_BYTES


def lay_out_adapter(
    shape: ModelShape,
    ranks: Sequence[int],
    affine: Mapping[int, Affine] = MappingProxyType({}),
    num_rows: tuple[int, int, int] = (0, 0, 0),
    norms: Collection[int] = (),
) -> AdapterLayout:
    """Computes the layout of an adapter whose module m has rank `ranks[m]`. Rank 0 means that m has no A and B.

    affine: the modules with scales and offsets. num_rows: see `AdapterLayout.rows`.
    norms: the replaced norms, as indexes in `ModelShape.norms`.
    """
    groups = np.zeros((shape.num_sites, 2), np.int32)
    modules = np.zeros((shape.num_modules, 3), np.int32)
    columns = np.zeros((shape.num_modules, 4), np.int32)
    segment = 0
    for site in shape.sites:
        members = site.module_ids
        total = sum(ranks[m] for m in members)
        groups[site.group] = total, segment
        segment += site.num_experts * total * shape.row_segments(site.in_width)
        row = 0
        for m, width in zip(members, site.widths, strict=True):
            modules[m] = ranks[m], row, segment
            row += ranks[m]
            segment += site.num_experts * ranks[m] * shape.row_segments(width)
            if m in affine:
                columns[m] = True, segment, *affine[m]
                segment += 2 * affine_segments(width)
    rows = np.zeros((3, 3), np.int32)
    for index, count in enumerate(num_rows):
        first_row = segment + affine_segments(count)
        rows[index] = count, segment, first_row
        segment = first_row + count * shape.row_segments(shape.hidden_size)
    places = np.zeros((len(shape.norms), 2), np.int32)
    for norm_id in sorted(norms):
        norm = shape.norms[norm_id]
        places[norm_id] = True, segment
        segment += (1 + norm.has_bias) * affine_segments(norm.width)
    adapted = {m for m in range(shape.num_modules) if ranks[m] or m in affine}
    adapted |= {
        m for m, count in zip((shape.embedding_module, shape.head_module), num_rows, strict=False) if count
    }
    used = (site for site in shape.sites[:-2] if not adapted.isdisjoint(site.module_ids))
    num_groups = max((site.kind + 1 for site in used), default=0)
    changes_kv = shape.changes_kv(adapted, norms)
    return AdapterLayout(groups, modules, columns, rows, places, segment, num_groups, changes_kv)


def affine_segments(width: int) -> int:
    """Number of segments of `width` scales, offsets, token ids or elements of a norm."""
    return -(-width // AFFINE_SEGMENT)
