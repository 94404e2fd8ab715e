"""What child processes get from their parent: environment variables, their priority, and their end.

The children read files, templates and forms of tenants. They must not hold secrets that they do not need, such as the
operator's key or URLs with passwords. An allow-list of variables also excludes secrets that are unrelated to slora.

All children get the same base, so that they find the same packages, files and times as the server.
"""

import asyncio
import os
import signal
import sys
import threading
from asyncio.subprocess import Process
from collections.abc import Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any

# Variables of Python and the C library. None of them holds a secret.
BASE_VARIABLES: tuple[str, ...] = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "LC_*", "LOCPATH", "TZ", "TZDIR", "TMPDIR"),
    *("PYTHON*", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "LD_PRELOAD", "MALLOC_*", "GLIBC_TUNABLES"),
)
# Also those of the libraries for computing.
ENGINE_VARIABLES: tuple[str, ...] = (
    *BASE_VARIABLES,
    *("XDG_CACHE_HOME", "CC", "CXX"),
    *("OMP_*", "GOMP_*", "KMP_*", "MKL_*", "OPENBLAS_*", "NUMBA_*", "TORCH*", "PYTORCH_*", "TRITON_*"),
    *("SLORA_CPU_ISA", "ATEN_*", "ONEDNN_*", "DNNL_*", "LRU_CACHE_CAPACITY"),
    *("CUDA*", "CUBLAS_*", "CUDNN_*", "NVIDIA_*", "NCCL_*", "GLOO_*", "HIP_*", "HSA_*", "ROCR_*", "ROCM_*"),
    *("HF_HOME", "HF_MODULES_CACHE", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_*"),
)
NETWORK_VARIABLES: tuple[str, ...] = (
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
)
# pip and uv, with the package index that they are configured for.
INSTALLER_VARIABLES: tuple[str, ...] = (
    *BASE_VARIABLES,
    *NETWORK_VARIABLES,
    "PIP_*",
    "UV_*",
    "NETRC",
    "XDG_*",
)
# The loader also opens the durable store. The store's client library reads credentials and network settings from these
# variables.
LOADER_VARIABLES: tuple[str, ...] = (
    *ENGINE_VARIABLES,
    *("AWS_*", "FSSPEC_*", "GOOGLE_*", "GCSFS_*", "CLOUDSDK_*", "AZURE_*", "HF_*"),
    *("IDENTITY_ENDPOINT", "IDENTITY_HEADER", "MSI_ENDPOINT", "MSI_SECRET"),
    *NETWORK_VARIABLES,
)
# A value that the operator sets takes precedence over these defaults.
_DEFAULTS = {
    # oneDNN compiles a matmul for each shape of a weight and each number of rows in a block, of which there are at most
    # 13 (`slora_kernels.torch.row_blocks`). That takes 0.55 ms of CPU time and 0.6 MiB. By default, oneDNN caches 1,024
    # primitives, two for each matmul. A cache of 512 holds the matmuls of 20 shapes.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "512",
    # PyTorch has its own cache in front of oneDNN's, by default of 1,024 matmuls. The default kept up to 280 MiB of
    # matmuls that oneDNN had evicted. A miss costs 0.01 ms if oneDNN still has the matmul.
    "LRU_CACHE_CAPACITY": "64",
}


def pass_on(environment: Mapping[str, str], allowed: tuple[str, ...]) -> dict[str, str]:
    """Returns the variables of `environment` whose names match one of the `allowed` patterns."""
    passed = {
        name: value
        for name, value in environment.items()
        if any(fnmatchcase(name, pattern) for pattern in allowed)
    }
    return _DEFAULTS | passed


# The niceness of processes that work for one tenant, so that processes that serve all tenants have a higher priority.
# `slora_adapters.loader.loader_process` sets the same.
NICENESS = 10


async def start_tenant_child(*arguments: str, environment: Mapping[str, str], **options: Any) -> Process:
    """Starts Python with a lower priority than this process has. options: those of `asyncio.create_subprocess_exec`.

    The child does not lower its priority itself, because its imports take most of the CPU time of a short task.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", *arguments, env=dict(environment), **options
    )
    with suppress(ProcessLookupError):  # It has already ended.
        os.setpriority(os.PRIO_PROCESS, process.pid, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
    return process


def describe_exit(exit_code: int) -> str:
    """Returns how a child ended: `exit code 2`, or the name of the signal that ended it, such as SIGSEGV."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


def end_with_stdin() -> None:
    """Ends this process as soon as its standard input closes. The parent holds the other end, so a child ends with its
    parent, even by kill -9.
    """

    def watch() -> None:
        # Read the descriptor instead of sys.stdin. Python aborts if a thread holds the lock of sys.stdin at exit.
        while os.read(0, 4096):
            pass
        os._exit(0)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
