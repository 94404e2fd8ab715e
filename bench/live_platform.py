"""A real `slora serve` on a depot's data, asked over HTTP: when the tokens of a stream come."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from bench.adapter_depot import BLOCK_TOKENS, DTYPE, WIDE, Deposit, Depot
from bench.tier_rates import RING_BYTES
from bench.workload import ModelSize
from slora.adapter_place import AdapterPlace
from tests.api.platform import bearer
from tests.api.served import ADMIN_KEY, EOS, SLORA, Served, environment, running
from tests.redis_server import RedisServer

# One token: what is measured is not how long prompts take.
PROMPT = "a"
# The tokenizer's end token makes no text, nor does the one that the model's config names end a stream.
_NEVER = {str(EOS): -100}

_POLL_S = 0.05
_PREWARM_S = 120.0


@dataclass(frozen=True, slots=True)
class Setup:
    """What a part of the bench runs on. ring_bytes: of what the plainest programs read. flags: of `slora serve`."""

    model: ModelSize = WIDE
    ring_bytes: int = RING_BYTES
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a server. host_cache_bytes: of packed adapters."""

    pool_pages: int
    host_cache_bytes: int
    max_lora_rank: int


class Platform:
    """A running server, and a key for each tenant of the depot."""

    def __init__(self, served: Served, depot: Depot) -> None:
        self._served = served
        self._depot = depot
        self._keys: dict[str, str] = {}
        self._client = served.client(ADMIN_KEY)

    def close(self) -> None:
        self._client.close()

    @property
    def url(self) -> str:
        return self._served.url

    def key(self, tenant: str) -> str:
        """Of a tenant that is made with it."""
        if tenant not in self._keys:
            self._keys[tenant] = self._served.make_key(tenant)
        return self._keys[tenant]

    def headers(self, tenant: str) -> dict[str, str]:
        return bearer(self.key(tenant))

    def first_token_s(self, deposit: Deposit) -> float:
        """From the request until the first token of its stream; returns when the stream has ended."""
        headers, body = self.headers(deposit.version.tenant), completion(deposit.name, 2)
        start = time.perf_counter()
        seconds: float | None = None
        with self._client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            _check(response, "" if response.is_success else response.read().decode())
            for line in response.iter_lines():
                if seconds is None and line.startswith("data:"):
                    seconds = time.perf_counter() - start
        assert seconds is not None, f"{deposit.name} was answered without a token"
        return seconds

    def prewarm(self, deposit: Deposit) -> None:
        """Has an adapter brought to the pool, which must have room for it, and waits until it is there."""
        headers, path = self.headers(deposit.version.tenant), f"/v1/adapters/{deposit.name}/prewarm"
        deadline = time.monotonic() + _PREWARM_S
        while True:
            response = self._client.post(path, headers=headers)
            _check(response, response.text)
            if response.json()["versions"][0]["place"] == AdapterPlace.POOL:
                return
            assert time.monotonic() < deadline, f"{deposit.name} was not loaded into the pool"
            time.sleep(_POLL_S)

    def make_cold(self, deposits: Iterable[Deposit]) -> None:
        """Deleted and registered again: they are in their stores, and neither on the host nor in the pool."""
        for deposit in deposits:
            headers = self.headers(deposit.version.tenant)
            response = self._client.delete(f"/v1/adapters/{deposit.name}", headers=headers)
            _check(response, response.text)
            self._depot.register(deposit)

    def count_loads(self) -> int:
        """Adapters that were copied into the pool."""
        text = self._client.get("/metrics").raise_for_status().text
        line = next(line for line in text.splitlines() if line.startswith("slora_adapter_loads_total"))
        return int(float(line.rpartition(" ")[2]))

    def last_first_token_s(self, deposits: Sequence[Deposit]) -> float:
        """All are asked for at once, each by a request of its own: until the last one's first token."""
        for deposit in deposits:
            self.headers(deposit.version.tenant)
        return asyncio.run(self._ask_all(deposits))

    async def _ask_all(self, deposits: Sequence[Deposit]) -> float:
        async with self.open_client() as client:
            # Connections are there before the clock starts.
            await asyncio.gather(*(client.get("/healthz") for _ in deposits))
            start = time.perf_counter()
            times = await asyncio.gather(*(self._first_token_at(client, deposit) for deposit in deposits))
        return max(times) - start

    async def _first_token_at(self, client: httpx.AsyncClient, deposit: Deposit) -> float:
        times = [at async for at in self.tokens_at(client, deposit, 2)]
        return times[0]

    def open_client(self) -> httpx.AsyncClient:
        # Reading certificates takes longer than most requests here, and there is no TLS.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx.AsyncClient(base_url=self._served.url, timeout=300, verify=False, limits=limits)

    async def tokens_at(
        self, client: httpx.AsyncClient, deposit: Deposit, max_tokens: int
    ) -> AsyncIterator[float]:
        """When each piece of a stream came, on `time.perf_counter`."""
        headers, body = self.headers(deposit.version.tenant), completion(deposit.name, max_tokens)
        async with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            _check(response, "" if response.is_success else (await response.aread()).decode())
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    if "error" in (event := json.loads(line[6:])):
                        raise RuntimeError(f"{deposit.name}: {event['error']}")
                    yield time.perf_counter()


def completion(model: str, max_tokens: int) -> dict[str, object]:
    return {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logit_bias": _NEVER,
        "stream": True,
    }


@contextmanager
def running_redis(folder: Path, *options: str) -> Iterator[RedisServer]:
    """Without options, with the settings of a warm tier: nothing of it is kept."""
    server = RedisServer(folder, *options)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def live_platform(depot: Depot, sizes: Sizes, *flags: str, threads: int | None = None) -> Iterator[Platform]:
    """Starts a server and waits until it is ready. threads: of the engine's arithmetic; None is one for each core."""
    chosen = [
        "--port",
        "0",
        "--data-dir",
        str(depot.data_dir),
        "--model",
        str(depot.model),
        "--device",
        "cpu",
    ]
    chosen += [
        "--dtype",
        DTYPE,
        "--block-tokens",
        str(BLOCK_TOKENS),
        "--prefix-cache",
        "off",
        "--swap-bytes",
        "0",
    ]
    chosen += ["--pool-bytes", str(sizes.pool_pages * depot.full_page_bytes)]
    chosen += ["--host-cache-bytes", str(sizes.host_cache_bytes), "--max-lora-rank", str(sizes.max_lora_rank)]
    cores = threads if threads is not None else len(os.sched_getaffinity(0))
    variables = environment(SLORA_ADMIN_KEY=ADMIN_KEY, OMP_NUM_THREADS=str(cores))
    with running([*SLORA, "serve", *chosen, *flags], variables, depot.data_dir) as served:
        served.wait_until_ready()
        platform = Platform(served, depot)
        try:
            yield platform
        finally:
            platform.close()


def _check(response: httpx.Response, text: str) -> None:
    if not response.is_success:
        raise RuntimeError(f"{response.request.url.path} was answered {response.status_code}: {text:.300}")
