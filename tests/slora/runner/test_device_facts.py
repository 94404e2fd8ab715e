"""What `slora doctor` learns about the device from a program that imports torch."""

import json
from dataclasses import asdict, fields

import pytest
import torch

from slora.errors import ConfigError
from slora.runner import device_facts
from slora.runner.device_facts import find_device
from slora_api.doctor.device import Device


def test_the_facts_name_the_packages_and_the_kernels_that_the_engine_would_use() -> None:
    found = find_device("cpu", "torch", "auto")
    assert (found.type, found.kernels, found.torch) == ("cpu", "torch", torch.__version__)
    assert found.num_threads == torch.get_num_threads()
    assert Device(**json.loads(json.dumps(asdict(found)))).kernels == "torch"
    assert {one.name for one in fields(Device)} == {one.name for one in fields(found)}


def test_a_device_that_is_not_there_is_an_answer_and_no_crash(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["device_facts", "--device", "cuda"])
    assert device_facts.main() == 0
    assert "torch sees no GPU" in json.loads(capsys.readouterr().out)["error"]


def test_kernels_whose_package_is_missing_are_refused_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, device: torch.device) -> None:
        raise ModuleNotFoundError(name="numba")

    monkeypatch.setattr(device_facts, "load_kernels", load)
    with pytest.raises(ConfigError, match="the package numba is not installed"):
        find_device("cpu", "numba", "auto")
