"""How tensor parallelism divides a decoder among ranks (Megatron's partition).

    linear              a rank holds             LoRA A          LoRA B
    q, k, v, gate, up   rows of the weight       whole           the same rows
    o, down             columns of the weight    the same cols   whole
    gate (the router)   whole                    whole           whole
    shared_expert_gate  whole                    whole           whole
    embedding           tokens of the vocabulary the same tokens whole
    head                tokens of the vocabulary whole           the same tokens

With this division, adapters need no communication of their own. After o and down, each rank has a partial sum of the
base model's output, and adds B(A_i x_i) to it before the base model's own sum over ranks.

Each expert of a mixture is divided like an MLP. Every rank holds the whole router, and so chooses the same experts. The
sum over ranks adds up the outputs of all experts at once. The gate of a shared expert is one number for each token, by
which each rank multiplies its own partial sum.

All ranks have parts of the same shape, so one adapter layout and one page table serve all ranks. Where there are fewer
KV heads than ranks, several ranks hold the same head. A vocabulary that does not divide is padded.

The classes of transformers have linears of other names, so `LinearShape.division` says how each is divided:

    gathered            rows of the weight; the ranks gather the outputs, so the class's own code gets all of them
    rows, halves        rows of the weight, or of each of its halves; only linears with `columns` read the outputs
    columns             columns of the weight; the ranks sum the outputs
    whole               nothing is divided

Worked example: 8 heads, 2 KV heads and 4 ranks. Rank 3 holds heads 6 and 7, and KV head 1, which rank 2 holds as well.

This module does not import torch, because the loader process imports it.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from slora_kernels.layout import LinearShape, ModelShape

# For the last part of a linear's path, the kinds of its outputs in order. Fused linears have several.
_OUTPUTS = {
    "q_proj": ("query",),
    "k_proj": ("kv",),
    "v_proj": ("kv",),
    "qkv_proj": ("query", "kv", "kv"),
    "gate_proj": ("mlp",),
    "up_proj": ("mlp",),
    "gate_up_proj": ("mlp", "mlp"),
}
# Linears whose inputs are divided.
_INPUTS = ("o_proj", "down_proj")
# The number of parts of a weight of which each is divided.
_COUNT_OF_PARTS = {"gathered": 1, "rows": 1, "halves": 2}
# Linears that every rank holds whole.
_WHOLE = ("gate", "shared_expert_gate")
# Linears with fewer outputs than hidden_size over this, such as routers, are not worth gathering.
_LEAST_GATHERED = 16


@dataclass(frozen=True, slots=True)
class ModulePart:
    """The part of one module that a rank holds.

    inputs: the columns of the weight and of A. outputs: the rows of the weight and of B, in the order of the rank's
    part.
    """

    inputs: range
    outputs: tuple[range, ...]


@dataclass(frozen=True)
class Partition:
    """The parts of a decoder for `size` ranks. shape: the shape of the whole model.

    Raises ValueError, naming the sizes, if the model can't be divided among so many ranks.
    """

    shape: ModelShape
    size: int

    def __post_init__(self) -> None:
        if self.size == 1:
            return
        shape, size = self.shape, self.size
        named = [linear for linear in shape.linears if linear.division == "by_name"]
        names = {linear.path.rpartition(".")[2] for linear in named}
        if unknown := sorted(names - _OUTPUTS.keys() - {*_INPUTS, *_WHOLE}):
            raise ValueError(
                f"this model has linears that can't be divided among ranks: {', '.join(unknown)}"
            )
        # A class of transformers with one head gets it on every rank.
        if (named or shape.num_heads > 1) and shape.num_heads % size:
            raise ValueError(
                f"this model has {shape.num_heads} attention heads, which can't be divided among {size} ranks; "
                f"choose a size that divides {shape.num_heads}"
            )
        if shape.num_kv_heads % size and size % shape.num_kv_heads:
            raise ValueError(
                f"this model has {shape.num_kv_heads} KV heads; choose a number of ranks that divides it, or a "
                f"multiple of it, instead of {size}"
            )
        for linear in shape.linears:
            if linear.division in ("rows", "halves", "columns"):
                is_cut_in = linear.division == "columns"
                width = linear.in_width if is_cut_in else linear.out_width // _COUNT_OF_PARTS[linear.division]
                if width % size:
                    raise ValueError(
                        f"{linear.path} has {width} {'inputs' if is_cut_in else 'outputs'}, which can't be divided "
                        f"among {size} ranks; choose a size that divides {width}"
                    )
        for linear in named:
            if linear.path.endswith("down_proj") and linear.num_experts == 1:
                is_shared = "shared_expert" in linear.path
                what, prefix = ("shared experts", "shared_expert_") if is_shared else ("MLPs", "")
                refuse_uneven_width(what, f"{prefix}intermediate_size", linear.in_width, size)

    @cached_property
    def rank_shape(self) -> ModelShape:
        """The shape of each rank's part. Its vocabulary includes padding."""
        if self.size == 1:
            return self.shape
        shape = self.shape
        linears = tuple(
            replace(linear, in_width=len(part.inputs), out_width=sum(map(len, part.outputs)))
            for linear in shape.linears
            for part in [self._linear_part(linear, 0)]
        )
        return replace(
            shape,
            num_heads=len(self.heads(0)),
            num_kv_heads=len(self.kv_heads(0)),
            vocab_size=len(self.tokens(0)),
            linears=linears,
        )

    def tokens(self, rank: int) -> range:
        """The part of the vocabulary that the rank holds. The last ranks' parts may be shorter than rank 0's."""
        vocab_size = self.shape.vocab_size
        width = -(-vocab_size // self.size)
        return range(min(vocab_size, rank * width), min(vocab_size, (rank + 1) * width))

    def heads(self, rank: int) -> range:
        """The attention heads that the rank computes. All ranks compute the only one of a class of transformers."""
        return range(1) if self.shape.num_heads == 1 else self.cut(self.shape.num_heads, rank)

    def kv_heads(self, rank: int) -> range:
        """The KV heads that the rank holds. Ranks share heads if there are fewer heads than ranks."""
        num_heads = self.shape.num_kv_heads
        if num_heads >= self.size:
            return self.cut(num_heads, rank)
        first = rank * num_heads // self.size
        return range(first, first + 1)

    def part(self, module_id: int, rank: int) -> ModulePart:
        """The rank's part of a module of `shape.modules`."""
        shape, module = self.shape, self.shape.modules[module_id]
        if self.size > 1:
            if module_id == shape.embedding_module:
                return ModulePart(self.tokens(rank), (range(module.out_width),))
            if module_id == shape.head_module:
                return ModulePart(range(module.in_width), (self.tokens(rank),))
            return self._linear_part(module, rank)
        return ModulePart(range(module.in_width), (range(module.out_width),))

    def cut(self, width: int, rank: int) -> range:
        """The rank's part of `width` columns or rows that divide evenly."""
        part = width // self.size
        return range(rank * part, (rank + 1) * part)

    def _linear_part(self, linear: LinearShape, rank: int) -> ModulePart:
        if linear.division != "by_name":
            return self._divided_part(linear, rank)
        name = linear.path.rpartition(".")[2]
        if name in _WHOLE:
            return ModulePart(range(linear.in_width), (range(linear.out_width),))
        if name in _INPUTS:
            return ModulePart(self.cut(linear.in_width, rank), (range(linear.out_width),))
        outputs, start = [], 0
        for kind in _OUTPUTS[name]:
            width = self._width(kind, linear)
            cut = self._cut_kv(rank) if kind == "kv" else self.cut(width, rank)
            outputs.append(range(start + cut.start, start + cut.stop))
            start += width
        return ModulePart(range(linear.in_width), tuple(outputs))

    def _divided_part(self, linear: LinearShape, rank: int) -> ModulePart:
        inputs, width = range(linear.in_width), linear.out_width
        is_small = width % self.size > 0 or width * _LEAST_GATHERED < self.shape.hidden_size
        if linear.division == "whole" or (linear.division == "gathered" and is_small):
            return ModulePart(inputs, (range(width),))
        if linear.division == "columns":
            return ModulePart(self.cut(linear.in_width, rank), (range(width),))
        count = _COUNT_OF_PARTS[linear.division]
        cut = self.cut(width // count, rank)
        starts = range(0, width, width // count)
        return ModulePart(inputs, tuple(range(start + cut.start, start + cut.stop) for start in starts))

    def _width(self, kind: str, linear: LinearShape) -> int:
        """The number of a linear's outputs of one kind."""
        if kind == "mlp":
            name = linear.path.rpartition(".")[2]
            return linear.out_width // len(_OUTPUTS[name])
        heads = self.shape.num_heads if kind == "query" else self.shape.num_kv_heads
        return heads * self.shape.head_dim

    def _cut_kv(self, rank: int) -> range:
        """The rank's part of the columns of all KV heads."""
        heads, width = self.kv_heads(rank), self.shape.head_dim
        return range(heads.start * width, heads.stop * width)


def refuse_uneven_width(what: str, field: str, width: int, size: int) -> None:
    """Raises ValueError if the columns of MLPs or experts can't be divided among `size` ranks.

    what: the noun for the parts in the message. field: the field of config.json with their width.
    """
    if width % size:
        raise ValueError(
            f"this model's {what} have {width} columns ({field}), which can't be divided among {size} ranks; choose a "
            f"size that divides {width}"
        )
