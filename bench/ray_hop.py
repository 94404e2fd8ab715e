"""What does a token cost that passes through Ray, and what over the direct connection?

    python -m bench.ray_hop

It starts `slora deploy --local` with the demo model, and sends the same requests to the same replicas both ways: by the
handle of the deployment, and over TCP as API processes do. The ways alternate, so other load meets both.
"""

import argparse
import asyncio
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import ray
from ray import serve

from bench.table import print_table
from slora.client.replica_group import ReplicaGroup
from slora.core.request import EngineRequest, TokenDelta
from slora.core.sampling_params import SamplingParams
from slora_api.cluster.local_cluster import LocalCluster
from slora_api.processes.replica_list import ReplicaList, ReplicaListFiles

_DEMO = Path(__file__).parents[1] / "demo" / "model"
_START_S = 600.0
_PARALLEL = 16

Send = Callable[[EngineRequest], AsyncIterator[list[TokenDelta]]]
_numbers = itertools.count()


def ask(max_tokens: int) -> EngineRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return EngineRequest(f"hop-{next(_numbers)}", "bench", list(range(5, 21)), (), sampling)


async def time_request(send: Send, max_tokens: int) -> float:
    """Returns the seconds of one request."""
    began, num_tokens = time.perf_counter(), 0
    async for deltas in send(ask(max_tokens)):
        num_tokens += sum(len(delta.token_ids) for delta in deltas)
    assert num_tokens == max_tokens, f"{num_tokens} tokens instead of {max_tokens}"
    return time.perf_counter() - began


async def measure(send: Send, num_requests: int, max_tokens: int) -> tuple[list[float], float]:
    """Returns the seconds of single requests of one token, and tokens per second of parallel streams."""
    alone = [await time_request(send, 1) for _ in range(num_requests)]
    began = time.perf_counter()
    await asyncio.gather(*(time_request(send, max_tokens) for _ in range(_PARALLEL)))
    return alone, _PARALLEL * max_tokens / (time.perf_counter() - began)


async def compare(local: LocalCluster, data_dir: Path, rounds: int) -> None:
    files = ReplicaListFiles(local.directory / "replicas.json", data_dir / "cluster-secret")
    group = ReplicaGroup((), 0)
    ReplicaList(files, group).apply()
    connecting = asyncio.create_task(group.run())
    while not all(group.health.values()) or not group.health:
        await asyncio.sleep(0.05)
    handle = serve.get_app_handle("slora").options(method_name="generate", stream=True)
    ways: dict[str, Send] = {"direct TCP": group.generate, "Ray's handle": handle.remote}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for send in ways.values():
        await measure(send, 5, 16)  # Both ways open their connections.
    for _ in range(rounds):
        for name, send in ways.items():
            alone, speed = await measure(send, 20, 64)
            seconds[name] += alone
            speeds[name].append(speed)
    connecting.cancel()
    rows = []
    for name in ways:
        p50, p99 = _quantiles(seconds[name])
        speed = statistics.median(speeds[name])
        rows.append(
            {"way": name, "one token, p50 ms": 1e3 * p50, "p99 ms": 1e3 * p99, "tokens/s together": speed}
        )
    print_table(f"{len(seconds['direct TCP'])} requests of one token, then {_PARALLEL} streams", rows)
    direct, hop = (statistics.median(seconds[name]) for name in ways)
    fast, slow = (statistics.median(speeds[name]) for name in ways)
    print(f"Ray's hop takes {hop / direct:.1f} times as long, at {slow / fast:.2f} times the throughput")


def _quantiles(values: list[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return ordered[len(ordered) // 2], ordered[int(0.99 * (len(ordered) - 1))]


def run_beside_server(rounds: int, num_replicas: int) -> int:
    """Starts the cluster, and this program again with the variables that Ray needs."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--local", "--model", str(_DEMO), "--data-dir", folder, "--port", "0", "--device", "cpu"]
        flags += ["--dtype", "float32", "--pool-bytes", "64MiB", "--replicas", str(num_replicas)]
        server = subprocess.Popen(
            [sys.executable, "-P", "-c", "from slora_api.cli.main import main; main()", "deploy", *flags],
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        try:
            assert server.stdout is not None
            deadline = time.monotonic() + _START_S
            listed = LocalCluster.of(Path(folder)).directory / "replicas.json"
            while not listed.exists() or listed.read_text(encoding="utf-8").count("port") < num_replicas:
                assert server.poll() is None and time.monotonic() < deadline, "the cluster did not start"
                time.sleep(0.5)
            variables = {**os.environ, **LocalCluster.of(Path(folder).resolve()).variables()}
            # The working directory, which has `bench`, must be on the path of the new process.
            command = [sys.executable, "-m", "bench.ray_hop", "--data-dir", folder]
            command += ["--rounds", str(rounds)]
            return subprocess.run(command, env=variables, check=False).returncode
        finally:
            server.terminate()
            server.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--data-dir", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.data_dir is None:
        return run_beside_server(arguments.rounds, arguments.replicas)
    local = LocalCluster.of(arguments.data_dir.resolve())
    ray.init(local.read_address(), log_to_driver=False)
    asyncio.run(compare(local, arguments.data_dir, arguments.rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
