"""The usage ledger of a real server: equal to the engine's own counters, and complete after kills under load."""

import asyncio
import itertools
import json
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest
from sqlalchemy import func, select

from slora.core.usage_journal import UsageJournal
from slora_adapters.database import schema
from slora_adapters.database.database import Database
from slora_api.usage.usage_ledger import UsageLedger
from slora_api.usage.usage_shipper import UsageShipper
from tests.api.conftest import Kit
from tests.api.platform import bearer
from tests.api.served import ADMIN_KEY, Served, environment, serving, wait_for
from tests.api.server.test_server import upload
from tests.postgresql_server import PostgresqlServer

NAMES = ("prompt_tokens", "cached_tokens", "generated_tokens", "adapter_bytes", "page_seconds")
# The most that a process may grow in 3,000 requests after its caches are full. A leak of 9 KiB for each request is
# more.
_MAX_GROWTH_MIB = 24
ENGINE, WORKER = "slora.engine.process", "slora_api.serve.api_process"


@dataclass
class Load:
    """Requests to one server. No two have the same key and the same length of the prompt, so that each record can be
    recognized.

    leaves: the probability that a client disconnects during its answer.
    acknowledged: (key, length of the prompt) -> generated tokens, for each answer that arrived to its end.
    refusals: the bodies of answers with an error.
    """

    url: str
    keys: Sequence[str]
    leaves: float = 0.0
    acknowledged: dict[tuple[str, int], int] = field(default_factory=dict)
    num_answers: int = 0
    refusals: list[str] = field(default_factory=list)
    draw: random.Random = field(default_factory=lambda: random.Random(7))

    def __post_init__(self) -> None:
        self._requests = itertools.product(self.keys, range(1, 480))

    def send(self, num_requests: int, num_at_once: int) -> None:
        asyncio.run(self._send(itertools.islice(self._requests, num_requests), num_at_once))

    @contextmanager
    def in_background(self) -> Iterator[None]:
        """Sends requests during the block, which begins after some answers have arrived."""
        is_over = threading.Event()
        requests = itertools.takewhile(lambda _: not is_over.is_set(), self._requests)
        thread = threading.Thread(target=lambda: asyncio.run(self._send(requests, 8)))
        thread.start()
        try:
            self.wait_for_answers()
            yield
        finally:
            is_over.set()
            thread.join()

    def wait_for_answers(self) -> None:
        goal = len(self.acknowledged) + 10
        wait_for(lambda: len(self.acknowledged) >= goal or None)

    async def _send(self, requests: Iterator[tuple[str, int]], num_at_once: int) -> None:
        async with httpx.AsyncClient(
            base_url=self.url, timeout=300, verify=False, limits=httpx.Limits(max_connections=None)
        ) as client:

            async def send_in_turn() -> None:
                for key, length in requests:
                    try:
                        await self._send_one(client, key, length)
                    except httpx.TransportError:  # the server was killed
                        await asyncio.sleep(0.2)

            await asyncio.gather(*(send_in_turn() for _ in range(num_at_once)))

    async def _send_one(self, client: httpx.AsyncClient, key: str, length: int) -> None:
        leaves = self.draw.random() < self.leaves
        is_stream = leaves or self.draw.random() < 0.7
        max_tokens = self.draw.randrange(4, 24)
        body = {
            "model": self.draw.choice(["base", "small", "wide"]), "prompt": "x" * length,
            "max_tokens": max_tokens, "ignore_eos": True, "stream": is_stream,
        }  # fmt: skip
        num_lines = self.draw.randrange(8) if leaves else 10_000
        async with client.stream("POST", "/v1/completions", json=body, headers=bearer(key)) as answer:
            self.num_answers += 1
            if answer.status_code != 200:
                self.refusals.append((await answer.aread()).decode())
                await asyncio.sleep(0.2)
                return
            is_failed = False
            async for line in answer.aiter_lines():
                num_lines -= 1
                if num_lines < 0:
                    return
                is_failed |= line.startswith('data: {"error"')
                is_end = line == "data: [DONE]" if is_stream else "usage" in json.loads(line)
                if is_end and not is_failed:
                    self.acknowledged[key.split("_")[1], length] = max_tokens


def engine_usage(served: Served) -> Sequence[float]:
    """The engine's own counters."""
    metrics = served.metrics()
    return [metrics[f'slora_engine_usage_total{{of="{name}"}}'] for name in NAMES]


def ledger_usage(place: Path | str) -> Sequence[float]:
    columns = schema.usage_records.c
    with closing(Database(place)) as database:
        (sums,) = database.read(select(*(func.sum(columns[name]) for name in NAMES)))
    return [float(one or 0) for one in sums]


def held_by_processes(served: Served) -> dict[str, tuple[int, int, float]]:
    """Each process's name -> its open descriptors, its threads, and its resident memory in MiB."""
    main = psutil.Process(served.process.pid)
    return {
        f"{number} {process.cmdline()[3]}": (
            process.num_fds(),
            process.num_threads(),
            round(process.memory_info().rss / 2**20, 1),
        )
        for number, process in enumerate((main, *main.children(recursive=True)))
    }


def subtract(after: Sequence[float], before: Sequence[float]) -> list[float]:
    return [one - other for one, other in zip(after, before, strict=True)]


def check_ledger(place: Path | str, loads: Sequence[Load]) -> None:
    """Waits until the ledger has all acknowledged requests. Checks that it has each once, and that its sums agree."""
    columns, buckets = schema.usage_records.c, schema.usage_buckets.c
    with closing(Database(place)) as database:

        def find_records() -> list[tuple[str, int, int]]:
            query = select(columns.key_id, columns.prompt_tokens, columns.generated_tokens)
            return [tuple(row) for row in database.read(query)]

        acknowledged = {(*sent, count) for load in loads for sent, count in load.acknowledged.items()}
        assert acknowledged
        wait_for(lambda: acknowledged <= set(find_records()) or None)
        records = find_records()
        requests = [(key_id, length) for key_id, length, _ in records]
        assert len(requests) == len(set(requests)), "each was sent once"
        query = select(buckets.width, *(func.sum(buckets[name]) for name in ("num_requests", *NAMES)))
        sums = {tuple(map(float, row[1:])) for row in database.read(query.group_by(buckets.width))}
        assert sums == {(float(len(records)), *ledger_usage(place))}


def upload_both(server: Served, kit: Kit, tenant: str) -> str:
    key = server.make_key(tenant)
    for name in ("small", "wide"):
        assert upload(server, key, name, kit.small.parent / name).status_code == 201
    return key


def wait_until_equal(
    served: Served, place: Path | str, engine_before: Sequence[float], ledger_before: Sequence[float]
) -> None:
    """Waits until the ledger has grown by the same sums as the engine's own counters."""

    def are_equal() -> bool | None:
        computed = subtract(engine_usage(served), engine_before)
        assert all(computed[at] for at in (0, 2, 4))
        return computed == subtract(ledger_usage(place), ledger_before) or None

    wait_for(are_equal)


def wait_for_earlier_records(server: Served) -> None:
    """Waits until the requests of earlier tests have ended and their records are in the ledger. A process ships its
    records in order, so the record of one more request shows this."""
    server.wait_for_metric("vllm:num_requests_running", 0)
    key, body = server.make_key("billed-last"), {"model": "base", "prompt": "x", "max_tokens": 1}
    with server.client(key) as client:
        client.post("/v1/completions", json=body).raise_for_status()
    columns = schema.usage_records.c
    query = select(columns.key_id).where(columns.key_id == key.split("_")[1])
    with closing(Database(server.data_dir / "slora.db")) as database:
        wait_for(lambda: database.read(query) or None)


def test_when_clients_disconnect_no_page_is_held_and_the_ledger_equals_the_engines_counters(
    mortal: Served, kit: Kit
) -> None:
    place = mortal.data_dir / "slora.db"
    key = upload_both(mortal, kit, "billed")
    wait_for_earlier_records(mortal)
    before = engine_usage(mortal), ledger_usage(place)
    load = Load(mortal.url, [key], leaves=0.3)
    load.send(60, 20)
    assert load.num_answers and not load.refusals, (len(load.refusals), set(load.refusals))
    wait_until_equal(mortal, place, *before)
    mortal.wait_for_metric("vllm:num_requests_waiting", 0)
    mortal.wait_for_metric('slora_pages{state="held"}', 0)


@pytest.mark.soak
def test_a_thousand_streams_leak_nothing_and_their_ledger_equals_the_engines_counters(
    kit: Kit, tmp_path: Path, report: Callable[[str], None]
) -> None:
    """The engine caches a compiled matmul for each batch size, up to a number. With the usual number, its memory grows
    for 5,000 requests. Small caches are full after the first round, so later growth is a leak."""
    flags = ("--max-concurrent-requests", "1600", "--max-concurrent-per-tenant", "1200")
    small_caches = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "16"}
    env = environment(SLORA_ADMIN_KEY=ADMIN_KEY, **small_caches)
    with serving(kit.base, tmp_path / "data", *flags, kernels="auto", env=env, forks=False) as served:
        served.wait_until_ready()
        keys = [upload_both(served, kit, "acme"), *(served.make_key("acme") for _ in range(9))]
        before = engine_usage(served), ledger_usage(tmp_path / "data" / "slora.db")
        load = Load(served.url, keys, leaves=0.05)
        # The first round fills the caches and the heaps of the allocators.
        held = []
        for _ in range(3):
            load.send(1500, 1000)
            wait_until_equal(served, tmp_path / "data" / "slora.db", *before)
            served.wait_for_metric('slora_pages{state="held"}', 0)
            held.append(held_by_processes(served))
    for name, first, last in zip(held[0], held[0].values(), held[-1].values(), strict=True):
        report(f"{name}: {first} (descriptors, threads, MiB) after 1,500 requests, {last} after 4,500")
        assert last[0] <= first[0] + 5 and last[1] <= first[1] + 5, name
        assert last[2] <= first[2] + _MAX_GROWTH_MIB, name
    assert load.num_answers and not load.refusals, (len(load.refusals), set(load.refusals))


def test_kills_under_load_lose_and_repeat_no_acknowledged_request(
    kit: Kit, tmp_path: Path, postgresql_server: PostgresqlServer, *, soak: bool
) -> None:
    place = postgresql_server.make_database()
    flags = ("--database", place, "--store", str(tmp_path / "store"))
    loads: list[Load] = []
    for number in range(10 if soak else 1):
        with serving(kit.base, tmp_path / "data", *flags, "--api-workers", "2") as served:
            served.wait_until_ready()
            keys = [upload_both(served, kit, f"acme{number}"), served.make_key(f"acme{number}")]
            load = Load(served.url, keys)
            loads.append(load)
            before = engine_usage(served), ledger_usage(place)
            with load.in_background():
                os.kill(served.child(WORKER).pid, signal.SIGKILL)
            wait_until_equal(served, place, *before)
            with load.in_background():
                postgresql_server.kill()
                load.wait_for_answers()
                postgresql_server.start()
            with load.in_background():
                os.kill(served.child(ENGINE).pid, signal.SIGKILL)
            served.wait_until_ready()
            with load.in_background():
                if number % 2:
                    os.kill(served.process.pid, signal.SIGKILL)
                    served.process.wait()
                else:
                    served.kill_everything()
    directory = tmp_path / "data" / "usage"
    with closing(Database(place)) as database, closing(UsageJournal(directory)) as journal:
        UsageShipper(journal, directory, UsageLedger(database), 90).ship()
    check_ledger(place, loads)
