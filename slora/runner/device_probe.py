"""Prints as JSON what torch finds on this machine, and whether the engine can use it as configured.

    python -P -m slora.runner.device_probe --device auto --kernels auto --kv-cache-dtype auto

`slora doctor` runs this program, because API processes and commands do not import torch.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version

import torch

from slora.core.errors import ConfigError
from slora.models.float8_support import check_float8_kv
from slora.runner.device_facts import DeviceFacts
from slora.runner.model_part import limit_torch_threads, load_kernels, resolve_device
from slora_kernels.cpu.machine_code import has_workers
from slora_kernels.cpu_isa import find_cpu_isa


def find_device(device_name: str, kernels_name: str, kv_cache_dtype: str) -> DeviceFacts:
    """Returns the facts about the device. Raises ConfigError if the engine cannot run with these settings."""
    limit_torch_threads()
    device = resolve_device(device_name, kernels_name)
    try:
        kernels = load_kernels(kernels_name, device)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"kernels is {kernels_name}, but the package {error.name} is not installed; choose auto"
        ) from error
    if kv_cache_dtype == "fp8":
        check_float8_kv(device)
    is_gpu = device.type == "cuda"
    free_bytes, total_bytes = torch.cuda.mem_get_info(device) if is_gpu else (None, None)
    return DeviceFacts(
        device.type,
        _describe_gpu(device) if is_gpu else _describe_cpu(),
        torch.cuda.device_count(),
        kernels.name,
        has_workers(),
        torch.__version__,
        _find_version("triton"),
        _find_version("numba"),
        torch.get_num_threads(),
        total_bytes,
        free_bytes,
    )


def _describe_gpu(device: torch.device) -> str:
    platform = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    return f"{torch.cuda.get_device_name(device)} ({platform})"


def _describe_cpu() -> str:
    isa = find_cpu_isa()
    return "CPU" if isa is None else f"CPU ({isa})"


def _find_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Prints what torch finds on this machine, as JSON.")
    for flag in ("--device", "--kernels", "--kv-cache-dtype"):
        parser.add_argument(flag, default="auto")
    chosen = parser.parse_args(arguments)
    try:
        facts = find_device(chosen.device, chosen.kernels, chosen.kv_cache_dtype)
    except ConfigError as error:
        print(json.dumps({"error": str(error)}))
        return 0
    print(json.dumps(asdict(facts)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
