"""The switch `SLORA_CPU_ISA`: forces one instruction set for torch, oneDNN, MKL and our own kernels on a CPU.

The libraries read their own variables, most of them when torch is loaded or first computes. So the switch is applied
when `slora_kernels` is imported, which is before any module of slora imports torch. Child processes inherit the
libraries' variables.
"""

import ctypes
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

VARIABLE = "SLORA_CPU_ISA"
# The call arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) of x86-64.
_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA = 158, 0x1023, 18


@dataclass(frozen=True, slots=True)
class CpuIsa:
    """An instruction set.

    machine: the kind of CPU, as `platform.machine()` names it on Linux.
    flags: what the CPU needs, as in /proc/cpuinfo.
    variables: what the libraries have to be told.
    llvm_name, llvm_features: the CPU that our own kernels are compiled for, in LLVM's terms.
    """

    machine: str
    flags: frozenset[str]
    variables: dict[str, str]
    llvm_name: str
    llvm_features: str


def _describe_x86(flags: str, onednn: str, aten: str, mkl: str, llvm_name: str, llvm_features: str) -> CpuIsa:
    variables = {
        "ONEDNN_MAX_CPU_ISA": onednn,
        "ATEN_CPU_CAPABILITY": aten,
        "MKL_ENABLE_INSTRUCTIONS": mkl,
    }
    return CpuIsa("x86_64", frozenset(flags.split()), variables, llvm_name, llvm_features)


# Those of x86-64-v3. LLVM uses all of them for a CPU that has AVX2, and a virtual machine may hide some.
_AVX2 = "avx2 fma f16c bmi1 bmi2 abm movbe popcnt"
_AVX512 = f"{_AVX2} avx512f avx512bw avx512dq avx512vl avx512cd"
_AVX512_BF16 = f"{_AVX512} avx512_vnni avx512_bf16"
_AMX = f"{_AVX512_BF16} amx_tile amx_bf16 amx_int8"
_LLVM_AVX2 = "+avx2,+fma,+f16c"
_LLVM_AVX512 = f"{_LLVM_AVX2},+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512cd"
_LLVM_AVX512_BF16 = f"{_LLVM_AVX512},+avx512vnni,+avx512bf16"
_LLVM_AMX = f"{_LLVM_AVX512_BF16},+amx-tile,+amx-bf16"
# MKL only computes in float32.
CPU_ISAS = {
    "avx2": _describe_x86(_AVX2, "AVX2", "avx2", "AVX2", "haswell", _LLVM_AVX2),
    "avx512": _describe_x86(_AVX512, "AVX512_CORE", "avx512", "AVX512", "skylake-avx512", _LLVM_AVX512),
    "avx512_bf16": _describe_x86(
        _AVX512_BF16, "AVX512_CORE_BF16", "avx512", "AVX512", "cooperlake", _LLVM_AVX512_BF16
    ),
    "amx": _describe_x86(_AMX, "AVX512_CORE_AMX", "avx512", "AVX512", "cooperlake", _LLVM_AMX),
    # Each CPU of AArch64 has it.
    "neon": CpuIsa(
        "aarch64",
        frozenset({"asimd"}),
        {"ONEDNN_MAX_CPU_ISA": "ADVANCED_SIMD", "ATEN_CPU_CAPABILITY": "default"},
        "generic",
        "+neon",
    ),
}


def apply_cpu_isa() -> None:
    """Sets the variables of the libraries. `check_cpu_isa` reports why it could not."""
    chosen = os.environ.get(VARIABLE)
    if chosen and chosen in list_available_isas() and "torch" not in sys.modules:
        os.environ.update(CPU_ISAS[chosen].variables)


def multiplies_bfloat16() -> bool:
    """Whether the instruction set in use has products of bfloat16. Without them, float32 is faster: a model of 135M
    parameters took 61 ms per token instead of 85, and 81 ms instead of 172 per step of 16 sequences (2 cores, AVX-512).
    """
    chosen = os.environ.get(VARIABLE)
    isas = [chosen] if chosen in CPU_ISAS else list_available_isas()
    return any("avx512_bf16" in CPU_ISAS[isa].flags for isa in isas)


@cache
def permits_tiles() -> bool:
    """Whether Linux lets this process use the tiles of AMX. A process must ask before it uses them, and a sandbox may
    refuse. oneDNN asks, too.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.syscall(_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA) == 0)


def check_cpu_isa(environment: Mapping[str, str] = os.environ) -> None:
    """Raises ValueError if `SLORA_CPU_ISA` is set to a value that could not be applied."""
    chosen, available = environment.get(VARIABLE), list_available_isas()
    if not chosen:
        return
    if chosen not in available:
        what = "this machine lacks it" if chosen in CPU_ISAS else f"the names are {', '.join(CPU_ISAS)}"
        choices = ", ".join(available) or "none"
        raise ValueError(
            f"{VARIABLE} is {chosen!r:.40}, but {what}; choose one of those that this machine has ({choices}), or "
            "unset the variable to use the best one"
        )
    wanted = CPU_ISAS[chosen].variables
    if any(environment.get(name) != value for name, value in wanted.items()):
        raise ValueError(
            f"{VARIABLE} is {chosen!r}, but torch was loaded before it could be applied; import slora before torch"
        )


def find_cpu_isa(environment: Mapping[str, str] = os.environ) -> str | None:
    """The instruction set in force: the forced one, or the best that there is. None if the CPU has no known one."""
    return environment.get(VARIABLE) or next(reversed(list_available_isas()), None)


@cache
def list_available_isas() -> tuple[str, ...]:
    """The names of the instruction sets that this process may use, the smallest first."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()
    # x86-64 calls them flags, AArch64 features.
    names = (line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features")))
    flags = set(next(names, []))
    if "amx_tile" in flags and not permits_tiles():
        flags.discard("amx_tile")
    return tuple(name for name, isa in CPU_ISAS.items() if isa.flags <= flags)
