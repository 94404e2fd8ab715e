"""Compiles every Triton kernel for GPUs that are not present, and reports the resources that each one needs.

    python -P -m slora_kernels.gpu.ahead_of_time sm_90 gfx942 bfloat16

Triton gets a fake driver that only names the target. The launchers bind tensors with the shapes of real models, and
Triton derives signature, alignments and options exactly as in a real launch. TRITON_INTERPRET must not be set, because
an interpreted kernel cannot be compiled.
"""

import argparse
import dataclasses
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
from triton.backends.compiler import GPUTarget

from slora_kernels.gpu.compiled_kernel import CompiledKernel, read_compiled
from slora_kernels.gpu.lora_sizes import load_sizes
from slora_kernels.gpu.model_launches import bind_all
from slora_kernels.kv_format import KVFormat

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class _FakeDriver:
    """The part of a GPU driver that Triton needs to compile a kernel.

    Triton caches compiled kernels by device, so each target has its own device name.
    """

    target: GPUTarget

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:
        return str(self.target.arch)

    def get_current_stream(self, device: str) -> int:
        return 0


def _quantized_forms(target: GPUTarget) -> list[torch.dtype]:
    """The 8-bit weight dtypes that a target supports. float8_e4m3fn needs sm_89 or later; on gfx942 it is emulated."""
    has_float8 = target.backend == "hip" or target.arch >= 89
    return [torch.int8, torch.float8_e4m3fn] if has_float8 else [torch.int8]


def set_compile_target(target: str) -> None:
    """Makes Triton compile for one of `TARGETS`. After this call, Triton cannot run kernels in this process."""
    triton.runtime.driver.set_active(_FakeDriver(TARGETS[target]))


def _kv_formats(target: GPUTarget) -> list[KVFormat]:
    """The KV formats that a target supports.

    KV in fp8 is not supported on gfx942, because its e4m3 has a different exponent bias and cannot represent 448.
    """
    has_float8 = target.backend == "cuda" and target.arch >= 89
    return list(KVFormat) if has_float8 else [KVFormat.MODEL]


def compile_all(target: str, dtype: str, left_out: str | None = None) -> Iterator[CompiledKernel]:
    """Compiles every launch for one of `TARGETS`. Errors that Triton raises are not caught.

    left_out: a pattern of the launches that are not compiled, each as "kernel: case" (see `CompiledKernel`).

    Launches with the same machine code are measured once, but each of them is reported.
    """
    set_compile_target(target)
    known: dict[str, CompiledKernel] = {}
    forms, kv_formats = _quantized_forms(TARGETS[target]), _kv_formats(TARGETS[target])
    for case, launch in bind_all(DTYPES[dtype], forms, kv_formats, load_sizes(target)):
        if left_out is not None and re.search(left_out, f"{launch.kernel.__name__}: {case}"):
            continue
        compiled = launch.compile()
        if compiled.hash not in known:
            known[compiled.hash] = read_compiled(compiled, target, dtype, case)
        yield dataclasses.replace(known[compiled.hash], case=case)


def main() -> None:
    """Compiles launches and prints a line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "names", nargs="*", choices=[*TARGETS, *DTYPES], help="default: all targets, bfloat16"
    )
    parser.add_argument(
        "--without", metavar="PATTERN", help="leaves out launches whose 'kernel: case' matches"
    )
    arguments = parser.parse_args()
    targets = [name for name in arguments.names if name in TARGETS] or list(TARGETS)
    dtypes = [name for name in arguments.names if name in DTYPES] or ["bfloat16"]
    for target in targets:
        for dtype in dtypes:
            for compiled in compile_all(target, dtype, arguments.without):
                print(json.dumps(dataclasses.asdict(compiled)), flush=True)


if __name__ == "__main__":
    main()
