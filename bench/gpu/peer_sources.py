"""vLLM's and SGLang's Triton LoRA kernels, loaded from their sources without the rest of them.

What they import beside torch and triton is stood in for by the least that they need of it: settings at their defaults,
loggers, copies to the device. Their packages' own `__init__` never run. None of their code is part of this project:
whoever runs this brings it, in a folder like so.

    DIR/vllm/lora/ops/triton_ops/      lora_shrink_op.py  lora_expand_op.py  kernel_utils.py  utils.py
                                       lora_kernel_metadata.py
    DIR/sglang/kernels/ops/lora/dense/ chunked_sgmv_shrink.py  chunked_sgmv_expand.py  lora_tuning_config.py
                                       csgmv_configs/

Written for vLLM 0.32.0 and SGLang 0.5.23: `pip download --no-deps vllm==0.32.0 sglang==0.5.23`, unzip both into DIR.
"""

import importlib
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

_VLLM, _SGLANG = "vllm.lora.ops.triton_ops", "sglang.kernels.ops.lora.dense"
# SGLang cuts each adapter's tokens into segments of at most so many (--max-lora-chunk-size).
_SEGMENT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Weights:
    """Of one site of one layer, all adapters of one rank. a: of each module, [N, rank, in]; b: [N, out, rank]."""

    a: list[Tensor]
    b: list[Tensor]

    @property
    def rank(self) -> int:
        return self.a[0].shape[1]


class Peer(Protocol):
    def prepare(self, weights: Weights) -> Any:
        """What `run` takes of a site's weights: whatever is done once."""

    def run(self, x: Tensor, out: Tensor, weights: Any) -> None:
        """out [T, sum of outs] += x [T, in] A B, module by module."""


class VllmKernels:
    """num_tokens of each adapter, side by side."""

    def __init__(self, source: Path, num_tokens: list[int], device: torch.device) -> None:
        _stand_in_for_vllm(source)
        self._shrink = importlib.import_module(f"{_VLLM}.lora_shrink_op").lora_shrink
        self._expand = importlib.import_module(f"{_VLLM}.lora_expand_op").lora_expand
        kept = importlib.import_module(f"{_VLLM}.utils")
        # By address: what lies there by now may be of other sizes.
        kept._LORA_A_PTR_DICT.clear()
        kept._LORA_B_PTR_DICT.clear()
        metadata = importlib.import_module(f"{_VLLM}.lora_kernel_metadata").LoRAKernelMeta
        ids = torch.repeat_interleave(torch.arange(len(num_tokens)), torch.tensor(num_tokens)).int()
        made = metadata.make(len(num_tokens), len(ids), device)
        made.prepare_tensors(ids.to(device))
        self._metadata = made.meta_args(len(ids), False)

    def prepare(self, weights: Weights) -> Weights:
        return weights

    def run(self, x: Tensor, out: Tensor, weights: Weights) -> None:
        shrunk = torch.empty(
            (len(weights.a), len(x), weights.rank), dtype=torch.float32, device=x.device
        )  # fmt: skip
        self._shrink(x, weights.a, shrunk, *self._metadata, 1.0)
        self._expand(shrunk, weights.b, out, *self._metadata, offset_start=0, add_inputs=True)


@dataclass(frozen=True, slots=True)
class _Stacked:
    """a: [N, modules * rank, in]; b: [N, sum of outs, rank]; offsets: int32 [modules + 1], also on the host."""

    a: Tensor
    b: Tensor
    offsets: Tensor
    host_offsets: Tensor
    widest: int


class SglangKernels:
    """csgmv, its default. num_tokens of each adapter, side by side."""

    def __init__(self, source: Path, num_tokens: list[int], device: torch.device) -> None:
        _stand_in_for_sglang(source, device)
        self._shrink = importlib.import_module(f"{_SGLANG}.chunked_sgmv_shrink")
        self._expand = importlib.import_module(f"{_SGLANG}.chunked_sgmv_expand")
        self._num_tokens = num_tokens
        self._device = device
        self._infos: dict[int, SimpleNamespace] = {}

    def prepare(self, weights: Weights) -> _Stacked:
        widths = [0, *(b.shape[1] for b in weights.b)]
        offsets = torch.tensor(widths).cumsum(0).int()
        if weights.rank not in self._infos:
            self._infos[weights.rank] = self._segment(weights.rank)
        stacked = torch.cat(weights.a, 1), torch.cat(weights.b, 1)
        return _Stacked(*stacked, offsets.to(self._device), offsets, max(widths))

    def run(self, x: Tensor, out: Tensor, weights: _Stacked) -> None:
        info = self._infos[weights.b.shape[2]]
        shrunk = self._shrink.chunked_sgmv_lora_shrink_forward(
            x, weights.a, info, len(weights.host_offsets) - 1
        )
        self._expand.chunked_sgmv_lora_expand_forward(
            shrunk, weights.b, info, weights.offsets, weights.widest, out, weights.host_offsets
        )

    def _segment(self, rank: int) -> SimpleNamespace:
        starts, owners, first = [0], [], 0
        for adapter, count in enumerate(self._num_tokens):
            for at in range(0, count, _SEGMENT_TOKENS):
                owners.append(adapter)
                starts.append(first + min(count, at + _SEGMENT_TOKENS))
            first += count
        count = len(self._num_tokens)

        def ints(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self._device)

        return SimpleNamespace(
            use_cuda_graph=False,
            num_segments=len(owners),
            seg_indptr=ints(starts),
            weight_indices=ints(owners),
            lora_ranks=ints([rank] * count),
            scalings=torch.ones(count, device=self._device),
            max_len=_SEGMENT_TOKENS,
            permutation=ints(list(range(first))),
        )


PEERS: dict[str, Callable[[Path, list[int], torch.device], Peer]] = {
    "vllm": VllmKernels,
    "sglang": SglangKernels,
}


def _stand_in_for_vllm(source: Path) -> None:
    def refuse(**_: Any) -> None:
        """Then the plain function is theirs to call, rather than an operator of torch.compile's."""
        raise AttributeError("no custom operators here")

    def copy_to(data: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.tensor(data, dtype=dtype).to(device)

    envs = _module(
        "vllm.envs",
        VLLM_BATCH_INVARIANT=False,
        VLLM_LORA_ENABLE_DUAL_STREAM=False,
        VLLM_LORA_DISABLE_PDL=True,
        VLLM_TUNED_CONFIG_FOLDER=None,
    )
    logger = SimpleNamespace(info_once=logging.info, warning_once=logging.debug)
    platform = SimpleNamespace(is_cuda=lambda: False, has_device_capability=lambda _: False)
    modules = (
        envs,
        _module("vllm.triton_utils", tl=tl, triton=triton),
        _module("vllm.logger", init_logger=lambda _: logger),
        _module("vllm.platforms", current_platform=platform),
        _module("vllm.utils"),
        _module("vllm.utils.math_utils", next_power_of_2=triton.next_power_of_2),
        _module("vllm.utils.torch_utils", direct_register_custom_op=refuse, async_tensor_h2d=copy_to),
    )
    _install(source / "vllm", _VLLM, modules)
    sys.modules["vllm"].envs = envs  # type: ignore[attr-defined]


def _stand_in_for_sglang(source: Path, device: torch.device) -> None:
    off = SimpleNamespace(get=lambda: False)
    envs = SimpleNamespace(SGLANG_ENABLE_LORA_CSGMV_SPLIT_K=off, SGLANG_ENABLE_DETERMINISTIC_INFERENCE=off)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    modules = (
        _module("sglang.srt"),
        _module("sglang.srt.environ", envs=envs),
        _module("sglang.srt.lora"),
        _module("sglang.srt.lora.utils", LoRABatchInfo=SimpleNamespace),
        # A cache of launches that spares the host time; what is timed here is the device's.
        _module(
            "sglang.srt.utils",
            cached_triton_kernel=lambda _: lambda kernel: kernel,
            get_device_name=lambda: name,
        ),
    )
    _install(source / "sglang", _SGLANG, modules)


def _module(name: str, **content: Any) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update(content, __path__=[])
    return module


def _install(folder: Path, package: str, modules: tuple[ModuleType, ...]) -> None:
    """Packages down to `package`, of which only folders are known, and the modules that stand in. Raises
    FileNotFoundError if there is no such folder."""
    top, *rest = package.split(".")
    if not folder.joinpath(*rest).is_dir():
        raise FileNotFoundError(
            f"there is no {folder.joinpath(*rest)}; see this module's docstring for what to bring"
        )
    if top in sys.modules:
        return
    for depth in range(len(rest) + 1):
        name = ".".join((top, *rest[:depth]))
        sys.modules[name] = _module(name)
        sys.modules[name].__path__ = [str(folder.joinpath(*rest[:depth]))]
    sys.modules.update({module.__name__: module for module in modules})
