"""Divides the modules of a transformers model among tensor-parallel ranks.

A class of transformers knows nothing of ranks, so its own code gets whole tensors: each rank holds some rows of a
linear's weight, computes their outputs, and gathers those of the other ranks (`gathered` in `slora_kernels.partition`).
So every class is divided alike, whatever it computes between its linears: norms of whole rows, gates, recurrences.
Three kinds of modules need less communication:

    MLP         Each rank computes its part of the columns between the linears. The outputs of the last one are summed.
    experts     Likewise, each expert is divided.
    attention   A rank attends with its heads only, over the pages that hold its KV heads, and gathers what they
                attended to.

`slora.models.model_structure` tries with each class whether its MLPs and experts can be divided so. The embedding and
the head hold the rank's tokens of the vocabulary, as in our own decoder. All other weights, and the states of
recurrent layers, are whole on each rank.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from slora.core.errors import ConfigError
from slora.models.collectives import Collectives
from slora.models.mixture_layers import describe_experts
from slora_kernels.layout import LinearShape
from slora_kernels.partition import ModulePart, Partition


def divide_modules(model: nn.Module, partition: Partition, rank: int) -> None:
    """Cuts the parameters in place to the rank's part.

    Raises ConfigError if another module shares a parameter that is cut, or for another embedding or head.
    """
    shape = partition.shape
    cut: dict[int, str] = {}
    stacks = {module.path.rpartition(".")[0] for module in shape.modules if module.role == "experts"}
    forms = {path: describe_experts(model.get_submodule(path)) for path in stacks}
    for module_id, described in enumerate(shape.modules):
        part = partition.part(module_id, rank)
        if part == ModulePart(range(described.in_width), (range(described.out_width),)):
            continue
        if described.role == "experts":
            path, _, name = described.path.rpartition(".")
            form = forms[path]
            assert form is not None, "a module of other experts was listed"
            _cut_experts(
                model.get_submodule(path), name, described, part, rank, is_transposed=form.is_transposed
            )
            cut[id(model.get_parameter(described.path))] = described.path
        elif module_id == shape.embedding_module or module_id == shape.head_module:
            _cut_vocabulary(model.get_submodule(described.path), described, partition, rank, cut)
        else:
            _cut_linear(model.get_submodule(described.path), described, part, rank, cut)
    paths = {module.path for module in shape.modules}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in cut and path not in paths and f"{path}.{name}" not in paths:
                raise ConfigError(
                    f"tensor_parallel_size is {partition.size}, but {path} of {type(model).__name__} shares its {name} "
                    f"with {cut[id(parameter)]}, which would be divided; set tensor_parallel_size to 1"
                )


def _cut_linear(
    module: nn.Module, described: LinearShape, part: ModulePart, rank: int, cut: dict[int, str]
) -> None:
    is_transposed, adds_bias = isinstance(module, Conv1D), len(part.inputs) == described.in_width or rank == 0
    parameters = dict(module.named_parameters(recurse=False))
    for name, (dim, ranges) in {
        "weight": (1, (part.inputs,)) if len(part.inputs) < described.in_width else (0, part.outputs),
        "bias": (0, part.outputs),
    }.items():
        parameter = parameters.get(name)
        if parameter is None or id(parameter) in cut:
            continue
        at = 1 - dim if is_transposed and name == "weight" else dim
        parameter.data = _take(parameter.data, at, ranges)
        cut[id(parameter)] = described.path
        if name == "bias" and not adds_bias:
            # One rank adds the bias of outputs that are partial sums.
            parameter.data.zero_()
    widths = len(part.inputs), sum(map(len, part.outputs))
    names = ("nx", "nf") if is_transposed else ("in_features", "out_features")
    for name, width in zip(names, widths, strict=True):
        setattr(module, name, width)


def _cut_experts(
    module: nn.Module,
    name: str,
    described: LinearShape,
    part: ModulePart,
    rank: int,
    *,
    is_transposed: bool,
) -> None:
    """The parameter `name` is [E, out, in], or [E, in, out] if it is transposed. Its bias, if any, is [E, out]."""
    is_divided_in = len(part.inputs) < described.in_width
    parameter = module.get_parameter(name)
    dim = 2 if is_divided_in != is_transposed else 1
    parameter.data = _take(parameter.data, dim, (part.inputs,) if is_divided_in else part.outputs)
    bias = dict(module.named_parameters(recurse=False)).get(f"{name}_bias")
    if bias is not None:
        bias.data = _take(bias.data, 1, part.outputs)
        if is_divided_in and rank > 0:
            bias.data.zero_()


def _cut_vocabulary(
    module: nn.Module, described: LinearShape, partition: Partition, rank: int, cut: dict[int, str]
) -> None:
    """Keeps the rows of the rank's tokens, padded to the same number on all ranks."""
    tokens, held = partition.tokens(rank), partition.rank_shape.vocab_size
    vocab_size = partition.shape.vocab_size
    for parameter in module.parameters(recurse=False):
        if id(parameter) in cut:
            continue
        # An embedding may have more rows, for tokens that stand for images.
        is_known = len(parameter) == vocab_size or (
            isinstance(module, nn.Embedding) and len(parameter) > vocab_size
        )
        if not is_known or not isinstance(module, nn.Linear | nn.Embedding):
            raise ConfigError(
                f"tensor_parallel_size is {partition.size}, but {described.path} ({type(module).__name__}) can't be "
                f"divided by the {vocab_size} tokens of the vocabulary; set tensor_parallel_size to 1"
            )
        rows = parameter.data[tokens.start : tokens.stop]
        padding = (0, 0) * (rows.dim() - 1) + (0, held - len(rows))
        parameter.data = F.pad(rows, padding).clone()
        cut[id(parameter)] = described.path
    if isinstance(module, nn.Linear):
        module.out_features = held
    elif isinstance(module, nn.Embedding):
        module.num_embeddings = held


def _take(tensor: Tensor, dim: int, ranges: Sequence[range]) -> Tensor:
    """A copy of some rows or columns, so that the memory of the whole tensor is freed."""
    return torch.cat([tensor.narrow(dim, part.start, len(part)) for part in ranges], dim).clone()


def sum_outputs(collectives: Collectives, outputs: Tensor) -> Tensor:
    """The sum of all ranks' outputs."""
    return collectives.sum(outputs.contiguous())


def gather_outputs(collectives: Collectives, width: int, outputs: Tensor) -> Tensor:
    """[..., n] of each rank -> [..., width], side by side. What is behind `width` is padding."""
    rows = outputs.reshape(-1, outputs.shape[-1])
    # The head gets no rows while its inputs are recorded.
    gathered = collectives.gather_columns(rows) if len(rows) else rows.new_empty(0, width)
    return gathered[:, :width].contiguous().view(*outputs.shape[:-1], width)


def take_turns(collectives: Collectives, device: torch.device) -> Iterator[bool]:
    """Yields for each rank in order whether it is this one's turn. The others wait until it is over.

    transformers loads whole weights, so a host would need memory for as many models as there are ranks otherwise.
    """
    for rank in range(collectives.size):
        yield rank == collectives.rank
        if collectives.size > 1:
            collectives.sum(torch.zeros(1, device=device))
