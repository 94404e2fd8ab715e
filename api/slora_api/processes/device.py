"""Finds the device of the engine without importing torch in this process."""

import json
import os
import subprocess
import sys
from typing import Any

from slora.core.engine_config import EngineConfig
from slora.core.errors import ConfigError
from slora.runner.device_facts import DeviceFacts, explain_few_gpus
from slora_adapters.process.children import ENGINE_VARIABLES, pass_on

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
            timeout=DEVICE_LIMIT_S,
            check=False,
            encoding="utf-8",
            errors="replace",
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


def check_num_gpus(config: EngineConfig) -> None:
    """Raises ConfigError if there are fewer GPUs than tensor-parallel ranks.

    Takes seconds if the ranks compute on GPUs, because a child process imports torch. On a CPU, ranks share the cores.
    """
    if config.tensor_parallel_size == 1 or config.device == "cpu":
        return
    device = find_device(config)
    if device.type == "cuda" and (reason := explain_few_gpus(config.tensor_parallel_size, device.num_gpus)):
        raise ConfigError(reason)
