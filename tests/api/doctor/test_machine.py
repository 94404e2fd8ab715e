"""Memory, cores, open files and the port are compared with the settings."""

import json
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slora.device.device_facts import DeviceFacts
from slora.engine_config import EngineConfig
from slora.errors import ConfigError
from slora_api.doctor import machine
from slora_api.doctor.device import check_device
from slora_api.doctor.finding import Finding, Status
from slora_api.doctor.model_files import Model, find_model
from slora_api.doctor.server_probe import ServerProbe, check_port, find_server
from slora_api.doctor.shared_fact import SharedFact
from slora_api.server import device as device_module
from slora_api.server.device import check_num_gpus, find_device
from slora_api.settings import Settings
from tests.api.doctor.test_doctor import CPU, DEMO
from tests.api.platform import running_platform
from tests.api.scripted_engine import ScriptedEngine

GIB = 1 << 30
SETTINGS = Settings(EngineConfig(DEMO / "model"))
GPU = replace(CPU, type="cuda", device="H100 (CUDA 13.0)", num_gpus=2, kernels="triton", free_bytes=4 * GIB)


def known(value: object) -> SharedFact:
    return SharedFact(lambda: value)


def worst(findings: Iterator[Finding]) -> tuple[Status, str]:
    found = list(findings)
    order = list(Status)
    status = min((one.status for one in found), key=order.index)
    return status, " ".join(f"{one.detail} {one.remedy}" for one in found)


def check_memory(
    settings: Settings, device: DeviceFacts = CPU, *, weights: int = GIB, probe: ServerProbe | None = None
):
    model = Model(None, 1, weights)  # type: ignore[arg-type]
    return worst(machine.check_memory(settings, known(device), known(model), known(probe or ServerProbe())))


@pytest.fixture
def free_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_ram_bytes", lambda: 8 * GIB)
    monkeypatch.setattr(machine, "cgroup_memory_limit", lambda: 9 * GIB)


@pytest.mark.usefixtures("free_ram")
def test_settings_that_need_more_memory_than_is_free_fail_with_the_sum() -> None:
    assert check_memory(SETTINGS)[0] is Status.OK
    large = replace(SETTINGS, engine=replace(SETTINGS.engine, pool_bytes=6 * GIB))
    status, text = check_memory(large)
    assert status is Status.FAILS
    assert "8.0 GiB of host memory are free (this control group may use 9.0 GiB)" in text
    assert "page pool 6.0 GiB" in text and "--pool-bytes" in text
    # The memory of a server that runs is not free.
    assert check_memory(large, probe=ServerProbe("taken", True, "0.1.0"))[0] is Status.OK


@pytest.mark.usefixtures("free_ram")
def test_weights_and_pool_of_a_gpu_are_compared_with_its_own_memory() -> None:
    status, text = check_memory(SETTINGS, GPU, weights=2 * GIB)
    assert status is Status.OK and "4.0 GiB of GPU memory are free" in text
    assert check_memory(SETTINGS, GPU, weights=5 * GIB)[0] is Status.FAILS


@pytest.mark.usefixtures("free_ram")
def test_each_rank_holds_a_part_of_the_weights_and_a_pool_and_swap_space_of_its_own() -> None:
    divided = replace(SETTINGS, engine=replace(SETTINGS.engine, tensor_parallel_size=2, pool_bytes=GIB))
    status, text = check_memory(divided, GPU, weights=5 * GIB)
    assert status is Status.OK and "weights take 2.5 GiB" in text
    assert "swapped sequences 512 MiB" in text
    status, text = check_memory(divided, weights=5 * GIB)
    assert status is Status.FAILS and "weights 5.0 GiB, page pool 2.0 GiB" in text


def test_the_size_of_the_weights_is_read_from_the_headers() -> None:
    found = find_model(SETTINGS)
    stored = (DEMO / "model" / "model.safetensors").stat().st_size
    assert 0 < stored - found.num_bytes < 10_000
    quantized = replace(SETTINGS, engine=replace(SETTINGS.engine, quantization="int8"))
    assert find_model(quantized).num_bytes < 0.6 * found.num_bytes


def test_more_threads_than_cores_are_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limit = tmp_path / "cpu.max"
    monkeypatch.setattr(machine, "_CPU_LIMIT", limit)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    device = known(replace(CPU, num_threads=8))
    assert worst(machine.check_cores(SETTINGS, device))[0] is Status.OK
    limit.write_text("150000 100000\n")
    status, text = worst(machine.check_cores(SETTINGS, device))
    assert status is Status.WARNING and "set OMP_NUM_THREADS=2" in text
    limit.write_text("max 100000\n")
    status, text = worst(machine.check_cores(SETTINGS, known(replace(CPU, num_threads=1))))
    assert status is Status.WARNING and "unset OMP_NUM_THREADS" in text


def test_too_few_open_files_are_a_warning_and_fail_if_answers_do_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for limit, status in ((20_000, Status.OK), (1024, Status.WARNING), (256, Status.FAILS)):
        monkeypatch.setattr("resource.getrlimit", lambda _, limit=limit: (100, limit))
        assert worst(machine.check_open_files(SETTINGS))[0] is status


def test_shared_memory_that_cannot_be_created_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worst(machine.check_shared_memory(SETTINGS))[0] is Status.OK

    def refuse(*_: object) -> int:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr("os.memfd_create", refuse)
    status, text = worst(machine.check_shared_memory(SETTINGS))
    assert status is Status.FAILS and "Operation not permitted" in text


def test_a_port_of_another_program_fails_and_one_of_slora_does_not(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        free = replace(SETTINGS, port=0)
        assert worst(check_port(free, known(find_server(free))))[0] is Status.OK
        taken = replace(SETTINGS, port=port)
        found = find_server(taken)
        assert found.is_taken and not found.is_slora
        assert worst(check_port(taken, known(found)))[0] is Status.FAILS
    with running_platform(tmp_path, ScriptedEngine()) as platform:
        served = replace(SETTINGS, port=int(platform.url.rpartition(":")[2]))
        found = find_server(served)
        assert found.is_slora and not found.trouble
        platform.engine.ready = False
        status, text = worst(check_port(served, known(find_server(served))))
        assert status is Status.WARNING and "Not ready" in text
        platform.engine.ready = True


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
    assert worst(check_device(known(GPU)))[0] is Status.OK
    assert worst(check_device(known(replace(CPU, num_gpus=1))))[0] is Status.WARNING
    assert "of which the first is used" in worst(check_device(known(GPU)))[1]
    assert "GPUs, of which" not in worst(check_device(known(GPU), 2))[1]
    status, text = worst(check_device(known(GPU), 4))
    assert status is Status.FAILS and "tensor_parallel_size is 4, but torch sees 2 GPUs" in text
    status, text = worst(check_device(known(replace(CPU, kernels="torch", numba=None))))
    assert status is Status.WARNING and "slora[cpu]" in text


def test_a_server_with_more_ranks_than_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    divided = replace(SETTINGS.engine, tensor_parallel_size=4)
    monkeypatch.setattr(device_module, "find_device", lambda _: GPU)
    message = r"tensor_parallel_size is 4, but torch sees 2 GPUs.*to at most 2, or make more GPUs visible"
    with pytest.raises(ConfigError, match=message):
        check_num_gpus(divided)
    check_num_gpus(replace(divided, tensor_parallel_size=2))
    monkeypatch.setattr(device_module, "find_device", lambda _: CPU)
    check_num_gpus(divided)


def test_a_size_that_does_not_divide_the_model_is_refused_before_any_process_starts() -> None:
    divided = replace(SETTINGS, engine=replace(SETTINGS.engine, tensor_parallel_size=3))
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 3: .*; choose a size that divides 4"):
        find_model(divided)
