"""Many streams of a server whose engines are killed at random, against the same streams of a server left alone."""

import asyncio
import json
import random
import signal
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from slora_adapters.database import schema
from slora_adapters.database.database import Database
from tests.api.conftest import Kit
from tests.api.platform import bearer
from tests.api.served import READY_S, Served, serving, wait_for
from tests.api.server.test_server import upload
from tests.support.child_processes import find_children

ENGINE = "slora.engine.process"
DEMO = Path(__file__).parents[3] / "demo" / "model"
SCHEMA = {
    "type": "object",
    "properties": {"words": {"type": "array", "items": {"type": "string"}, "minItems": 3}},
    "required": ["words"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "words", "schema": SCHEMA}}
# The choices of an answer: index -> (text, finish_reason).
Choices = dict[int, tuple[str, str | None]]


def make_body(number: int, models: Sequence[str], max_tokens: int) -> tuple[str, dict[str, Any]]:
    """The path and the body of a stream. Each kind of request comes with each model."""
    body: dict[str, Any] = {
        "model": models[number // 5 % len(models)],
        "max_tokens": max_tokens,
        "stream": True,
        "seed": number,
        "temperature": 1.0,
    }
    prompt = f"{number:04} hello " + "x" * (number % 40)
    match number % 5:
        case 0:
            body |= {"temperature": 0, "ignore_eos": True}
        case 1:
            body |= {"ignore_eos": True}
        case 2:
            body |= {"stop": ["qz", "Xe"]}
        case 3:
            body |= {"n": 2, "ignore_eos": True}
        case 4:
            form = {"response_format": FORM, "messages": [{"role": "user", "content": prompt}]}
            return "/v1/chat/completions", body | form
    return "/v1/completions", body | {"prompt": prompt}


@dataclass
class Streams:
    """Streams of one key that run side by side. num_chunks: chunks of text that have arrived."""

    served: Served
    key: str
    bodies: Sequence[tuple[str, dict[str, Any]]]
    num_chunks: int = 0
    has_ended: bool = False
    answers: list[Choices] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    async def read_all(self) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=self.served.url, headers=bearer(self.key), timeout=READY_S, verify=False, limits=limits
        ) as client:
            try:
                self.answers = await asyncio.gather(*(self._read(client, *one) for one in self.bodies))
            finally:
                self.has_ended = True
                self.arrived.set()

    async def _read(self, client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Choices:
        texts: dict[int, str] = defaultdict(str)
        reasons: dict[int, str | None] = {}
        async with client.stream("POST", path, json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            lines = [line async for line in self._follow(answer)]
        assert lines[-1] == "data: [DONE]", lines[-1]
        for line in lines[:-1]:
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                delta = choice.get("text") or choice.get("delta", {}).get("content") or ""
                texts[choice["index"]] += delta
                reasons[choice["index"]] = choice["finish_reason"] or reasons.get(choice["index"])
        return {index: (texts[index], reasons[index]) for index in reasons}

    async def _follow(self, answer: httpx.Response) -> Any:
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                self.num_chunks += 1
                self.arrived.set()
                yield line

    async def wait_for_chunks(self, num_chunks: int) -> None:
        while self.num_chunks < num_chunks and not self.has_ended:
            self.arrived.clear()
            await self.arrived.wait()


async def read_while_engines_die(
    streams: Streams, num_chunks: int, num_kills: int, draw: random.Random
) -> None:
    """Kills a random engine each time that a random share of the chunks has arrived."""
    reading = asyncio.create_task(streams.read_all())
    for share in sorted(draw.uniform(0.05, 0.7) for _ in range(num_kills)):
        await streams.wait_for_chunks(int(share * num_chunks))
        engines = find_children(ENGINE, streams.served.process.pid, recursive=True)
        if not reading.done() and engines:
            draw.choice(engines).send_signal(signal.SIGKILL)
    await reading


def find_records(place: Path | str, key: str, number: int) -> list[tuple[int, int]]:
    """Waits for the records of a key. Returns the tokens of the prompts and of the answers."""
    columns = schema.usage_records.c
    query = select(columns.prompt_tokens, columns.generated_tokens)
    query = query.where(columns.key_id == key.split("_")[1])
    with closing(Database(place)) as database:
        wait_for(lambda: len(database.read(query)) >= number or None)
        return sorted(tuple(row) for row in database.read(query))


def check_kills(served: Served, keys: Sequence[str], bodies: Sequence[Any], num_kills: int) -> int:
    """Returns the number of restarts."""
    alone, disturbed = (Streams(served, key, bodies) for key in keys)
    asyncio.run(alone.read_all())
    asyncio.run(read_while_engines_die(disturbed, alone.num_chunks, num_kills, random.Random(5)))
    for number, (expected, found) in enumerate(zip(alone.answers, disturbed.answers, strict=True)):
        assert found == expected, bodies[number]
    records = [find_records(served.data_dir / "slora.db", key, len(bodies)) for key in keys]
    assert records[0] == records[1] and len(records[1]) == len(bodies)
    restarts = (f'slora_process_restarts_total{{process="engine-{number}"}}' for number in range(8))
    metrics = served.metrics()
    return int(sum(metrics.get(name, 0) for name in restarts))


@pytest.mark.soak
def test_streams_of_engines_killed_at_random_equal_those_left_alone_and_are_billed_once(
    kit: Kit, tmp_path: Path
) -> None:
    with serving(kit.base, tmp_path / "data", "--replicas", "2", "--dtype", "float32") as served:
        served.wait_until_ready()
        wait_for(lambda: sum_serving(served) == 2 or None, served.alive)
        keys = [served.make_key("acme") for _ in range(2)]
        assert upload(served, keys[0], "small", kit.small.parent / "small").status_code == 201
        bodies = [make_body(number, ["base", "small"], 150) for number in range(24)]
        assert check_kills(served, keys, bodies, num_kills=3) >= 1


@pytest.mark.soak
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_a_thousand_streams_of_engines_killed_at_random_equal_those_left_alone(
    tmp_path: Path, num_replicas: int, report: Callable[[str], None]
) -> None:
    flags = ("--replicas", str(num_replicas), "--dtype", "float32", "--pool-bytes", "256MiB")
    limits = ("--max-concurrent-requests", "1600", "--max-concurrent-per-tenant", "1200")
    with serving(DEMO, tmp_path / "data", *flags, *limits, kernels="auto") as served:
        served.wait_until_ready()
        wait_for(lambda: sum_serving(served) == num_replicas or None, served.alive)
        keys = [served.make_key("acme") for _ in range(2)]
        bodies = [make_body(number, ["model"], 100) for number in range(1000)]
        num_restarts = check_kills(served, keys, bodies, num_kills=8)
        report(
            f"1,000 streams over {num_replicas} engines: {num_restarts} restarts, 0 truncated or different"
        )


def sum_serving(served: Served) -> float:
    return served.metric("slora_replica_serving") or 0
