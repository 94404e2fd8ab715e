"""slora's server against vLLM's on a CPU, over HTTP; and even against skewed popularity with 1,000 registered adapters.

    python -m bench.serving_peers [--parts peers popularity] [--quick] [--json FILE]

peers       the client `vllm bench serve`, unchanged, sends the same requests to both servers, one server at a time: a
            closed loop of 64 streams, and an open loop with Poisson arrivals at a rate that both can serve. Both have
            the same model of 110 million parameters in bf16, the same adapters of ranks 8/16/32/64, the same threads,
            and no prefix cache. `python -m bench.peer_environments --only vllm` installs vLLM.
popularity  slora alone with 1,000 registered adapters of rank 16, of which 10 or 100 are in use at once: all of them
            equally popular, and by Zipf's law (alpha 1.5) with the same number of streams. The client is our own,
            because `vllm bench serve` cannot draw adapters by popularity.

A p99 of few requests is nearly their maximum, so each row has the number of requests. Client and server share the
cores. Ratios within one run are meant to be read, not absolute figures.
"""

import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import httpx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench.adapter_depot import DTYPE, Deposit, Depot
from bench.contender import ContenderFailed, Launch
from bench.live_platform import Setup, Sizes, live_platform
from bench.parts import Tables, run_parts
from bench.peer_environments import launch_peer
from bench.simulation.traces import zipf_trace
from bench.sse_client import SseClient
from bench.table import Row
from bench.workload import RANKS, SMALL, prompts
from slora_adapters.process.progress_bar import track_progress
from tests.api.served import environment

__all__ = [
    "Case",
    "Load",
    "Mix",
    "MixRun",
    "Popularity",
    "bar_rows",
    "open_vllm",
    "peer_depot",
    "peer_tables",
    "popularity_rows",
    "popularity_tables",
    "result_row",
    "server_rows",
]

_SETUP = Setup(SMALL)
_TENANT, _BASE = "bench", "model"
_STREAMS = 64
_KV_BYTES = 4 << 30
_START_S, _STOP_S, _CLIENT_S = 300.0, 30.0, 300.0
_WARM_UP_REQUESTS, _WARM_UP_TOKENS = 32, 4
_CLOSED, _OPEN = "closed", "open"
_SLORA, _VLLM = "slora", "vLLM"
_ALPHA = 1.5
_POPULARITY_RANK = 16
_LEAST_OF_ZIPF = 0.8


@dataclass(frozen=True, slots=True)
class Load:
    """What the client sends. tokens: of each prompt and of each answer. rate: requests per second of an open loop."""

    loop: str
    num_requests: int
    tokens: int
    rate: float | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """Two loads on a server with some adapters. least: times vLLM's tokens per second in the closed loop."""

    num_adapters: int
    loads: tuple[Load, Load]
    least: float

    @property
    def name(self) -> str:
        return f"{self.num_adapters} adapters" if self.num_adapters else "base"


def _case(num_adapters: int, tokens: int, closed: int, rate: float, opened: int, least: float) -> Case:
    return Case(num_adapters, (Load(_CLOSED, closed, tokens), Load(_OPEN, opened, tokens, rate)), least)


# vLLM with adapters makes about 70 tokens per second, so its runs are short.
WHOLE = (
    _case(0, 64, 384, 5.0, 150, 1.3),
    _case(8, 32, 128, 1.0, 48, 10.0),
    _case(32, 32, 128, 1.0, 48, 10.0),
)
QUICK = (_case(0, 16, 16, 4.0, 8, 1.3), _case(2, 16, 8, 2.0, 4, 10.0))


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server that is ready on the model of `depot`. adapters: names for the field `model` of requests."""

    url: str
    key: str
    depot: Depot
    adapters: Sequence[str]


@dataclass(frozen=True, slots=True)
class Popularity:
    """The size of the part `popularity`. in_use: pairs of adapters in use and of streams."""

    num_registered: int
    in_use: tuple[tuple[int, int], ...]
    num_requests: int
    tokens: int
    rounds: int


WHOLE_POPULARITY = Popularity(1000, ((10, 64), (100, 128)), 256, 32, 2)
QUICK_POPULARITY = Popularity(8, ((2, 4), (4, 8)), 16, 8, 1)


def peer_tables(*, quick: bool, setup: Setup = _SETUP) -> Tables:
    cases = QUICK if quick else WHOLE
    launch = launch_peer("vllm", len(os.sched_getaffinity(0)), _KV_BYTES)
    rows: list[Row] = []
    if isinstance(launch, str):
        rows = [
            _failed_row(case, load, "vLLM and its client", launch) for case in cases for load in case.loads
        ]
    else:
        with peer_depot(setup) as depot:
            deposits = _add_mixed(depot, max(case.num_adapters for case in cases))
            for case in track_progress("Cases", cases):
                chosen = deposits[: case.num_adapters]
                rows += server_rows(_SLORA, open_slora(depot, deposits, chosen, setup.flags), launch, case)
                rows += server_rows(_VLLM, open_vllm(launch, depot, chosen), launch, case)
    return {
        f"vllm bench serve, {_STREAMS} streams or an open loop": rows,
        "slora over vLLM": bar_rows(rows, cases),
    }


def bar_rows(rows: Sequence[Row], cases: Sequence[Case] = WHOLE) -> list[Row]:
    """Compares slora with vLLM.

    For a latency, the ratio is vLLM's divided by slora's. In every row, a ratio above 1 means that slora is better.
    """
    found = {(row["case"], row["loop"], row["server"]): row for row in rows}
    bars: list[Row] = []
    for case, load in [(one, load) for one in cases for load in one.loads]:
        ours, theirs = (found.get((case.name, load.loop, server), {}) for server in (_SLORA, _VLLM))
        wanted = {"tokens/s": case.least} if load.loop == _CLOSED else {}
        wanted |= {"TTFT p99 ms": 1.0, "ITL p99 ms": 1.0}
        for figure, least in wanted.items():
            mine, other = ours.get(figure), theirs.get(figure)
            ratio = None
            if mine and other:
                ratio = mine / other if figure == "tokens/s" else other / mine
            bars.append(
                {
                    "case": case.name,
                    "loop": load.loop,
                    "figure": figure,
                    "times better": ratio,
                    "wanted": f">= {least:g}",
                    "verdict": _verdict(ratio, least),
                }
            )
    return bars


def result_row(case: Case, load: Load, server: str, result: Mapping[str, Any]) -> Row:
    """result: what `vllm bench serve --save-result --save-detailed` wrote."""
    expected = result["completed"] * load.tokens
    errors = [error.strip().splitlines()[-1] for error in result["errors"] if error.strip()]
    if result["total_output_tokens"] != expected:
        errors.append(f"{result['total_output_tokens']} tokens instead of {expected}")
    return {
        **_asked(case, load, server),
        "failed": result["failed"],
        "tokens/s": result["output_throughput"],
        "TTFT p50 ms": result["median_ttft_ms"],
        "TTFT p99 ms": result["p99_ttft_ms"],
        "ITL p50 ms": result["median_itl_ms"],
        "ITL p99 ms": result["p99_itl_ms"],
        "E2E p99 ms": result["p99_e2el_ms"],
        "reason": errors[0] if errors else "",
    }


def _failed_row(case: Case, load: Load, server: str, reason: str) -> Row:
    figures = ("tokens/s", "TTFT p50 ms", "TTFT p99 ms", "ITL p50 ms", "ITL p99 ms", "E2E p99 ms")
    return {
        **_asked(case, load, server),
        "failed": load.num_requests,
        **dict.fromkeys(figures),
        "reason": reason,
    }


def _asked(case: Case, load: Load, server: str) -> Row:
    return {
        "case": case.name,
        "loop": load.loop,
        "server": server,
        "in/out": f"{load.tokens}/{load.tokens}",
        "rate/s": load.rate,
        "requests": load.num_requests,
    }


def server_rows(
    server: str, opened: AbstractContextManager[Endpoint], client: Launch, case: Case
) -> list[Row]:
    """Returns one row for each load. A load that could not be measured has the reason in its row."""
    rows: list[Row] = []
    reason = ""
    try:
        with opened as endpoint:
            asyncio.run(_warm_up(endpoint, case.loads[0].tokens))
            for load in case.loads:
                rows.append(result_row(case, load, server, _run_client(client, endpoint, load)))
    except ContenderFailed as error:
        reason = str(error)
    return rows + [_failed_row(case, load, server, reason) for load in case.loads[len(rows) :]]


def _run_client(client: Launch, endpoint: Endpoint, load: Load) -> dict[str, Any]:
    """Raises ContenderFailed if the client fails or does not end in time."""
    with tempfile.TemporaryDirectory(prefix="slora-bench-") as folder:
        command = [str(client.python), "-P", "-m", "bench.contenders.vllm_client"]
        command += ["--backend", "openai", "--base-url", endpoint.url, "--endpoint", "/v1/completions"]
        command += ["--model", str(endpoint.depot.model), "--served-model-name", _BASE, "--temperature", "0"]
        command += ["--dataset-name", "random", "--num-prompts", str(load.num_requests)]
        command += ["--random-input-len", str(load.tokens), "--random-output-len", str(load.tokens)]
        command += ["--percentile-metrics", "ttft,itl,e2el", "--metric-percentiles", "99", "--disable-tqdm"]
        command += ["--save-result", "--save-detailed", "--result-dir", folder]
        command += ["--result-filename", "result.json"]
        command += (
            ["--max-concurrency", str(_STREAMS)] if load.rate is None else ["--request-rate", str(load.rate)]
        )
        if endpoint.adapters:
            command += ["--lora-modules", *endpoint.adapters, "--lora-assignment", "round-robin"]
        variables = environment(**client.environment, OPENAI_API_KEY=endpoint.key)
        try:
            done = subprocess.run(
                command,
                env=variables,
                capture_output=True,
                text=True,
                timeout=_CLIENT_S,
                check=False,
                encoding="utf-8",
            )
        except subprocess.TimeoutExpired:
            raise ContenderFailed(f"the client did not end within {_CLIENT_S:g} s") from None
        if done.returncode:
            raise ContenderFailed(f"the client ended with {done.returncode}: {_last_line(done.stderr)}")
        result: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text(encoding="utf-8"))
        return result


async def _warm_up(endpoint: Endpoint, tokens: int) -> None:
    """Sends short requests in turn to each adapter, so that both servers have loaded all of them."""
    names = endpoint.adapters or [_BASE]
    async with SseClient(endpoint.url) as client:
        requests = prompts(_WARM_UP_REQUESTS, tokens, endpoint.depot.size.vocab)
        answers = await asyncio.gather(
            *(
                client.complete(
                    endpoint.key, _completion(names[number % len(names)], prompt, _WARM_UP_TOKENS)
                )
                for number, prompt in enumerate(requests)
            )
        )
    for answer in answers:
        if not answer.is_complete:
            raise ContenderFailed(f"a request of the warm-up failed: {answer.error}")


@contextmanager
def open_slora(
    depot: Depot, deposits: Sequence[Deposit], chosen: Sequence[Deposit], flags: Sequence[str]
) -> Iterator[Endpoint]:
    tokens = 2 * max(load.tokens for case in WHOLE for load in case.loads)
    sizes = Sizes.with_room(depot, deposits, 2 * _STREAMS, tokens)
    with live_platform(depot, sizes, *flags) as platform:
        yield Endpoint(platform.url, platform.key(_TENANT), depot, [one.name for one in chosen])


@contextmanager
def open_vllm(launch: Launch, depot: Depot, chosen: Sequence[Deposit]) -> Iterator[Endpoint]:
    """Raises ContenderFailed if it does not start. Ends all of its processes at the end."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [str(launch.python), "-P", "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", DTYPE, "--max-model-len", "256"]
    command += ["--model", str(depot.model), "--served-model-name", _BASE]
    command += ["--no-enable-prefix-caching", "--disable-log-stats", "--disable-uvicorn-access-log"]
    if chosen:
        command += ["--enable-lora", "--max-lora-rank", str(max(one.details.rank for one in chosen))]
        command += ["--max-loras", str(len(chosen)), "--max-cpu-loras", str(len(chosen)), "--lora-modules"]
        command += [f"{one.name}={depot.tensor_file(one).parent}" for one in chosen]
    log = depot.data_dir / f"vllm-{len(chosen)}.log"
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(**launch.environment),
            process_group=0,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_ready(process, url, log)
        yield Endpoint(url, "none", depot, [one.name for one in chosen])
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while process.poll() is None:
        with suppress(httpx.TransportError):
            if httpx.get(f"{url}/health").is_success:
                return
        if time.monotonic() > deadline:
            raise ContenderFailed(f"vLLM's server was not ready within {_START_S:g} s")
        time.sleep(0.2)
    raise ContenderFailed(
        f"vLLM's server ended with {process.returncode}: {_last_line(log.read_text('utf-8', errors='replace'))}"
    )


@dataclass(frozen=True, slots=True)
class Mix:
    """How the requests of a run are spread over adapters. alpha: of Zipf's law; None gives each adapter as many."""

    num_adapters: int
    num_streams: int
    alpha: float | None

    def draw(self, num_requests: int, seed: int) -> list[int]:
        if self.alpha is None:
            return [number % self.num_adapters for number in range(num_requests)]
        trace = zipf_trace(self.num_adapters, num_requests, 1.0, alpha=self.alpha, seed=seed)
        return [request.adapter for request in trace if request.adapter is not None]


@dataclass(frozen=True, slots=True)
class MixRun:
    """at_once: the most adapters that were in use at the same time."""

    tokens_per_s: float
    at_once: int


def popularity_tables(*, quick: bool, setup: Setup = _SETUP) -> Tables:
    scale = QUICK_POPULARITY if quick else WHOLE_POPULARITY
    mixes = [Mix(*in_use, alpha) for in_use in scale.in_use for alpha in (None, _ALPHA)]
    runs: dict[Mix, list[MixRun]] = {mix: [] for mix in mixes}
    with peer_depot(setup) as depot:
        names = [(_TENANT, f"adapter-{number:04}") for number in range(scale.num_registered)]
        deposits = depot.add(_POPULARITY_RANK, names)
        num_used, num_streams = (max(column) for column in zip(*scale.in_use, strict=True))
        used = deposits[:num_used]
        sizes = Sizes.with_room(depot, used, num_streams, 2 * scale.tokens)
        with live_platform(depot, sizes, *setup.flags) as platform:
            key = platform.key(_TENANT)
            endpoint = Endpoint(platform.url, key, depot, [one.name for one in used])
            loading = Mix(num_used, num_streams, None).draw(scale.num_requests, 0)
            asyncio.run(_run_streams(endpoint, loading, scale.tokens, num_streams))
            for number in track_progress("Rounds", range(scale.rounds), "round"):
                for mix in mixes:
                    drawn = mix.draw(scale.num_requests, number)
                    run = asyncio.run(_run_streams(endpoint, drawn, scale.tokens, mix.num_streams))
                    runs[mix].append(run)
    title = f"slora, {scale.num_registered} registered adapters of rank {_POPULARITY_RANK}"
    return {title: popularity_rows(scale, runs)}


def popularity_rows(scale: Popularity, runs: Mapping[Mix, Sequence[MixRun]]) -> list[Row]:
    """Returns one row for each mix. A ratio is the median of the rounds' ratios."""
    rows: list[Row] = []
    for mix, seen in runs.items():
        rates = [run.tokens_per_s for run in seen]
        ratio = None
        if mix.alpha is None:
            skewed = runs[replace(mix, alpha=_ALPHA)]
            pairs = zip(rates, skewed, strict=True)
            ratio = statistics.median(rate / other.tokens_per_s for rate, other in pairs)
        rows.append(
            {
                "adapters in use": mix.num_adapters,
                "popularity": "even" if mix.alpha is None else f"Zipf (alpha {mix.alpha:g})",
                "streams": mix.num_streams,
                "requests": scale.num_requests,
                "in/out": f"{scale.tokens}/{scale.tokens}",
                "adapters at once": max(run.at_once for run in seen),
                "tokens/s": statistics.median(rates),
                "min": min(rates),
                "max": max(rates),
                "even over Zipf": ratio,
                f">= {_LEAST_OF_ZIPF:g}": None if ratio is None else _verdict(ratio, _LEAST_OF_ZIPF),
            }
        )
    return rows


async def _run_streams(endpoint: Endpoint, drawn: Sequence[int], tokens: int, num_streams: int) -> MixRun:
    """Runs a closed loop: each stream sends the next request when the answer to its last one has ended."""
    asked = iter(zip(drawn, prompts(len(drawn), tokens, endpoint.depot.size.vocab), strict=True))
    running: Counter[int] = Counter()
    at_once = 0

    async def send() -> None:
        nonlocal at_once
        for adapter, prompt in asked:
            running[adapter] += 1
            at_once = max(at_once, len(+running))
            body = _completion(endpoint.adapters[adapter], prompt, tokens)
            answer = await client.complete(endpoint.key, body)
            running[adapter] -= 1
            if answer.num_tokens != tokens:
                raise RuntimeError(f"a stream had {answer.num_tokens} of {tokens} tokens: {answer.error}")

    async with SseClient(endpoint.url) as client:
        await client.connect(num_streams)
        start = time.perf_counter()
        await asyncio.gather(*(send() for _ in range(num_streams)))
        seconds = time.perf_counter() - start
    return MixRun(len(drawn) * tokens / seconds, at_once)


def _completion(model: str, prompt: Sequence[int], tokens: int) -> dict[str, object]:
    return {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


@contextmanager
def peer_depot(setup: Setup) -> Iterator[Depot]:
    with tempfile.TemporaryDirectory(prefix="slora-bench-") as directory:
        depot = Depot(Path(directory), setup.model)
        write_word_tokenizer(depot.model, setup.model.vocab)
        try:
            yield depot
        finally:
            depot.close()


def write_word_tokenizer(directory: Path, vocab_size: int) -> None:
    """Writes a tokenizer with a word of four letters for each token of the model, the end token included.

    Each generated token therefore has text, and a text of random tokens is encoded as the same tokens again.
    """
    words = ("Ġ" + "".join(letters) for letters in product(ascii_lowercase, repeat=4))
    vocabulary = {word: token for token, word in enumerate(islice(words, vocab_size))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="Ġaaaa"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def _add_mixed(depot: Depot, count: int) -> list[Deposit]:
    """Adds adapters whose ranks take turns."""
    by_rank = [
        depot.add(rank, [(_TENANT, f"adapter-{number}") for number in range(at, count, len(RANKS))])
        for at, rank in enumerate(RANKS)
    ]
    return [by_rank[number % len(RANKS)][number // len(RANKS)] for number in range(count)]


def _verdict(ratio: float | None, least: float) -> str:
    if ratio is None:
        return "not measured"
    return "met" if ratio >= least else "MISSED"


def _last_line(text: str) -> str:
    lines = text.strip().splitlines() or ["it printed nothing"]
    return lines[-1][:200]


PARTS: Mapping[str, Callable[..., Tables]] = {"peers": peer_tables, "popularity": popularity_tables}

if __name__ == "__main__":
    assert __doc__ is not None
    run_parts(__doc__, PARTS)
