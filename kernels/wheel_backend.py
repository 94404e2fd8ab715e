"""The build backend of the wheel: setuptools, and the machine code of the CPU kernels.

On Linux with x86-64 or AArch64, the wheel has a library for each instruction set of such CPUs, so the server needs no
compiler at its first start. Compiling them takes some minutes, numba, which pip brings for the build, and a linker.
`SLORA_WHEEL_ISAS` names the instruction sets, for example `avx512 amx`, or `neon`, also on the other kind of machine.
With an empty value, the wheel has none. An editable installation never has any.
"""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403 - the other hooks
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

from slora_kernels.cpu.machine_code import name_library
from slora_kernels.cpu_isa import CPU_ISAS, VARIABLE

_WANTED = "SLORA_WHEEL_ISAS"


def get_requires_for_build_wheel(config_settings: Mapping[str, Any] | None = None) -> list[str]:
    required = build_meta.get_requires_for_build_wheel(config_settings)
    return [*required, "numba>=0.68,<0.69"] if _list_isas() else required


def build_wheel(
    wheel_directory: str,
    config_settings: Mapping[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    # setuptools would add the modules that an earlier build has left there.
    shutil.rmtree(Path("build", "lib"), ignore_errors=True)
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def _list_isas() -> list[str]:
    """The instruction sets of the wheel. Raises SystemExit for an unknown one."""
    own = [name for name, isa in CPU_ISAS.items() if isa.machine == platform.machine()]
    isas = os.environ.get(_WANTED, " ".join(own) if sys.platform == "linux" else "").split()
    if unknown := sorted(set(isas) - CPU_ISAS.keys()):
        raise SystemExit(f"{_WANTED} names {', '.join(unknown)}; the names are {', '.join(CPU_ISAS)}")
    return isas


class BuildPy(build_py):
    """Adds the libraries to the package."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        kernels = Path(__file__).parent
        paths = os.pathsep.join([str(kernels), *filter(None, [os.environ.get("PYTHONPATH")])])
        for isa in _list_isas():
            library = Path(self.build_lib, "slora_kernels", "cpu", name_library(isa))
            command = (sys.executable, "-P", "-m", "slora_kernels.cpu.precompile", "--library", str(library))
            done = subprocess.run(
                command, env={**os.environ, VARIABLE: isa, "PYTHONPATH": paths}, check=False
            )
            if done.returncode:
                raise SystemExit(f"the CPU kernels for {isa} were not built; see the lines above")


class BdistWheel(bdist_wheel):
    """Marks a wheel with libraries. They call three functions of the C library, which every version of it has."""

    def get_tag(self) -> tuple[str, str, str]:
        machines = sorted({CPU_ISAS[isa].machine for isa in _list_isas()})
        # A wheel may suit several platforms.
        platforms = ".".join(f"manylinux_2_17_{machine}" for machine in machines)
        return ("py3", "none", platforms) if machines else super().get_tag()
