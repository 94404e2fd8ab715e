"""Finds the machine code of the workers.

The wheel for Linux on x86-64 or AArch64 ships a library for each instruction set, which ctypes loads. Elsewhere, and in
a checkout, numba compiles the workers when they are first needed. A worker is a C function `void(void *job)`.
"""

import ctypes
import importlib
import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from slora_kernels.cpu.worker_sizes import HAS_TILES, TERMS
from slora_kernels.cpu_isa import find_cpu_isa
from slora_kernels.kv_format import KVFormat

# The dtypes of models.
DTYPES = ("float32", "bfloat16", "float16")
# The instruction sets with tiles, and those with other products of bfloat16 and without tiles.
_TILES, _PAIRS = ("amx",), ("avx512_bf16",)


@dataclass(frozen=True, slots=True)
class Worker:
    """A function of a module in `workers`.

    dtypes: the dtypes of models that it computes.
    isas: the instruction sets that it is for. Empty: all of them.
    """

    module: str
    name: str
    dtypes: tuple[str, ...] = DTYPES
    isas: tuple[str, ...] = ()

    def suits(self) -> bool:
        """Whether the instruction set in force has what it needs."""
        return not self.isas or find_cpu_isa() in self.isas

    def symbol(self, dtype: str) -> str:
        """The name of the function in a library."""
        return f"slora_{self.name}_{dtype}"


RMS_NORM = Worker("elementwise", "rms_norm_worker")
ACT_MUL = Worker("elementwise", "act_mul_worker")
ARGMAX = Worker("argmax", "argmax_worker")
LORA = Worker("lora", "lora_worker")
AFFINE = Worker("lora", "affine_worker")
TOKEN_LOGITS = Worker("lora", "token_logits_worker")
LORA_TILES = Worker("tile_lora", "lora_tiles_worker", ("bfloat16",), isas=_TILES)
ROTATE = Worker("elementwise", "rotate_and_write_kv_worker")
ROTATE_FP8 = Worker("elementwise", "rotate_and_write_fp8_worker")
ATTEND = Worker("attention", "attend_worker")
ATTEND_FP8 = Worker("attention", "attend_fp8_worker")
ATTEND_TILES = Worker("tile_attention", "attend_tiles_worker", ("bfloat16",), isas=_TILES)
# These read float32, whatever the model's dtype is.
INT8 = Worker("quantized", "int8_worker", ("float32",))
FLOAT8 = Worker("quantized", "float8_worker", ("float32",))
CODED = Worker("quantized", "coded_worker", ("float32",))
LINEAR = Worker("tile_linear", "linear_worker", ("bfloat16",), isas=_TILES)
PAIR_LINEAR = Worker("pair_linear", "pair_linear_worker", ("bfloat16",), isas=_PAIRS)
INT8_LINEAR = Worker("tile_linear", "int8_linear_worker", ("bfloat16",), isas=_TILES)
FLOAT8_LINEAR = Worker("tile_linear", "float8_linear_worker", ("bfloat16",), isas=_TILES)
CODED_LINEAR = Worker("tile_linear", "coded_linear_worker", ("bfloat16",), isas=_TILES)
# Runs other workers.
CHAIN = Worker("chain", "chain_worker", ("float32",))
# One token of recurrent layers.
CONVOLVE = Worker("recurrence", "convolve_token_worker")
DELTA_RULE = Worker("recurrence", "delta_rule_worker")
SCAN = Worker("recurrence", "scan_token_worker")
# Copies bits. See `matrix_copies`.
COPY = Worker("matrix_copies", "copy_worker", ("float32", "bfloat16"))
ROUND = Worker("matrix_copies", "round_worker", ("bfloat16",))
# Those that take longest to compile come first.
WORKERS = (
    *(ATTEND_FP8, ATTEND, ATTEND_TILES, LORA_TILES, LORA, CODED_LINEAR, ROTATE_FP8, ROTATE, INT8_LINEAR),
    *(FLOAT8_LINEAR, LINEAR, PAIR_LINEAR, CODED, INT8, FLOAT8, RMS_NORM, ACT_MUL, ARGMAX, AFFINE),
    *(TOKEN_LOGITS, DELTA_RULE, SCAN, CONVOLVE, COPY, ROUND, CHAIN),
)


def find_linear_worker(dtype: str) -> Worker | None:
    """The worker for products with weights of `dtype`. None: the matmul library multiplies them."""
    return next(
        (worker for worker in (LINEAR, PAIR_LINEAR) if worker.suits() and dtype in worker.dtypes), None
    )


def find_lora_worker(dtype: str) -> Worker:
    return LORA_TILES if HAS_TILES and dtype in LORA_TILES.dtypes else LORA


def find_rotate_worker(kv_format: KVFormat) -> Worker:
    return ROTATE if kv_format is KVFormat.MODEL else ROTATE_FP8


def find_attend_worker(dtype: str, kv_format: KVFormat, head_dim: int) -> Worker:
    if kv_format is not KVFormat.MODEL:
        return ATTEND_FP8
    has_tiles = HAS_TILES and dtype in ATTEND_TILES.dtypes and head_dim % TERMS == 0
    return ATTEND_TILES if has_tiles else ATTEND


def list_model_workers(
    dtype: str, kv_format: KVFormat, head_dim: int = TERMS
) -> tuple[tuple[Worker, str], ...]:
    """The workers of a model without quantized weights, and the dtype of each. The last two depend on the KV format."""
    linear = find_linear_worker(dtype)
    linears = () if linear is None else (linear,)
    own = (
        find_lora_worker(dtype),
        find_rotate_worker(kv_format),
        find_attend_worker(dtype, kv_format, head_dim),
    )
    workers = (*linears, RMS_NORM, ACT_MUL, ARGMAX, AFFINE, TOKEN_LOGITS, *own)
    # The logits of rows with penalties, biases, log-probabilities or beams are in float32.
    widened = () if dtype == "float32" else ((ARGMAX, "float32"),)
    if linears:
        widened = (*widened, (CHAIN, "float32"))
    return (*widened, *((worker, dtype) for worker in workers))


def name_library(isa: str) -> str:
    """The file name of the library for an instruction set."""
    return f"workers_{isa}.so"


@cache
def has_workers() -> bool:
    """Whether there is machine code for this CPU, or numba to compile it."""
    return is_shipped() or importlib.util.find_spec("numba") is not None


@cache
def find_worker(worker: Worker, dtype: str) -> int:
    """The address of a worker for models of `dtype`. The first call may compile it.

    Raises ImportError if there is neither machine code for this CPU nor numba.
    """
    library = _load_library()
    if library is None:
        return _compile(worker, dtype)
    function = getattr(library, worker.symbol(dtype))
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def is_shipped() -> bool:
    """Whether the installation has machine code for this CPU."""
    return _find_library() is not None


def _find_library() -> Path | None:
    isa = find_cpu_isa()
    path = Path(__file__).parent / name_library(isa or "none")
    return path if isa is not None and path.is_file() else None


@cache
def _load_library() -> ctypes.CDLL | None:
    path = _find_library()
    return None if path is None else ctypes.CDLL(str(path))


def _compile(worker: Worker, dtype: str) -> int:
    # Only this path needs numba, which takes a second to import.
    compiler = importlib.import_module("slora_kernels.cpu.workers.compiler")
    address: int = compiler.compile_worker(worker, dtype)
    return address
