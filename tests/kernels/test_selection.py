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
