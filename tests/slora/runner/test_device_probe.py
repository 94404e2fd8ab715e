"""What `slora doctor` learns about the device from a program that imports torch."""

import json
from dataclasses import asdict

import pytest
import torch

from slora.core.errors import ConfigError
from slora.runner import device_probe
from slora.runner.device_facts import DeviceFacts
from slora.runner.device_probe import find_device


def test_the_facts_name_the_packages_and_the_kernels_that_the_engine_would_use() -> None:
    found = find_device("cpu", "torch", "auto")
    assert (found.type, found.kernels, found.torch) == ("cpu", "torch", torch.__version__)
    assert found.num_threads == torch.get_num_threads()
    assert DeviceFacts(**json.loads(json.dumps(asdict(found)))).kernels == "torch"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_device_that_is_not_there_is_an_answer_and_no_crash(capsys: pytest.CaptureFixture[str]) -> None:
    assert device_probe.main(["--device", "cuda"]) == 0
    assert "torch sees no GPU" in json.loads(capsys.readouterr().out)["error"]


def test_kernels_whose_package_is_missing_are_refused_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, device: torch.device) -> None:
        raise ModuleNotFoundError(name="triton")

    monkeypatch.setattr(device_probe, "load_kernels", load)
    with pytest.raises(ConfigError, match="the package triton is not installed"):
        find_device("cpu", "triton", "auto")
