"""What a batch by file does to the interactive requests beside it.

    GOMP_SPINCOUNT=10000 python -m bench.batches [--parts interactive] [--quick] [--json FILE]

interactive  over HTTP: two clients send one chat after another, with pauses in between, in turn without a batch and
             beside one of another tenant. The times between two tokens are pooled over all rounds. Bar: the p99 beside
             the batch is at most 1.1 times the p99 without it. The lines of the batch that were answered meanwhile show
             how much of the idle time it used.
"""

import asyncio
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import torch

from bench.bars import Bar
from bench.parts import Tables, run_parts
from bench.simulation.request_log import percentile
from bench.sse_client import SseClient
from bench.structured import write_tokenizer
from bench.table import Row
from bench.workload import write_model
from slora_adapters.process.progress_bar import track_progress
from tests.api.served import Served, serving, wait_for

_CLIENTS, _TOKENS, _PAUSE_S = 2, 32, 0.5
_LINES, _LINE_TOKENS = 5000, 16
_WITHOUT, _BESIDE = "none", "of another tenant"
_BARS = (
    Bar("p99 between tokens, over without", lambda row: row["batch"] == _BESIDE, "ratio", 1.1, at_most=True),
)


@dataclass(slots=True)
class Sample:
    """gaps_s: between two tokens of one answer. num_lines: of batches, answered in `seconds`."""

    gaps_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    num_lines: int = 0
    seconds: float = 0.0


def interactive_tables(*, quick: bool) -> Tables:
    rounds, seconds = (2, 5.0) if quick else (6, 15.0)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_model(model, torch.bfloat16)
        write_tokenizer(model)
        rows = list(_rows(_measure(model, Path(folder) / "data", rounds, seconds)))
    return {
        "times of interactive requests": rows,
        "bars": [verdict for bar in _BARS for verdict in bar.verdicts(rows)],
    }


def _measure(model: Path, data: Path, rounds: int, seconds: float) -> dict[str, Sample]:
    samples = {_WITHOUT: Sample(), _BESIDE: Sample()}
    with serving(model, data, "--pool-bytes", "256MiB", kernels="auto") as served:
        served.wait_until_ready()
        key, other = served.make_key("interactive"), served.make_key("batch")
        asyncio.run(_chat(served.url, key, seconds, Sample(), seed=0))
        with served.client(other) as client:
            file_id = _upload(client)
            for number in track_progress("Rounds", range(rounds), "round"):
                asyncio.run(_chat(served.url, key, seconds, samples[_WITHOUT], seed=number))
                with _batch(served, client, file_id, samples[_BESIDE]):
                    asyncio.run(_chat(served.url, key, seconds, samples[_BESIDE], seed=number))
    return samples


def _upload(client: httpx.Client) -> str:
    body = {"model": "default", "max_tokens": _LINE_TOKENS, "temperature": 0, "ignore_eos": True}
    lines = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/completions",
            "body": {**body, "prompt": f"def function_{number}(argument):"},
        }
        for number in range(_LINES)
    ]
    content = "\n".join(map(json.dumps, lines))
    sent = client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("lines.jsonl", content)})
    return str(sent.raise_for_status().json()["id"])


@contextmanager
def _batch(served: Served, client: httpx.Client, file_id: str, sample: Sample) -> Iterator[None]:
    """A batch that is in progress for the duration of the context."""
    body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    path = f"/v1/batches/{client.post('/v1/batches', json=body).raise_for_status().json()['id']}"

    def reach(*statuses: str) -> dict[str, int] | None:
        batch = client.get(path).raise_for_status().json()
        assert batch["status"] != "completed", "the batch ended during the measurement; give it more lines"
        return batch["request_counts"] if batch["status"] in statuses else None

    wait_for(lambda: reach("in_progress"), served.alive)
    begun_at = time.perf_counter()
    yield
    sample.seconds += time.perf_counter() - begun_at
    sample.num_lines += (reach("in_progress") or {})["completed"]
    client.post(f"{path}/cancel").raise_for_status()
    wait_for(lambda: reach("cancelled"), served.alive)


async def _chat(url: str, key: str, seconds: float, sample: Sample, seed: int) -> None:
    ends_at = time.perf_counter() + seconds

    async def talk(client: SseClient, chance: random.Random) -> None:
        while time.perf_counter() < ends_at:
            body: dict[str, object] = {
                "model": "default", "prompt": f"class Thing{chance.randrange(10**6)}:", "max_tokens": _TOKENS,
                "temperature": 0, "ignore_eos": True,
            }  # fmt: skip
            answer = await client.complete(key, body)
            assert answer.is_complete, answer.error
            at = answer.chunks_at
            sample.first_s.append(at[0] - answer.sent_at)
            sample.gaps_s += [later - earlier for earlier, later in itertools.pairwise(at)]
            await asyncio.sleep(chance.uniform(0, 2 * _PAUSE_S))

    async with SseClient(url) as client:
        await asyncio.gather(*(talk(client, random.Random(seed * 100 + one)) for one in range(_CLIENTS)))


def _rows(samples: dict[str, Sample]) -> Iterator[Row]:
    p99s = {name: percentile(sorted(sample.gaps_s), 99) for name, sample in samples.items()}
    for name, sample in samples.items():
        yield {
            "batch": name,
            "tokens": len(sample.gaps_s),
            "p50 ms between tokens": statistics.median(sample.gaps_s) * 1e3,
            "p99 ms between tokens": p99s[name] * 1e3,
            "ratio": p99s[name] / p99s[_WITHOUT],
            "p50 ms to first": statistics.median(sample.first_s) * 1e3,
            "p99 ms to first": percentile(sorted(sample.first_s), 99) * 1e3,
            "lines/s": sample.num_lines / sample.seconds if sample.seconds else None,
        }


PARTS = {"interactive": interactive_tables}

if __name__ == "__main__":
    run_parts(__doc__ or "", PARTS)
