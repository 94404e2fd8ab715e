"""Checks the device that would run the model, and the packages that compute on it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from slora.device.device_facts import DeviceFacts
from slora.engine_config import EngineConfig
from slora.errors import ConfigError
from slora_api.doctor.finding import Finding, fine, warning
from slora_api.doctor.shared_fact import SharedFact
from slora_api.server.child_environment import ENGINE_VARIABLES, pass_on

__all__ = ["DEVICE_LIMIT_S", "check_device", "find_device"]

# torch takes seconds to import, and much longer from a cold disk.
DEVICE_LIMIT_S = 120.0


def find_device(config: EngineConfig) -> DeviceFacts:
    """Returns the device that the engine would use. A child process with the engine's environment imports torch and
    finds the device. Raises ConfigError.
    """
    command = [sys.executable, "-P", "-m", "slora.runner.device_probe"]
    command += [
        "--device",
        config.device,
        "--kernels",
        config.kernels,
        "--kv-cache-dtype",
        config.kv_cache_dtype,
    ]
    try:
        done = subprocess.run(
            command,
            env=pass_on(os.environ, ENGINE_VARIABLES),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEVICE_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"torch did not start within {DEVICE_LIMIT_S:g} s: look at the GPU's driver (nvidia-smi, rocm-smi) and at "
            "the disk of the Python environment"
        ) from None
    if done.returncode != 0:
        last_line = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise ConfigError(f"torch does not start ({last_line}): install slora's requirements again")
    answer: dict[str, Any] = json.loads(done.stdout)
    if "error" in answer:
        raise ConfigError(answer["error"])
    return DeviceFacts(**answer)


def check_device(device: SharedFact[DeviceFacts]) -> Iterator[Finding]:
    found = device.get()
    packages = ", ".join(
        f"{name} {version}"
        for name, version in (("torch", found.torch), ("triton", found.triton), ("numba", found.numba))
        if version
    )
    yield fine(f"{found.device}, kernels {found.kernels}; {packages}")
    if found.type == "cpu" and found.kernels == "torch" and found.numba is None:
        yield warning("the fast kernels for CPUs need numba", "pip install 'slora[cpu]'")
    if found.type == "cpu" and found.num_gpus:
        yield warning("the GPU of this machine is not used", "set --device auto and --kernels auto")
    if found.num_gpus > 1:
        yield fine(f"{found.num_gpus} GPUs, of which the first is used; CUDA_VISIBLE_DEVICES selects one")
