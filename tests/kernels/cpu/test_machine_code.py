"""The machine code that the wheel ships."""

import ctypes
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from slora_kernels.cpu.job_fields import begin_job, name_dtype, pack_row, pack_rows
from slora_kernels.cpu.machine_code import ARGMAX, WORKERS, list_model_workers, name_library
from slora_kernels.cpu_isa import CPU_ISAS, VARIABLE, find_cpu_isa, list_available_isas
from slora_kernels.kv_format import KVFormat
from tests.support.covering import soaked
from tests.support.debian_package import skip_without

if TYPE_CHECKING:
    from tests.support.aarch64_emulator import Aarch64Emulator

ROOT = Path(__file__).parents[3]
KERNELS = ROOT / "kernels"
OWN_ISAS = [name for name, isa in CPU_ISAS.items() if isa.machine == platform.machine()]
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("numba") is None, reason="numba compiles the machine code"
)
# Modules that a machine with the wheel, or one that builds it, does not have.
WITHOUT = "import sys\nfor name in {names!r}: sys.modules[name] = None\n"


def run_python(code: str, *arguments: str, sources: Path = KERNELS, **variables: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(sources), **variables}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *arguments],
        capture_output=True, text=True, env=environment, timeout=1800, check=False, encoding="utf-8",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def require_linker(isa: str) -> None:
    machine = CPU_ISAS[isa].machine
    name = f"{machine}-linux-gnu-ld"
    if not any(map(shutil.which, (name, "ld.lld", *(["ld"] if isa in OWN_ISAS else [])))):
        skip_without(name, f"binutils-{machine.replace('_', '-')}-linux-gnu")


def build_library(folder: Path, isa: str, *workers: str) -> Path:
    """Compiles workers for an instruction set, in a process without torch."""
    require_linker(isa)
    library = folder / name_library(isa)
    code = WITHOUT.format(names=["torch"]) + "from slora_kernels.cpu.precompile import main; main()"
    chosen = [word for name in workers for word in ("--worker", name)]
    run_python(code, "--library", str(library), *chosen, **{VARIABLE: isa})
    return library


@pytest.mark.parametrize("isa", soaked(OWN_ISAS, *OWN_ISAS[:1]))
def test_an_installation_with_machine_code_for_an_instruction_set_needs_neither_numba_nor_triton(
    isa: str, tmp_path: Path
) -> None:
    shutil.copytree(
        KERNELS / "slora_kernels", tmp_path / "slora_kernels", ignore=shutil.ignore_patterns("__pycache__")
    )
    library = ctypes.CDLL(str(build_library(tmp_path / "slora_kernels" / "cpu", isa, ARGMAX.name)))
    assert len([getattr(library, ARGMAX.symbol(dtype)) for dtype in ARGMAX.dtypes]) == 3
    if isa not in list_available_isas():
        return
    code = WITHOUT.format(names=["numba", "llvmlite", "triton"]) + (
        "import slora_kernels, torch\n"
        "from slora_kernels.kernel_selector import select_kernels\n"
        "for name in ('auto', 'torch'):\n"
        "    kernels = select_kernels(name, torch.device('cpu'))\n"
        "    print(kernels.name, *kernels.argmax(torch.tensor([[1.0, 3.0, 2.0]])))\n"
    )
    best = "tensor([3.]) tensor([1])\n"
    assert run_python(code, sources=tmp_path, **{VARIABLE: isa}) == f"cpu {best}torch {best}"


def load_emulator(library: Path) -> "Aarch64Emulator":
    if importlib.util.find_spec("unicorn") is None and not os.environ.get("CI"):
        pytest.skip("the package unicorn emulates AArch64")
    emulator: Aarch64Emulator = importlib.import_module("tests.support.aarch64_emulator").Aarch64Emulator(
        library
    )
    return emulator


@pytest.mark.skipif("neon" in OWN_ISAS, reason="this machine needs no emulator")
def test_a_library_for_aarch64_is_built_on_another_machine_and_computes(tmp_path: Path) -> None:
    emulator = load_emulator(build_library(tmp_path, "neon", ARGMAX.name))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        logits = torch.randn(5, 1000).to(dtype)
        best, tokens = torch.empty(5), torch.empty(5, dtype=torch.int64)
        job = begin_job(5, *pack_rows(logits), *pack_row(best), *pack_row(tokens), *(1000, 0, 0))
        emulator.call(ARGMAX.symbol(name_dtype(dtype)), job.buffer_info()[0])
        numbers = logits.float()
        assert torch.equal(best, numbers.amax(1)) and torch.equal(
            best, numbers.gather(1, tokens[:, None])[:, 0]
        )


def test_every_worker_of_a_model_is_in_a_library() -> None:
    for dtype in ("float32", "bfloat16", "float16"):
        for kv_format in KVFormat:
            for worker, needed in list_model_workers(dtype, kv_format):
                assert worker in WORKERS and needed in worker.dtypes


def build_wheel(folder: Path, isas: str) -> Path:
    """Builds the wheel as pip does, from the installed build requirements."""
    for isa in isas.split():
        require_linker(isa)
    source = folder / "source"
    for name in ("kernels", "adapters", "slora", "api"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, source)
    (source / "demo").symlink_to(ROOT / "demo")
    # An earlier build of other sources.
    (source / "build" / "lib" / "slora_kernels").mkdir(parents=True)
    (source / "build" / "lib" / "slora_kernels" / "removed.py").write_bytes(b"")
    code = (
        "import os, sys; os.chdir(sys.argv[1]); import wheel_backend as b; print(b.build_wheel(sys.argv[2]))"
    )
    printed = run_python(code, str(source), str(folder), sources=source / "kernels", SLORA_WHEEL_ISAS=isas)
    return folder / printed.splitlines()[-1]


def test_a_wheel_without_machine_code_is_for_any_machine(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path, "")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "slora_kernels/cpu/workers/attention.py" in names and "slora_kernels/removed.py" not in names
    assert not any(one.endswith(".so") for one in names)


@pytest.mark.parametrize(
    ("isas", "machines"),
    (("avx2 amx", ["x86_64"]), ("neon", ["aarch64"]), ("neon avx2", ["aarch64", "x86_64"])),
)
def test_a_wheel_suits_the_machines_of_its_instruction_sets(isas: str, machines: list[str]) -> None:
    code = (
        "import wheel_backend, setuptools\n"
        "print(*wheel_backend.BdistWheel(setuptools.Distribution()).get_tag())"
    )
    platforms = ".".join(f"manylinux_2_17_{machine}" for machine in machines)
    assert run_python(code, SLORA_WHEEL_ISAS=isas) == f"py3 none {platforms}\n"


@pytest.mark.soak
def test_a_wheel_with_machine_code_computes_a_model_without_numba(tmp_path: Path) -> None:
    isa = find_cpu_isa()
    assert isa is not None
    wheel = build_wheel(tmp_path, isa)
    assert wheel.name.endswith(f"-py3-none-manylinux_2_17_{platform.machine()}.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    code = WITHOUT.format(names=["numba", "llvmlite"]) + (
        "import slora_kernels, torch\n"
        "from slora_kernels.batch import KVGeometry\n"
        "from slora_kernels.kernel_selector import select_kernels\n"
        "kernels = select_kernels('auto', torch.device('cpu'))\n"
        "for dtype in (torch.float32, torch.bfloat16, torch.float16):\n"
        "    print(kernels.warm_up(KVGeometry(1, 1, 1, 64, 16, dtype)) < 1)\n"
    )
    assert run_python(code, sources=tmp_path / "installed").split() == ["True"] * 3
    assert (tmp_path / "installed" / "slora_kernels" / "cpu" / name_library(isa)).stat().st_size < 3 << 20


# The kernels of this process are those for AArch64, which are emulated. Their threads take turns.
EMULATED = """
import functools, sys
import slora_kernels.cpu_isa as cpu_isa
cpu_isa.list_available_isas = lambda: ("neon",)
import pytest
from pathlib import Path
from slora_kernels.cpu import machine_code
from tests.support.aarch64_emulator import Aarch64Emulator
emulator = Aarch64Emulator(Path(sys.argv[1]))
machine_code.find_worker = functools.cache(emulator.find_worker)
status = pytest.main(sys.argv[2:])
print(emulator.num_calls)
sys.exit(status)
"""
KERNEL_TESTS = (
    "test_argmax test_attention test_coded_linear test_fp8_kv test_lora test_norm_and_activation test_invariance "
    "test_quantized_linear test_rotate_and_write_kv cpu/test_cpu_kernels cpu/test_matrix_copies"
)


@pytest.mark.soak
@pytest.mark.skipif("neon" in OWN_ISAS, reason="all other tests run this machine code")
def test_emulated_machine_code_for_aarch64_passes_the_tests_of_the_kernels(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path, "neon")
    assert wheel.name.endswith("-py3-none-manylinux_2_17_aarch64.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    library = tmp_path / "installed" / "slora_kernels" / "cpu" / name_library("neon")
    load_emulator(library)
    tests = [f"tests/kernels/{name}.py" for name in KERNEL_TESTS.split()]
    printed = run_python(
        EMULATED, str(library), "-p", "no:cacheprovider", "-k", "cpu", *tests,
        **{VARIABLE: "", "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert int(printed.split()[-1]) > 1000


@pytest.mark.parametrize("isas", ("avx9", "amx avx9"))
def test_an_unknown_instruction_set_of_the_wheel_is_refused_with_the_names(isas: str) -> None:
    code = "import wheel_backend; wheel_backend.get_requires_for_build_wheel()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True, text=True, check=False, encoding="utf-8",
        env={**os.environ, "PYTHONPATH": str(KERNELS), "SLORA_WHEEL_ISAS": isas},
    )  # fmt: skip
    assert (
        done.returncode == 1
        and "names avx9; the names are avx2, avx512, avx512_bf16, amx, neon" in done.stderr
    )


def test_only_a_wheel_with_machine_code_needs_numba_to_be_built() -> None:
    code = "import wheel_backend; print(wheel_backend.get_requires_for_build_wheel())"
    assert "numba" in run_python(code, SLORA_WHEEL_ISAS="amx")
    assert "numba" not in run_python(code, SLORA_WHEEL_ISAS="")
