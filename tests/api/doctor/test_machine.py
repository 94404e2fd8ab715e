"""Memory, open files and the port are compared with the settings."""

import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from slora.core.engine_config import EngineConfig
from slora.core.errors import ConfigError
from slora.runner.device_facts import DeviceFacts
from slora_api.core.package_version import find_package_version
from slora_api.core.settings import Settings
from slora_api.doctor import checks
from slora_api.doctor.checks import (
    Finding,
    ModelFacts,
    Severity,
    check_device,
    check_port,
    check_server,
    find_model,
    find_server,
)
from slora_api.processes import device as device_module
from slora_api.processes.device import check_num_gpus, find_device
from slora_kernels.machine_limits import MachineLimits
from tests.api.doctor.test_doctor import CPU, DEMO
from tests.api.platform import running_platform
from tests.api.scripted_engine import ScriptedEngine
from tests.support.coded_checkpoints import CodedForm, write_coded_checkpoint

T = TypeVar("T")

GIB = 1 << 30
SETTINGS = Settings(EngineConfig(DEMO / "model"))
GPU = replace(CPU, type="cuda", device="H100 (CUDA 13.0)", num_gpus=2, kernels="triton", free_bytes=4 * GIB)


def known(value: T) -> Future[T]:
    fact: Future[T] = Future()
    fact.set_result(value)
    return fact


def worst(findings: Iterator[Finding]) -> tuple[Severity, str]:
    found = list(findings)
    order = list(Severity)
    status = min((one.status for one in found), key=order.index)
    return status, " ".join(f"{one.detail} {one.remedy}" for one in found)


def check_memory(
    settings: Settings, device: DeviceFacts = CPU, *, weights: int = GIB
) -> tuple[Severity, str]:
    model = ModelFacts(None, 1, weights)  # type: ignore[arg-type]
    return worst(checks.check_memory(settings, known(device), known(model)))


@pytest.fixture
def free_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MachineLimits, "free_memory_bytes", lambda _: 8 * GIB)
    monkeypatch.setattr(MachineLimits, "memory_bytes", 9 * GIB)


@pytest.mark.usefixtures("free_ram")
def test_settings_that_need_more_memory_than_is_free_fail_with_the_sum() -> None:
    assert check_memory(SETTINGS)[0] is Severity.OK
    large = replace(SETTINGS, engine=replace(SETTINGS.engine, pool_bytes=6 * GIB))
    status, text = check_memory(large)
    assert status is Severity.FAILS
    assert "8.0 GiB of host memory are free (this control group may use 9.0 GiB)" in text
    assert "page pool 6.0 GiB" in text and "--pool-bytes" in text


@pytest.mark.usefixtures("free_ram")
def test_weights_and_pool_of_a_gpu_are_compared_with_its_own_memory() -> None:
    status, text = check_memory(SETTINGS, GPU, weights=2 * GIB)
    assert status is Severity.OK and "4.0 GiB of GPU memory are free" in text
    assert check_memory(SETTINGS, GPU, weights=5 * GIB)[0] is Severity.FAILS


@pytest.mark.usefixtures("free_ram")
def test_each_rank_holds_a_part_of_the_weights_and_a_pool_and_swap_space_of_its_own() -> None:
    divided = replace(SETTINGS, engine=replace(SETTINGS.engine, tensor_parallel_size=2, pool_bytes=GIB))
    status, text = check_memory(divided, GPU, weights=5 * GIB)
    assert status is Severity.OK and "weights take 2.5 GiB" in text
    assert "swapped sequences 512 MiB" in text
    status, text = check_memory(divided, weights=5 * GIB)
    assert status is Severity.FAILS and "weights 5.0 GiB, page pool 2.0 GiB" in text


def test_the_size_of_the_weights_is_read_from_the_headers() -> None:
    found = find_model(SETTINGS)
    stored = (DEMO / "model" / "model.safetensors").stat().st_size
    assert 0 < stored - found.num_bytes < 10_000
    for form, most in (("int8", 0.6), ("int4", 0.45)):
        quantized = replace(SETTINGS, engine=replace(SETTINGS.engine, quantization=form))
        assert find_model(quantized).num_bytes < most * found.num_bytes


@pytest.mark.parametrize(
    "form",
    [
        CodedForm("gptq", 64, torch.float16),
        CodedForm("nf4", 64, torch.float32, is_nested=True, storage=torch.bfloat16),
    ],
)
def test_weights_of_4_bits_are_measured_as_they_are_stored(tmp_path: Path, form: CodedForm) -> None:
    stored, _ = write_coded_checkpoint(DEMO / "model", tmp_path, form)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / "model" / name, stored)
    found = find_model(SETTINGS).num_bytes
    coded = find_model(replace(SETTINGS, engine=EngineConfig(stored))).num_bytes
    assert 0.125 * found < coded < 0.3 * found


def test_too_few_open_files_are_a_warning_and_fail_if_answers_do_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for limit, status in ((20_000, Severity.OK), (1024, Severity.WARNING), (256, Severity.FAILS)):
        monkeypatch.setattr("resource.getrlimit", lambda _, limit=limit: (100, limit))
        assert worst(checks.check_open_files(SETTINGS))[0] is status


def test_a_port_of_another_program_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        taken = replace(SETTINGS, port=other.getsockname()[1])
        assert find_server(taken) is None
        assert worst(check_port(taken))[0] is Severity.FAILS
    free = replace(SETTINGS, port=0)
    assert find_server(free) is None and worst(check_port(free))[0] is Severity.OK


def test_a_server_that_runs_is_asked_for_its_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_platform(tmp_path, ScriptedEngine()) as platform:
        settings = replace(SETTINGS, port=int(platform.url.rpartition(":")[2]))

        def check() -> tuple[Severity, str]:
            found = find_server(settings)
            assert found is not None
            return worst(check_server(settings, found))

        status, text = check()
        assert status is Severity.OK and f"slora {find_package_version()} answers" in text
        platform.engine.ready = False
        status, text = check()
        assert status is Severity.WARNING and "Not ready" in text
        platform.engine.ready = True
        with monkeypatch.context() as patch:
            patch.setattr(type(platform.services.foundation.reserve), "is_full", True)
            status, text = check()
        assert status is Severity.WARNING and "disk of the data directory is full" in text
        monkeypatch.setattr(checks, "find_package_version", lambda: "0.0.1")
        status, text = check()
        assert status is Severity.WARNING and "this command is of version 0.0.1" in text


def test_the_device_is_what_the_program_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = {"stdout": json.dumps({"error": "device is cuda, but torch sees no GPU"}), "returncode": 0}

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, stderr="Traceback\nImportError: libcudart.so", **printed)

    monkeypatch.setattr(device_module.subprocess, "run", run)
    with pytest.raises(ConfigError, match="torch sees no GPU"):
        find_device(SETTINGS.engine)
    printed |= {"stdout": "", "returncode": 1}
    with pytest.raises(ConfigError, match=r"ImportError: libcudart\.so"):
        find_device(SETTINGS.engine)


def test_a_gpu_that_the_settings_leave_idle_is_a_warning() -> None:
    assert worst(check_device(known(GPU)))[0] is Severity.OK
    assert worst(check_device(known(replace(CPU, num_gpus=1))))[0] is Severity.WARNING
    assert "of which the first is used" in worst(check_device(known(GPU)))[1]
    assert "GPUs, of which" not in worst(check_device(known(GPU), 2))[1]
    status, text = worst(check_device(known(GPU), 4))
    assert status is Severity.FAILS and "tensor_parallel_size is 4, but torch sees 2 GPUs" in text
    status, text = worst(check_device(known(replace(CPU, kernels="torch", has_cpu_kernels=False))))
    assert status is Severity.WARNING and "pip install numba" in text


def test_a_server_with_more_ranks_than_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    divided = replace(SETTINGS.engine, tensor_parallel_size=4)
    monkeypatch.setattr(device_module, "find_device", lambda _: GPU)
    message = r"tensor_parallel_size is 4, but torch sees 2 GPUs.*to at most 2, or make more GPUs visible"
    with pytest.raises(ConfigError, match=message):
        check_num_gpus(divided)
    check_num_gpus(replace(divided, tensor_parallel_size=2))
    monkeypatch.setattr(device_module, "find_device", lambda _: CPU)
    check_num_gpus(divided)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_parallel_size": 3}, r"tensor_parallel_size is 3: .*; choose a size that divides 4"),
        ({"max_model_len": 1 << 20}, r"max_model_len is 1048576, but .*; give at most that"),
        (
            {"model_impl": "transformers", "quantization": "int4"},
            r"quantization is int4, but transformers' classes compute this model .*; set quantization to auto",
        ),
    ],
)
def test_settings_that_do_not_fit_the_model_are_refused_before_any_process_starts(
    changes: dict[str, Any], message: str
) -> None:
    """Only the engine refused some of them, so the doctor found everything in order."""
    with pytest.raises(ConfigError, match=message):
        find_model(replace(SETTINGS, engine=replace(SETTINGS.engine, **changes)))
