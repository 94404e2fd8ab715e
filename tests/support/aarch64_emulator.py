"""Runs a library of workers for AArch64 on any machine, by the emulator of the package `unicorn`.

The emulated CPU sees the memory of this process at its own addresses, so a worker gets the same job as on a real CPU.
"""

import ctypes
import mmap
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from unicorn import (
    UC_ARCH_ARM64,
    UC_HOOK_CODE,
    UC_HOOK_MEM_READ_UNMAPPED,
    UC_HOOK_MEM_WRITE_UNMAPPED,
    UC_MODE_ARM,
    UC_PROT_ALL,
    Uc,
)
from unicorn.arm64_const import (
    UC_ARM64_REG_CPACR_EL1,
    UC_ARM64_REG_LR,
    UC_ARM64_REG_SP,
    UC_ARM64_REG_X0,
    UC_ARM64_REG_X1,
    UC_ARM64_REG_X2,
)

from slora_kernels.cpu.machine_code import Worker

# From the specification of ELF, and of ELF for AArch64.
_AARCH64, _LOADED, _DYNAMIC, _DYNAMIC_SYMBOLS = 183, 1, 2, 11
_RELOCATIONS, _RELOCATION_BYTES, _CALLS, _CALL_BYTES = 7, 8, 23, 2
_ABSOLUTE, _GLOBAL, _CALL, _RELATIVE = 257, 1025, 1026, 1027
_RETURN = 0xD65F03C0
_ENABLE_VECTORS = 3 << 20
_STACK_BYTES = 1 << 20
# What is mapped at a time of this process's memory.
_CHUNK = 1 << 16
_WORKER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
# The functions of the C library, as functions of the first three arguments.
_C_LIBRARY: dict[str, Callable[[int, int, int], object]] = {
    "memcpy": ctypes.memmove,
    "memmove": ctypes.memmove,
    "memset": lambda target, byte, size: ctypes.memset(target, byte & 0xFF, size),
    "sched_yield": lambda *_: 0,
}


class Aarch64Emulator:
    """Loads a library. Raises ValueError if it is for another machine, or calls what the C library does not have."""

    def __init__(self, library: Path) -> None:
        self._file = library.read_bytes()
        machine = self._unpack("<H", 0x12)[0]
        if self._file[:4] != b"\x7fELF" or machine != _AARCH64:
            raise ValueError(f"{library} is for machine {machine}, not {_AARCH64}")
        segments = list(self._read_table("<IIQQQQQQ", 0x20, 0x36, 0x38))
        code_bytes = max(segment[3] + segment[6] for segment in segments if segment[0] == _LOADED)
        calls_at = -(-code_bytes // _CHUNK) * _CHUNK
        size = calls_at + _CHUNK + _STACK_BYTES
        mapped = mmap.mmap(-1, size + _CHUNK)
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        self._base = -(-start // _CHUNK) * _CHUNK
        self._memory = memoryview(mapped)[self._base - start :][:size]
        self._chunks = set(range(self._base, self._base + size, _CHUNK))
        for kind, _, offset, address, _, length, *_ in segments:
            if kind == _LOADED:
                self._memory[address : address + length] = self._file[offset : offset + length]
        self._end = self._base + calls_at
        # The first place is where a worker returns to.
        self._calls = {name: self._end + 4 * place for place, name in enumerate(_C_LIBRARY, 1)}
        for place in range(len(_C_LIBRARY) + 1):
            struct.pack_into("<I", self._memory, calls_at + 4 * place, _RETURN)
        symbols = list(self._read_symbols())
        self._addresses = {name: self._base + value for name, value, is_own in symbols if is_own}
        dynamic = next(segment for segment in segments if segment[0] == _DYNAMIC)
        self._relocate([name for name, *_ in symbols], dynamic[2], dynamic[5])
        self._cpu = self._prepare_cpu()
        self.num_calls = 0
        self._functions: list[object] = []
        self._lock = threading.Lock()

    def _unpack(self, form: str, offset: int) -> tuple[int, ...]:
        return struct.unpack_from(form, self._file, offset)

    def _read_table(self, form: str, start: int, size: int, count: int) -> Iterator[tuple[int, ...]]:
        """The rows of a table. The arguments are where the header has its offset, and a row's size, and their count."""
        (offset,), (row_bytes,), (rows,) = (
            self._unpack("<Q", start), self._unpack("<H", size), self._unpack("<H", count)
        )  # fmt: skip
        for row in range(rows):
            yield self._unpack(form, offset + row * row_bytes)

    def _read_symbols(self) -> Iterator[tuple[str, int, bool]]:
        sections = list(self._read_table("<IIQQQQIIQQ", 0x28, 0x3A, 0x3C))
        table = next(section for section in sections if section[1] == _DYNAMIC_SYMBOLS)
        names = sections[table[6]][4]
        for offset in range(table[4], table[4] + table[5], 24):
            name, _, _, section, value, _ = self._unpack("<IBBHQQ", offset)
            start = names + name
            text = self._file[start : self._file.index(b"\0", start)].decode()
            if text and not section and text not in self._calls:
                raise ValueError(f"the library calls {text}")
            yield text, value, section != 0

    def _relocate(self, symbols: list[str], offset: int, size: int) -> None:
        tags = dict(self._unpack("<qQ", entry) for entry in range(offset, offset + size, 16))
        for first, length in ((_RELOCATIONS, _RELOCATION_BYTES), (_CALLS, _CALL_BYTES)):
            for entry in range(tags.get(first, 0), tags.get(first, 0) + tags.get(length, 0), 24):
                place, info, addend = struct.unpack_from("<QQq", self._memory, entry)
                name, kind = symbols[info >> 32], info & 0xFFFFFFFF
                if kind == _RELATIVE:
                    address = self._base + addend
                elif kind in (_ABSOLUTE, _GLOBAL, _CALL):
                    address = (self._addresses.get(name) or self._calls[name]) + addend
                else:
                    raise ValueError(f"the library has a relocation of kind {kind}")
                struct.pack_into("<Q", self._memory, place, address)

    def _prepare_cpu(self) -> Uc:
        cpu = Uc(UC_ARCH_ARM64, UC_MODE_ARM)
        cpu.reg_write(UC_ARM64_REG_CPACR_EL1, _ENABLE_VECTORS)
        cpu.mem_map_ptr(self._base, len(self._memory), UC_PROT_ALL, self._base)
        cpu.hook_add(UC_HOOK_MEM_READ_UNMAPPED | UC_HOOK_MEM_WRITE_UNMAPPED, self._map_memory)
        cpu.hook_add(UC_HOOK_CODE, self._call_c_library, begin=self._end + 4, end=self._end + _CHUNK)
        return cpu

    def _map_memory(self, cpu: Uc, access: int, address: int, size: int, *_: object) -> bool:
        """Maps what a worker reads or writes. A null pointer stays an error."""
        needed = {place // _CHUNK * _CHUNK for place in (address, address + size - 1)}
        for start in needed - self._chunks:
            if start == 0:
                return False
            cpu.mem_map_ptr(start, _CHUNK, UC_PROT_ALL, start)
        self._chunks |= needed
        return True

    def _call_c_library(self, cpu: Uc, address: int, *_: object) -> None:
        name = next(name for name, place in self._calls.items() if place == address)
        registers = (UC_ARM64_REG_X0, UC_ARM64_REG_X1, UC_ARM64_REG_X2)
        # X0 stays the result, which no worker reads of `sched_yield`.
        _C_LIBRARY[name](*(cpu.reg_read(register) for register in registers))

    def call(self, symbol: str, job: int) -> None:
        """Runs a worker. job: the address of its job."""
        with self._lock:
            self.num_calls += 1
            self._cpu.reg_write(UC_ARM64_REG_X0, job)
            self._cpu.reg_write(UC_ARM64_REG_LR, self._end)
            self._cpu.reg_write(UC_ARM64_REG_SP, self._base + len(self._memory))
            self._cpu.emu_start(self._addresses[symbol], self._end)

    def find_worker(self, worker: Worker, dtype: str) -> int:
        """Makes a function that emulates a worker. Returns its address, as `machine_code.find_worker` does."""
        function = _WORKER(lambda job: self.call(worker.symbol(dtype), job))
        self._functions.append(function)
        return ctypes.cast(function, ctypes.c_void_p).value or 0
