"""The HTTP platform as clients see it: load over time, the cost of HTTP over the engine, and the cost of each layer.

    python -m bench.serving [--parts trace http layers] [--quick] [--json FILE]

trace   an open loop: each request is sent at its time in the trace, even if earlier ones are unanswered. The traces
        are S-LoRA's generator and a Zipf trace (`bench.simulation.traces`). Each adapter is a tenant. The figures
        have the definitions of `vllm bench serve` (`bench.serving_metrics`).
http    64 streams of the base model over HTTP, in turn with the same requests in the engine alone. Over HTTP, the
        tenant has quotas, and its usage goes into the ledger. The engine has one thread in both cases, so that the API
        process and the client have the other core.
layers  a closed loop to `slora serve` with an engine that computes nothing (`bench.null_engine`), from a bare Starlette
        route to the whole server: what the API, IPC, the usage journal, quotas and tokenizing cost. TTFT is measured
        with one stream at a time. With 64 streams and no computation it would only be 64 times the CPU time of a
        request.
        The row without IPC writes each chunk by itself, as the bare route does. With IPC, the chunks that wait for a
        stream share a write, so that row may be faster.

The client shares the cores with the server, so absolute figures hold only for this machine and this client.
"""

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from bench.adapter_depot import DTYPE, Deposit, Depot
from bench.bars import Bar
from bench.contender import ContenderProcess, slora_launch
from bench.contenders.answering import Run
from bench.contenders.answering import Setup as ContenderSetup
from bench.live_platform import Platform, Setup, Sizes, completion, live_platform
from bench.parts import Tables, run_parts
from bench.serving_metrics import Limits, Served, serving_row, tenant_rows
from bench.simulation.request_log import percentile
from bench.simulation.traces import Trace, slora_trace, zipf_trace
from bench.sse_client import SseClient
from bench.table import Row
from bench.workload import ModelSize, prompts
from slora_adapters.process.progress_bar import track_progress
from tests.api.served import ADMIN_KEY, CHARACTERS, EOS, environment, running
from tests.api.served import Served as Server

__all__ = ["http_tables", "layer_tables", "trace_tables"]

_VOCAB = len(CHARACTERS) + 1
# 85 million parameters, and the tests' tokenizer of one token for each character.
MODEL = ModelSize(hidden=768, layers=12, heads=12, kv_heads=4, head_dim=64, intermediate=2048, vocab=_VOCAB)
_SETUP = Setup(MODEL)
_RANK = 8
_STREAMS = 64
_RATIO = "over HTTP / engine alone"
_HTTP_BAR = Bar(_RATIO, lambda row: row["case"] == _RATIO, "median", 0.95)
_LIMITS = Limits(ttft_s=6.0, tpot_s=0.5)
# A tenant with a quota that no run reaches.
_LIMITED = "limited"
_QUOTA = {"requests_per_minute": 1_000_000, "tokens_per_minute": 1_000_000_000, "concurrent_answers": 1_000}
# After this time, the usage of all requests is in the ledger.
_LEDGER_S = 1.5
_LAYER_REQUESTS, _LAYER_PROMPT, _LAYER_TOKENS = 512, 256, 32
_LAYER_BARS = (
    # Of a bare route with 1,150 to 1,800 requests/s of 32 chunks, 0.45 are 17,000 to 26,000 tokens/s for each API
    # process. Several API processes add up, so an engine is the bottleneck long before.
    Bar("requests/s of the bare route", lambda row: True, "requests/s of bare", 0.45),
    Bar("chunks/s of the bare route", lambda row: True, "chunks/s of bare", 0.45),
    Bar("TTFT over the bare route, ms", lambda row: True, "TTFT over bare ms", 3.0, at_most=True),
)


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of a trace. rate: requests per second."""

    num_adapters: int
    rate: float
    duration_s: float
    lengths: tuple[int, int]


WHOLE = Scale(32, 2.0, 60.0, (8, 64))
QUICK = Scale(4, 2.0, 5.0, (4, 12))


def trace_tables(*, quick: bool, setup: Setup = _SETUP) -> Tables:
    scale = QUICK if quick else WHOLE
    asked = scale.num_adapters, scale.rate, scale.duration_s
    traces = {
        "S-LoRA, uniform (alpha 1)": slora_trace(*asked, lengths=scale.lengths),
        "S-LoRA, skewed (alpha 0.3)": slora_trace(*asked, alpha=0.3, lengths=scale.lengths),
        "Zipf (alpha 1.5)": _shortened(zipf_trace(*asked, alpha=1.5), scale.lengths[1]),
    }
    rows, by_tenant = [], []
    with tempfile.TemporaryDirectory(prefix="slora-bench-") as directory:
        depot = Depot(Path(directory), setup.model)
        deposits = depot.add(_RANK, [(f"tenant-{at}", f"adapter-{at}") for at in range(scale.num_adapters)])
        sizes = Sizes.with_room(depot, deposits, _STREAMS, 2 * scale.lengths[1])
        with live_platform(depot, sizes, *setup.flags) as platform:
            for name, trace in track_progress("Traces", list(traces.items()), "trace"):
                platform.make_cold(deposits)
                served, seconds = asyncio.run(_replay(platform, trace, deposits))
                rows.append({"trace": name, **serving_row(served, seconds, _LIMITS)})
                by_tenant += [{"trace": name, **row} for row in tenant_rows(served, 5)]
        depot.close()
    return {"open loop": rows, "open loop, the tenants with the most requests": by_tenant}


def http_tables(*, quick: bool, setup: Setup = _SETUP) -> Tables:
    """One round's ratio varies by a tenth, so the median of several rounds is held against the bar."""
    rounds, prompt_tokens, output_tokens = (1, 8, 4) if quick else (9, 64, 32)
    # Other prompts in each round, so that neither side finds them in its prefix cache.
    drawn = prompts((rounds + 1) * _STREAMS, prompt_tokens, EOS)
    runs: dict[str, list[float]] = {"engine alone": [], "over HTTP": []}
    with tempfile.TemporaryDirectory(prefix="slora-bench-") as directory:
        folder = Path(directory)
        depot = Depot(folder, setup.model)
        sizes = Sizes.with_room(
            depot, depot.add(_RANK, [("tenant", "unused")]), _STREAMS, prompt_tokens + output_tokens
        )
        pool_bytes = sizes.pool_pages * depot.full_page_bytes
        wanted = ContenderSetup(
            str(depot.model), [], DTYPE, 1, prompt_tokens + output_tokens, _STREAMS, pool_bytes
        )
        with live_platform(depot, sizes, *setup.flags, threads=1) as platform:
            platform.set_quota("bench", _QUOTA)
            alone = ContenderProcess(slora_launch(1), wanted, folder / "engine.log")
            try:
                for number in track_progress("Rounds", range(rounds + 1), "round"):  # the first is a warm-up
                    asked = drawn[number * _STREAMS : (number + 1) * _STREAMS]
                    measured = alone.run(Run(asked, [None] * _STREAMS, output_tokens))
                    tokens_per_s = asyncio.run(_stream_all(platform, asked, output_tokens))
                    if number:
                        runs["engine alone"].append(measured.tokens_per_s)
                        runs["over HTTP"].append(tokens_per_s)
            finally:
                alone.stop()
        depot.close()
    runs[_RATIO] = [b / a for a, b in zip(*runs.values(), strict=True)]
    rows: list[Row] = [
        {"case": name, "median": statistics.median(figures), "min": min(figures), "max": max(figures)}
        for name, figures in runs.items()
    ]
    table = f"{_STREAMS} streams of the base model, tokens/s in {rounds} rounds"
    return {table: rows, "bar of HTTP": [*_HTTP_BAR.verdicts(rows)]}


_BARE = "bare Starlette route"


@dataclass(frozen=True, slots=True)
class _Layer:
    """A server and the requests for it. kind: of `bench.null_server`. tenant: the tenant that sends the requests."""

    name: str
    kind: str
    prompt: str | tuple[int, ...]
    tenant: str = "bench"


def layer_tables(*, quick: bool, setup: Setup = _SETUP) -> Tables:
    """Each row adds one layer to the row above, so the difference between the two is the cost of the layer."""
    rounds, num_requests = (1, _STREAMS) if quick else (9, _LAYER_REQUESTS)
    token_ids = tuple(prompts(1, _LAYER_PROMPT, EOS)[0])
    text = "".join(CHARACTERS[token_id] for token_id in token_ids)
    layers = (
        _Layer(_BARE, "bare", token_ids),
        _Layer("+ API: keys, checks, chunks", "without-ipc", token_ids),
        _Layer("+ IPC with the engine process", "without-usage", token_ids),
        _Layer("+ usage journal", "real", token_ids),
        _Layer("+ quotas", "real", token_ids, _LIMITED),
        _Layer("+ tokenizing", "real", text, _LIMITED),
    )
    measured: dict[str, list[_LayerRun]] = {layer.name: [] for layer in layers}
    with tempfile.TemporaryDirectory(prefix="slora-bench-") as directory, ExitStack() as stack:
        model = Path(directory) / "model"
        Depot(Path(directory), setup.model).close()
        servers = {
            kind: stack.enter_context(_null_server(kind, model, Path(directory) / kind, setup.flags))
            for kind in dict.fromkeys(layer.kind for layer in layers)
        }
        keys = {
            layer: "" if layer.kind == "bare" else servers[layer.kind].make_key(layer.tenant)
            for layer in layers
        }
        with servers["real"].client(ADMIN_KEY) as admin:
            admin.patch(f"/admin/tenants/{_LIMITED}/quota", json=_QUOTA).raise_for_status()
        for number in track_progress("Rounds", range(rounds + 1), "round"):  # the first is a warm-up
            for layer in layers:
                run = asyncio.run(
                    _measure_layer(servers[layer.kind], keys[layer], layer.prompt, num_requests)
                )
                if number:
                    measured[layer.name].append(run)
    table = f"{_STREAMS} streams at a time, {_LAYER_TOKENS} chunks each, an engine that computes nothing"
    return {table: _layer_rows(measured), "bars of the layers": _layer_verdicts(measured)}


@dataclass(frozen=True, slots=True)
class _LayerRun:
    """cpu_s: CPU time of the API process for one request. It hardly depends on what else the machine does.

    ttft_p50_s: with one stream at a time.
    """

    cpu_s: float
    requests_per_s: float
    chunks_per_s: float
    ttft_p50_s: float


def _layer_rows(measured: Mapping[str, Sequence[_LayerRun]]) -> list[Row]:
    rows: list[Row] = []
    before_ms = before_ttft_ms = 0.0
    for name, runs in measured.items():
        cpu_ms = 1e3 * statistics.median(run.cpu_s for run in runs)
        ttft_ms = 1e3 * statistics.median(run.ttft_p50_s for run in runs)
        rows.append(
            {
                "layers": name,
                "API CPU ms": cpu_ms,
                "added CPU ms": cpu_ms - before_ms if rows else None,
                "requests/s": statistics.median(run.requests_per_s for run in runs),
                "chunks/s": statistics.median(run.chunks_per_s for run in runs),
                "TTFT p50 ms": ttft_ms,
                "added TTFT ms": ttft_ms - before_ttft_ms if rows else None,
            }
        )
        before_ms, before_ttft_ms = cpu_ms, ttft_ms
    return rows


def _layer_verdicts(measured: Mapping[str, Sequence[_LayerRun]]) -> list[Row]:
    """Compares the whole server with the bare route of the same round."""

    def median(name: str, other: str, compare: Callable[[_LayerRun, _LayerRun], float]) -> float:
        return statistics.median(map(compare, measured[name], measured[other]))

    *_, whole = measured
    row: Row = {
        "case": "the whole server",
        "requests/s of bare": median(
            whole, _BARE, lambda run, bare: run.requests_per_s / bare.requests_per_s
        ),
        "chunks/s of bare": median(whole, _BARE, lambda run, bare: run.chunks_per_s / bare.chunks_per_s),
        "TTFT over bare ms": median(whole, _BARE, lambda run, bare: 1e3 * (run.ttft_p50_s - bare.ttft_p50_s)),
    }
    return [verdict for bar in _LAYER_BARS for verdict in bar.verdicts([row])]


async def _measure_layer(
    server: Server, key: str, prompt: str | tuple[int, ...], num_requests: int
) -> _LayerRun:
    """Runs a closed loop: each stream sends its next request when the answer to the last one has ended."""
    body = {"model": "model", "prompt": prompt, "max_tokens": _LAYER_TOKENS, "ignore_eos": True}
    ttfts: list[float] = []
    num_chunks = 0

    async def send(count: int) -> None:
        nonlocal num_chunks
        for _ in range(count):
            answer = await client.complete(key, body)
            if answer.error is not None:
                raise RuntimeError(f"a request failed: {answer.error}")
            ttfts.append(answer.chunks_at[0] - answer.sent_at)
            num_chunks += len(answer.chunks_at)

    process = psutil.Process(server.process.pid)
    async with SseClient(server.url) as client:
        await client.connect(_STREAMS)
        before_s, start = sum(process.cpu_times()[:2]), time.perf_counter()
        await asyncio.gather(*(send(num_requests // _STREAMS) for _ in range(_STREAMS)))
        seconds = time.perf_counter() - start
        # Usage reaches the ledger a second later. Without the pause, the next layer would be charged for that.
        await asyncio.sleep(_LEDGER_S)
        cpu_s = sum(process.cpu_times()[:2]) - before_s
        rates = cpu_s / len(ttfts), len(ttfts) / seconds, num_chunks / seconds
        ttfts.clear()
        await send(num_requests // 4)
    return _LayerRun(*rates, percentile(sorted(ttfts), 50))


@contextmanager
def _null_server(kind: str, model: Path, data_dir: Path, flags: Sequence[str]) -> Iterator[Server]:
    command = [sys.executable, "-P", "-m", "bench.null_server", kind]
    if kind != "bare":
        command += [
            "serve",
            "--port",
            "0",
            "--data-dir",
            str(data_dir),
            "--model",
            str(model),
            "--device",
            "cpu",
        ]
        command += ["--dtype", DTYPE, "--pool-bytes", "64MiB", "--host-cache-bytes", "16MiB", *flags]
    variables = environment(SLORA_ADMIN_KEY=ADMIN_KEY, PYTHONPATH=os.pathsep.join(sys.path))
    with running(command, variables, data_dir) as server:
        server.wait_for_line("slora: ready;")
        yield server


async def _replay(
    platform: Platform, trace: Trace, deposits: Sequence[Deposit]
) -> tuple[list[Served], float]:
    """Sends each request when it is due. Returns the requests, and the seconds until the last answer's end."""
    keys = {at: platform.key(deposit.version.tenant) for at, deposit in enumerate(deposits)}
    seen: set[int] = set()
    async with SseClient(platform.url) as client:
        await client.connect(_STREAMS)
        start = time.perf_counter()

        async def send(number: int, *, is_cold: bool) -> Served:
            request = trace[number]
            assert request.adapter is not None
            due_at = start + request.arrival_s
            await asyncio.sleep(due_at - time.perf_counter())
            body = completion(deposits[request.adapter].name, request.output_tokens)
            body["prompt"] = [token % EOS for token in prompts(1, request.prompt_tokens, EOS)[0]]
            answer = await client.complete(keys[request.adapter], body)
            return Served(request.tenant, due_at, is_cold, answer)

        tasks = []
        for number, request in enumerate(trace):
            assert request.adapter is not None
            tasks.append(asyncio.create_task(send(number, is_cold=request.adapter not in seen)))
            seen.add(request.adapter)
        served = await asyncio.gather(*tasks)
        return list(served), time.perf_counter() - start


async def _stream_all(platform: Platform, asked: Sequence[list[int]], output_tokens: int) -> float:
    """Sends all requests at once. Returns their tokens per second."""
    key = platform.key("bench")
    async with SseClient(platform.url) as client:
        await client.connect(len(asked))
        start = time.perf_counter()
        bodies = [{**completion("model", output_tokens), "prompt": prompt} for prompt in asked]
        answers = await asyncio.gather(*(client.complete(key, body) for body in bodies))
        seconds = time.perf_counter() - start
    for answer in answers:
        if answer.num_tokens != output_tokens:
            raise RuntimeError(f"a stream had {answer.num_tokens} of {output_tokens} tokens: {answer.error}")
    return len(asked) * output_tokens / seconds


def _shortened(trace: Trace, most_tokens: int) -> Trace:
    """Returns the trace with the same arrivals and adapters, and with lengths that this machine can compute."""
    return [
        replace(
            request,
            prompt_tokens=min(request.prompt_tokens, most_tokens),
            output_tokens=min(request.output_tokens, most_tokens),
        )
        for request in trace
    ]


PARTS: Mapping[str, Callable[..., Tables]] = {
    "trace": trace_tables,
    "http": http_tables,
    "layers": layer_tables,
}

if __name__ == "__main__":
    assert __doc__ is not None
    run_parts(__doc__, PARTS)
