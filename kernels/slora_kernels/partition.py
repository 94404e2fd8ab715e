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
# Linears that every rank holds whole.
_WHOLE = ("gate", "shared_expert_gate")


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
        names = {linear.path.rpartition(".")[2] for linear in shape.linears}
        if unknown := sorted(names - _OUTPUTS.keys() - {*_INPUTS, *_WHOLE}):
            raise ValueError(
                f"this model has linears that can't be divided among ranks: {', '.join(unknown)}"
            )
        if shape.num_heads % size:
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
            num_heads=shape.num_heads // self.size,
            num_kv_heads=max(1, shape.num_kv_heads // self.size),
            vocab_size=len(self.tokens(0)),
            linears=linears,
        )

    def tokens(self, rank: int) -> range:
        """The part of the vocabulary that the rank holds. The last ranks' parts may be shorter than rank 0's."""
        vocab_size = self.shape.vocab_size
        width = -(-vocab_size // self.size)
        return range(min(vocab_size, rank * width), min(vocab_size, (rank + 1) * width))

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
        name = linear.path.rpartition(".")[2]
        if name in _WHOLE:
            return ModulePart(range(linear.in_width), (range(linear.out_width),))
        if name in _INPUTS:
            return ModulePart(self.cut(linear.in_width, rank), (range(linear.out_width),))
        outputs, start = [], 0
        for kind in _OUTPUTS[name]:
            width = self._width(kind, linear)
            cut = self._cut_heads(rank) if kind == "kv" else self.cut(width, rank)
            outputs.append(range(start + cut.start, start + cut.stop))
            start += width
        return ModulePart(range(linear.in_width), tuple(outputs))

    def _width(self, kind: str, linear: LinearShape) -> int:
        """The number of a linear's outputs of one kind."""
        if kind == "mlp":
            name = linear.path.rpartition(".")[2]
            return linear.out_width // len(_OUTPUTS[name])
        heads = self.shape.num_heads if kind == "query" else self.shape.num_kv_heads
        return heads * self.shape.head_dim

    def _cut_heads(self, rank: int) -> range:
        """The rank's part of the columns of all KV heads. Ranks share heads if there are fewer heads than ranks."""
        num_heads, width = self.shape.num_kv_heads, self.shape.head_dim
        if num_heads >= self.size:
            return self.cut(num_heads * width, rank)
        first = rank * num_heads // self.size
        return range(first * width, (first + 1) * width)


def refuse_uneven_width(what: str, field: str, width: int, size: int) -> None:
    """Raises ValueError if the columns of MLPs or experts can't be divided among `size` ranks.

    what: the noun for the parts in the message. field: the field of config.json with their width.
    """
    if width % size:
        raise ValueError(
            f"this model's {what} have {width} columns ({field}), which can't be divided among {size} ranks; choose a "
            f"size that divides {width}"
        )
