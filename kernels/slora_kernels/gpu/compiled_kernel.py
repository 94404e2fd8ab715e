"""Resource usage of a compiled kernel, read from the compiler's outputs: assembly, machine code and metadata.

For NVIDIA, cuobjdump (from the triton wheel) reports the resource usage of the machine code, and the loads are read
from the PTX. For AMD, both are read from the assembly, which ends with metadata. The assembly names the source line of
each load, and that line names the pointer. This module imports no kernel and knows no hardware limit.
"""

import linecache
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triton.backends import nvidia

_CUOBJDUMP = Path(nvidia.__path__[0]) / "bin" / "cuobjdump"
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")
# _PTX_LOAD matches a load to registers, and captures the vector length and the bits of an element. _PTX_COPY matches a
# copy to shared memory, and captures the number of bytes.
_PTX_LOAD = re.compile(r"\bld\.global\S*?(?:\.v(\d))?\.[bfsu](\d+)\s")
_PTX_COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global\S* \[[^]]*\], \[[^]]*\], (0x[0-9a-f]+|\d+)")
_AMD_LOAD = re.compile(r"\b(?:buffer|global)_load_(\w+)")
_AMD_WIDTHS = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"(?:\s+"([^"]*)")?', re.MULTILINE)
# The compiler marks generated code as line 0. Such code belongs to the preceding line.
_PLACE = re.compile(r"^\s*\.loc\s+(\d+)\s+([1-9]\d*)")
_POINTER = re.compile(r"tl\.load\((\w+)")
# Matrix instructions with 16-bit operands. Instructions for float32 operands do not match.
_PRODUCT = re.compile(r"(mma\.sync|wgmma|tcgen05\.mma|v_mfma)\S*?[._](?:bf16|f16|kind::f16)")


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """One launch, compiled for one target.

    case: a description of the launch, such as "Llama-3.1-8B, site 0, tiles of 16, rank 8".
    registers: 32-bit registers per thread.
    spills: amount of spilled data. NVIDIA: bytes of a thread's stack. AMD: number of vector and scalar registers.
    shared_bytes: shared memory (LDS) per program.
    load_bytes: the distinct widths in bytes of a thread's global loads, by pointer variable: `x` for
    `tl.load(x + ...)`. The key "" holds loads that the assembly attributes to a line without a `tl.load`.
    product: the matrix instruction for 16-bit operands: mma.sync, wgmma, tcgen05.mma or v_mfma. None: the kernel has
    none.
    fuses_multiply_add: whether a * b + c may be rounded once.
    digest: hash of source and options. Launches with equal digests have the same machine code.
    """

    target: str
    dtype: str
    case: str
    kernel: str
    num_warps: int
    num_stages: int
    registers: int
    spills: int
    shared_bytes: int
    load_bytes: dict[str, tuple[int, ...]]
    product: str | None
    fuses_multiply_add: bool
    binary_bytes: int
    digest: str


def _measure_cubin(cubin: bytes) -> tuple[int, int]:
    """Returns the number of registers of a thread, and the bytes of its stack and local memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_CUOBJDUMP), "--dump-resource-usage", file.name]
        printed = subprocess.run(command, capture_output=True, check=True, encoding="utf-8").stdout
    usage = _USAGE.search(printed)
    assert usage is not None, f"the output of cuobjdump has no resource usage: {printed}"
    registers, stack, local = map(int, usage.groups())
    return registers, stack + local


def _measure_amd(assembly: str) -> tuple[int, int]:
    """Returns the number of vector registers, and the number of spilled registers (vector plus scalar)."""

    def read(name: str) -> int:
        found = re.search(rf"^\s*\.{name}:\s*(\d+)", assembly, re.MULTILINE)
        assert found is not None, f"no .{name} in the assembly's metadata"
        return int(found[1])

    return read("vgpr_count"), read("vgpr_spill_count") + read("sgpr_spill_count")


def _measure_load(line: str) -> int | None:
    """Returns the bytes that a line of assembly loads, or None if the line is not a load.

    A load of less than an AMD register (4 bytes) counts as 2 bytes.
    """
    if load := _PTX_LOAD.search(line):
        return int(load[1] or 1) * int(load[2]) // 8
    if copy := _PTX_COPY.search(line):
        return int(copy[1], 0)
    if load := _AMD_LOAD.search(line):
        return _AMD_WIDTHS.get(load[1], 2)
    return None


def _find_loads(assembly: str) -> dict[str, tuple[int, ...]]:
    files = {number: str(Path(folder, name)) for number, folder, name in _FILE.findall(assembly)}
    found: dict[str, set[int]] = {}
    source = ""
    for line in assembly.splitlines():
        if place := _PLACE.match(line):
            source = linecache.getline(files[place[1]], int(place[2]))
        elif size := _measure_load(line):
            pointer = _POINTER.search(source)
            found.setdefault(pointer[1] if pointer else "", set()).add(size)
    return {pointer: tuple(sorted(sizes)) for pointer, sizes in sorted(found.items())}


def read_compiled(compiled: Any, target: str, dtype: str, case: str) -> CompiledKernel:
    """Reads the resource usage of `compiled`, the kernel that `Launch.compile` returned."""
    metadata, ptx = compiled.metadata, compiled.asm.get("ptx")
    assembly = ptx or compiled.asm["amdgcn"]
    registers, spills = _measure_cubin(compiled.kernel) if ptx else _measure_amd(assembly)
    product = _PRODUCT.search(assembly)
    return CompiledKernel(
        target=target,
        dtype=dtype,
        case=case,
        kernel=metadata.name,
        num_warps=metadata.num_warps,
        num_stages=metadata.num_stages,
        registers=registers,
        spills=spills,
        shared_bytes=metadata.shared,
        load_bytes=_find_loads(assembly),
        product=product[1] if product else None,
        fuses_multiply_add=metadata.enable_fp_fusion,
        binary_bytes=len(compiled.kernel),
        digest=compiled.hash,
    )
