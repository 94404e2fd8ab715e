"""The engine process as `slora serve` starts it, with its loader: how soon it serves, and what memory it takes.

PSS is the private memory of a process and its proportional part of shared memory. It is read after a batch that fills
the pool, so that every page of the pool has been touched. The part of the loader's host cache that the engine maps is
subtracted.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.contender import SOURCES
from bench.table import Row
from bench.workload import prompts
from slora import SamplingParams
from slora.client.client import RemoteEngine
from slora.core.request import EngineRequest
from slora.models.model_spec import read_model_spec
from slora_adapters.loader.loader_process import LoaderConfig

_BATCH, _TOKENS = 64, 64
_CACHE_BYTES = 256 << 20
_WAIT_S = 300.0
_MIB = 1 << 20


def footprint_row(model: Path, dtype: str, threads: int, folder: Path) -> Row:
    """folder: an empty folder for sockets and logs."""
    shape = read_model_spec(model).shape(dtype)
    paths = {"socket": "engine.sock", "loader_socket": "loader.sock", "usage_directory": "usage"}
    loader = LoaderConfig(
        folder / "loader.sock",
        store=str(folder / "store"),
        shape=shape,
        dtype=dtype,
        host_cache_bytes=_CACHE_BYTES,
    )
    token_bytes = shape.num_layers * shape.layer_page_bytes(16) // 16
    pool_bytes = _BATCH * (2 * _TOKENS + 16) * token_bytes
    engine = {"model": str(model), "dtype": dtype, "device": "cpu", "pool_bytes": pool_bytes, "swap_bytes": 0}
    config = json.dumps({name: str(folder / path) for name, path in paths.items()} | {"engine": engine})
    with _child("slora_adapters.loader.loader_process", loader.to_json(), 1, folder):
        while not (folder / "loader.sock").exists():
            time.sleep(0.01)
        start = time.perf_counter()
        with _child("slora.engine.process", config, threads, folder) as process_id:
            ready_at = asyncio.run(_fill(folder / "engine.sock"))
            pss, mapped = read_pss_bytes(process_id)
    weights = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    return {
        "dtype": dtype,
        "ready s": ready_at - start,
        "PSS MiB": pss / _MIB,
        "weights MiB": weights / _MIB,
        "pool MiB": pool_bytes / _MIB,
        "host cache MiB": mapped / _MIB,
        "beside MiB": (pss - mapped - weights - pool_bytes) / _MIB,
    }


def read_pss_bytes(process_id: int) -> tuple[int, int]:
    """Returns the PSS of a process, and the part of it that is shared memory, here the loader's host cache."""
    whole = shared = 0
    for line in Path(f"/proc/{process_id}/smaps_rollup").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name == "Pss":
            whole = 1024 * int(value.split()[0])
        elif name == "Pss_Shmem":
            shared = 1024 * int(value.split()[0])
    return whole, shared


async def _fill(socket: Path) -> float:
    """Sends a batch of 64 and waits for its answers. Returns when the engine was ready, on `time.perf_counter`."""
    client = RemoteEngine(socket)
    running = asyncio.create_task(client.run())
    try:
        async with asyncio.timeout(_WAIT_S):
            while not client.ready:
                await asyncio.sleep(0.01)
            ready_at = time.perf_counter()
            params = SamplingParams(max_tokens=_TOKENS, temperature=0.0, ignore_eos=True)
            asked = enumerate(prompts(_BATCH, _TOKENS))
            requests = (EngineRequest(str(index), "bench", prompt, (), params) for index, prompt in asked)
            await asyncio.gather(*(_read(client, request) for request in requests))
        return ready_at
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def _read(client: RemoteEngine, request: EngineRequest) -> None:
    async for _ in client.generate(request):
        pass


@contextmanager
def _child(module: str, config: str, threads: int, folder: Path) -> Iterator[int]:
    """Runs a module as a child process, which ends when its standard input closes. Yields its process id."""
    environment: dict[str, Any] = {
        **os.environ,
        "PYTHONPATH": SOURCES,
        "OMP_NUM_THREADS": str(threads),
        "GOMP_SPINCOUNT": "10000",
    }
    with (folder / f"{module}.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, "--config", config],
            stdin=subprocess.PIPE,
            stderr=log,
            env=environment,
        )
    try:
        yield process.pid
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)
