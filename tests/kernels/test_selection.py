import subprocess
import sys

import pytest
import torch

from slora_kernels.kernel_selector import select_kernels


def test_kernels_are_chosen_by_name() -> None:
    assert select_kernels("torch", torch.device("cpu")).name == "torch"


def test_auto_on_a_cpu_is_never_the_interpreter() -> None:
    assert select_kernels("auto", torch.device("cpu")).name in ("cpu", "torch")


def test_unknown_kernels_are_refused_with_the_names_that_exist() -> None:
    with pytest.raises(ValueError, match="'cuda'; choose one of auto, triton, torch, cpu"):
        select_kernels("cuda", torch.device("cpu"))


def test_a_cpus_kernels_are_refused_on_a_gpu() -> None:
    with pytest.raises(ValueError, match="only on a CPU"):
        select_kernels("cpu", torch.device("cuda"))


def test_the_torch_path_needs_neither_triton_nor_numba() -> None:
    script = (
        "import gc; gc.disable()\n"
        "sys.modules['triton'] = sys.modules['numba'] = None\n"
        "import torch; from slora_kernels.kernel_selector import select_kernels\n"
        "assert select_kernels('torch', torch.device('cpu')).name == 'torch'\n"
    )
    command = [sys.executable, "-P", "-c", f"import sys; sys.path[:] = {sys.path!r}\n{script}"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, encoding="utf-8")
    assert result.returncode == 0, result.stderr
