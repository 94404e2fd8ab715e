"""Compiles workers by numba: for this process, or into object files for the libraries that the wheel ships."""

import hashlib
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import llvmlite.binding as llvm
from numba import cfunc, config, types
from numba.core.codegen import AOTCodeLibrary, AOTCPUCodegen, JITCodeLibrary, JITCPUCodegen
from numba.core.compiler_lock import global_compiler_lock
from numba.core.event import Listener, install_listener
from numba.core.registry import cpu_target

from slora_kernels.cpu.machine_code import Worker
from slora_kernels.cpu.workers import (
    argmax,
    attention,
    chain,
    elementwise,
    lora,
    matrix_copies,
    pair_linear,
    quantized,
    recurrence,
    tile_attention,
    tile_linear,
    tile_lora,
)
from slora_kernels.cpu.workers.intrinsics import OPTIONS, Job
from slora_kernels.cpu_isa import CPU_ISAS, CpuIsa, find_cpu_isa
from slora_kernels.kernel_cache import choose_kernel_cache, lock_kernel

_log = logging.getLogger("slora.kernels")
_MODULES = {
    module.__name__.rpartition(".")[2]: module
    for module in (
        argmax,
        attention,
        chain,
        elementwise,
        lora,
        matrix_copies,
        pair_linear,
        quantized,
        recurrence,
        tile_attention,
        tile_linear,
        tile_lora,
    )
}
# The element type that stands for a dtype, see `intrinsics`.
_CARRIERS = {"float32": types.float32, "bfloat16": types.uint16, "float16": types.int16}
# All other functions that a library calls are its own.
_LIBRARY_CALLS = frozenset({"memcpy", "memmove", "memset", "sched_yield"})
# numba's own entry, `cfunc.NAME`, calls Python if there is an exception. The worker NAME itself has two more arguments:
# places for a result and for an exception. It has neither.
_ENTRY = """
define void @"{symbol}"(ptr %job) {{
  %result = alloca ptr
  %exception = alloca ptr
  %status = call i32 @"{worker}"(ptr %result, ptr %exception, ptr %job)
  ret void
}}
"""


def compile_worker(worker: Worker, dtype: str) -> int:
    """Compiles a worker, or loads it from the cache on disk. Returns its address."""
    function = compile_function(_find_function(worker), _CARRIERS[dtype])
    _compiled.append(function)
    address: int = function.address
    return address


# The machine code lives as long as these.
_compiled: list[Any] = []


# Held while numba's configuration names the cache of the workers.
_compiling = Lock()


def compile_function(function: Callable[[Job], None], carrier: Any) -> Any:
    """Compiles a function of a job, cached on disk. carrier: the element type of the model."""
    with _compiling:
        return _compile_in_cache(function, carrier)


def _compile_in_cache(function: Callable[[Job], None], carrier: Any) -> Any:
    signature = types.void(types.CPointer(carrier))
    user_choice = config.CACHE_DIR
    directory = choose_kernel_cache(user_choice or str(Path(__file__).parent / "__pycache__"))
    # numba runs passes only if it compiles, not if it finds the function in the cache.
    with install_listener("numba:run_pass", _LogCompilation(function.__name__, directory)):
        if directory is not None:
            config.CACHE_DIR = str(directory / _name_cache())
            try:
                with lock_kernel(Path(config.CACHE_DIR), f"{function.__name__}-{carrier}"):
                    return _compile(function, signature, cache=True)
            except (OSError, RuntimeError) as error:
                # The directory can no longer be written. numba raises RuntimeError before it compiles, OSError
                # afterwards.
                _warn_once(config.CACHE_DIR, type(error).__name__)
            finally:
                config.CACHE_DIR = user_choice
        return _compile(function, signature, cache=False)


def _compile(function: Callable[[Job], None], signature: Any, *, cache: bool) -> Any:
    # What else uses numba in this process, such as a program that imports slora, keeps numba's own code generator.
    context = cpu_target.target_context
    with global_compiler_lock:
        codegen, context._internal_codegen = context._internal_codegen, _make_codegen()
        try:
            return cfunc(signature, cache=cache, **OPTIONS)(function)
        finally:
            context._internal_codegen = codegen


class _LogCompilation(Listener):  # type: ignore[misc]
    """Logs at its first pass that a function is compiled. directory: the cache."""

    def __init__(self, name: str, directory: Path | None) -> None:
        self._name = name
        self._directory = directory
        self._has_begun = False

    def on_start(self, event: object) -> None:
        if not self._has_begun:
            kept = "there is no cache" if self._directory is None else f"it is not in {self._directory} yet"
            _log.info(
                "compiling the CPU kernel %s, because %s; this may take half a minute", self._name, kept
            )
        self._has_begun = True

    def on_end(self, event: object) -> None:
        pass


class _WorkerLibrary(JITCodeLibrary):  # type: ignore[misc]
    """Optimizes a worker, and emits its machine code. numba also does so with each function that is inlined into a
    worker, which takes most of the time and makes worse code."""

    _is_inlined = False
    _has_code = False

    def add_linking_library(self, library: Any) -> None:
        library._is_inlined = True
        super().add_linking_library(library)

    def _optimize_final_module(self) -> None:
        if not self._is_inlined:
            super()._optimize_final_module()

    def _finalize_specific(self) -> None:
        """numba calls this for each function."""

    def get_pointer_to_function(self, name: str) -> int:
        if not name.startswith("cfunc."):
            return 0
        self._emit()
        address: int = super().get_pointer_to_function(name)
        return address

    def _get_compiled_object(self) -> bytes:
        self._emit()
        code: bytes = super()._get_compiled_object()
        return code

    def _emit(self) -> None:
        self._ensure_finalized()
        if not self._has_code:
            self._has_code = True
            self._codegen.emit(self._final_module)
            super()._finalize_specific()


class _WorkerCodegen(JITCPUCodegen):  # type: ignore[misc]
    _library_class = _WorkerLibrary

    def _add_module(self, module: Any) -> None:
        """The machine code of all modules that are added would be emitted."""

    def emit(self, module: Any) -> None:
        super()._add_module(module)

    def set_env(self, env_name: str, env: Any) -> None:
        """Only code that raises an exception needs the environment."""


@cache
def _make_codegen() -> _WorkerCodegen:
    return _WorkerCodegen("slora.workers")


class _ObjectLibrary(AOTCodeLibrary):  # type: ignore[misc]
    """Functions that numba does not load into this process."""

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()
        return 0


class _ObjectCodegen(AOTCPUCodegen):  # type: ignore[misc]
    """Makes numba compile for an instruction set that this machine need not have."""

    _library_class = _ObjectLibrary

    def __init__(self, isa: CpuIsa) -> None:
        self._isa = isa
        self._triple = f"{isa.machine}-unknown-linux-gnu"
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        super().__init__("slora.objects")

    def _init(self, llvm_module: Any) -> None:
        self._tm_features = self._isa.llvm_features
        self._tm = llvm.Target.from_triple(self._triple).create_target_machine(
            cpu=self._isa.llvm_name,
            features=self._isa.llvm_features,
            opt=3,
            reloc="pic",
            codemodel="default",
        )
        self._target_data = self._tm.target_data
        self._data_layout = str(self._target_data)
        self._loopvect, self._opt_level = False, 0

    @property
    def machine(self) -> Any:
        return self._tm

    def _create_empty_module(self, name: str) -> Any:
        module = super()._create_empty_module(name)
        module.triple = self._triple
        return module

    def set_env(self, env_name: str, env: Any) -> None:
        """Only code that this process runs needs the environment."""


@cache
def _compile_for_objects() -> _ObjectCodegen:
    isa = find_cpu_isa()
    assert isa is not None and not _compiled, "this process has compiled workers that it runs"
    codegen = _ObjectCodegen(CPU_ISAS[isa])
    cpu_target.target_context._internal_codegen = codegen
    return codegen


def emit_object(worker: Worker, dtype: str) -> bytes:
    """Compiles a worker for `find_cpu_isa()` into an object file with one global function, `worker.symbol(dtype)`.

    This machine need not have the instruction set. From then on, this process cannot run what numba compiles.
    """
    machine = _compile_for_objects().machine
    function = cfunc(types.void(types.CPointer(_CARRIERS[dtype])), **OPTIONS)(_find_function(worker))
    symbol = worker.symbol(dtype)
    entry = _ENTRY.format(symbol=symbol, worker=function.native_name.removeprefix("cfunc."))
    module = llvm.parse_assembly(function.inspect_llvm() + entry)
    for other in module.functions:
        if not other.is_declaration and other.name != symbol:
            other.linkage = "internal"
    for variable in module.global_variables:
        if not variable.is_declaration:
            variable.linkage = "internal"
    # Removes numba's own entry.
    passes = llvm.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    options = llvm.create_pipeline_tuning_options(speed_level=0)
    passes.run(module, llvm.create_pass_builder(machine, options))
    called = {other.name for other in module.functions if other.is_declaration}
    foreign = {name for name in called if not name.startswith("llvm.")} - _LIBRARY_CALLS
    assert not foreign, f"{worker.name} calls {', '.join(sorted(foreign))}, which no library has"
    code: bytes = machine.emit_object(module)
    return code


def _find_function(worker: Worker) -> Callable[[Job], None]:
    function: Callable[[Job], None] = getattr(_MODULES[worker.module], worker.name)
    return function


@cache
def _warn_once(directory: str, reason: str) -> None:
    _log.warning("compiled kernels cannot be kept in %s: %s", directory, reason)


@cache
def _name_cache() -> str:
    """The name of the cache directory for the current state of the sources of the workers.

    numba only checks the worker's own file. After a change in another file, numba would load outdated machine code.
    """
    folder = Path(__file__).parent
    paths = (*sorted(folder.glob("*.py")), folder.parent / "worker_sizes.py")
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()
    return f"numba-{digest[:16]}-{find_cpu_isa() or 'other'}"
