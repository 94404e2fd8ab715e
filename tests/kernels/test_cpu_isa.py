import os
import subprocess
import sys
from pathlib import Path

import pytest

from slora_kernels.cpu_isa import CPU_ISAS, VARIABLE, check_cpu_isa, list_available_isas
from tests.support.covering import soaked

ROOT = Path(__file__).parents[2]
ISAS = list_available_isas()
# The tests of the base model's products.
PRODUCTS = "tests/slora/models/weights/test_packed_weight.py"
# Quick: the library's products with one set, because compiling our own kernels for another instruction set takes half a
# minute. These tests need no conftest, which would import transformers.
QUICK = (
    "--noconftest",
    "tests/kernels/torch/test_row_blocks.py",
    PRODUCTS,
    "-k",
    "a_row and not 2048",
)


def run_python(*arguments: str, isa: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", *arguments],
        cwd=ROOT,
        env={**os.environ, VARIABLE: isa, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
        encoding="utf-8",
    )


@pytest.mark.skipif(VARIABLE in os.environ, reason="this run forces an instruction set already")
def test_rows_do_not_depend_on_the_batch_with_any_instruction_set(soak: bool) -> None:
    # The best set is what all other tests run with.
    for isa in ISAS if soak else ISAS[:-1][:1]:
        paths = ("tests",) if soak else QUICK
        chosen = "invariance" if soak else "invariance and not soak"
        run = run_python("-m", "pytest", "-m", chosen, "-p", "no:cacheprovider", *paths, isa=isa)
        assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.skipif("amx" not in ISAS or VARIABLE in os.environ, reason="other tests run products in pairs")
def test_products_in_pairs_are_exact_and_do_not_depend_on_the_batch() -> None:
    """A CPU with AMX has their instructions, too, but all other tests run with tiles there."""
    run = run_python("-m", "pytest", "-p", "no:cacheprovider", "--noconftest", PRODUCTS, isa="avx512_bf16")
    assert run.returncode == 0, run.stdout + run.stderr


REPORT = """
import slora_kernels, torch
from slora_kernels.cpu_isa import check_cpu_isa, multiplies_bfloat16
check_cpu_isa()
print(multiplies_bfloat16())
print(torch.backends.cpu.get_cpu_capability(), torch.ops.mkldnn._is_mkldnn_bf16_supported())
"""
LANES = """
from slora_kernels.cpu.machine_code import find_linear_worker
from slora_kernels.cpu.worker_sizes import HAS_BFLOAT16_DOT, HAS_TILES, LANES
linear = find_linear_worker("bfloat16")
print(LANES, HAS_BFLOAT16_DOT, HAS_TILES, linear and linear.name, find_linear_worker("float32"))
"""
# As in a sandbox that does not let a process use the tiles of AMX.
WITHOUT_PERMISSION = """
import slora_kernels.cpu_isa
slora_kernels.cpu_isa.permits_tiles = lambda: False
from slora_kernels.cpu.machine_code import list_model_workers
from slora_kernels.kv_format import KVFormat
workers = list_model_workers("bfloat16", KVFormat.MODEL)
print(slora_kernels.cpu_isa.find_cpu_isa(), *(worker.name for worker, _ in workers))
"""


# All other tests run with the best set.
@pytest.mark.parametrize("isa", soaked(ISAS, *ISAS[:1]))
def test_an_instruction_set_is_forced_for_the_library_and_for_our_kernels(isa: str) -> None:
    has_avx512, has_bfloat16 = isa != "avx2", isa in ("avx512_bf16", "amx")
    run = run_python("-c", REPORT + LANES, isa=isa)
    assert run.returncode == 0, run.stderr
    multiplies, library, *ours = run.stdout.splitlines()
    assert multiplies == str(has_bfloat16)
    # oneDNN computes in bfloat16 with any AVX-512.
    assert library == f"{'AVX512' if has_avx512 else 'AVX2'} {has_avx512}"
    linear = {"avx512_bf16": "pair_linear_worker", "amx": "linear_worker"}.get(isa)
    assert ours == [f"{16 if has_avx512 else 8} {has_bfloat16} {isa == 'amx'} {linear} None"]


@pytest.mark.skipif("amx" not in list_available_isas(), reason="this CPU has no tiles")
def test_a_process_without_the_permission_for_tiles_computes_without_them() -> None:
    run = run_python("-c", WITHOUT_PERMISSION, isa="")
    isa, *workers = run.stdout.split()
    assert run.returncode == 0 and isa == "avx512_bf16", run.stderr
    assert {"lora_worker", "attend_worker", "pair_linear_worker"} <= set(workers) and not any(
        "tiles" in name for name in workers
    )


@pytest.mark.parametrize("hidden", ("bmi1", "bmi2", "abm", "movbe", "avx512_vnni"))
def test_a_cpu_that_hides_an_instruction_gets_no_machine_code_with_it(
    hidden: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Born from a fault: the libraries use instructions beside those after which their sets are named."""
    flags = " ".join(CPU_ISAS["avx512_bf16"].flags - {hidden})
    monkeypatch.setattr(Path, "read_text", lambda path, **_: f"flags\t\t: {flags}\n")
    assert list_available_isas.__wrapped__() == (("avx2", "avx512") if hidden == "avx512_vnni" else ())


def test_a_cpu_of_aarch64_has_neon_and_nothing_of_x86(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "processor\t: 0\nBogoMIPS\t: 2100.00\nFeatures\t: fp asimd evtstrm aes crc32 atomics bf16\n"
    monkeypatch.setattr(Path, "read_text", lambda path, **_: lines)
    assert list_available_isas.__wrapped__() == ("neon",)


@pytest.fixture
def two_isas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slora_kernels.cpu_isa.list_available_isas", lambda: ("avx2", "avx512"))


@pytest.mark.parametrize("value", ("avx9", "AVX2", "amx"))
def test_an_instruction_set_that_cannot_be_forced_is_an_error_with_the_choices(
    two_isas: None, value: str
) -> None:
    with pytest.raises(ValueError, match=rf"SLORA_CPU_ISA is '{value}'.*\(avx2, avx512\)") as raised:
        check_cpu_isa({VARIABLE: value})
    if value not in CPU_ISAS:
        assert "avx2, avx512, avx512_bf16, amx, neon" in str(raised.value)


def test_a_set_that_is_chosen_after_torch_was_loaded_is_an_error(two_isas: None) -> None:
    with pytest.raises(ValueError, match="import slora before torch"):
        check_cpu_isa({VARIABLE: "avx2"})
    check_cpu_isa({VARIABLE: "avx2", **CPU_ISAS["avx2"].variables})
    check_cpu_isa({})


def test_the_command_line_refuses_an_unknown_set_before_it_starts_anything() -> None:
    program = "import sys; from slora_api.cli.main import main; sys.exit(main(['serve']))"
    run = run_python("-c", program, isa="avx9")
    assert run.returncode == 2 and "SLORA_CPU_ISA is 'avx9'" in run.stderr
    assert "Traceback" not in run.stderr
