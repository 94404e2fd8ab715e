"""Runs `slora serve` on the data of a depot, and measures over HTTP when the tokens of a stream arrive."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from bench.adapter_depot import BLOCK_TOKENS, DTYPE, WIDE, Deposit, Depot
from bench.tier_rates import RING_BYTES
from bench.workload import ModelSize
from slora.core.engine_state import AdapterPlace
from tests.api.platform import bearer
from tests.api.served import ADMIN_KEY, EOS, SLORA, Served, environment, running
from tests.redis_server import RedisServer

# One token, because the prefill is not measured.
PROMPT = "a"
# Bans the end token of the tokenizer, because it has no text and would therefore make no chunk.
_NEVER = {str(EOS): -100}

_POLL_S = 0.05
_PREWARM_S = 120.0


@dataclass(frozen=True, slots=True)
class Setup:
    """The setup of a part of the bench.

    ring_bytes: size of the data that the simplest programs read. flags: of `slora serve`.
    """

    model: ModelSize = WIDE
    ring_bytes: int = RING_BYTES
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a server. host_cache_bytes: space for packed adapters."""

    pool_pages: int
    host_cache_bytes: int
    max_lora_rank: int

    @classmethod
    def with_room(cls, depot: Depot, deposits: Sequence[Deposit], num_sequences: int, tokens: int) -> "Sizes":
        """Sizes with room for all adapters and for `num_sequences` sequences, and half as much again."""
        adapters = sum(depot.pages(deposit.packed_bytes) for deposit in deposits)
        blocks = num_sequences * (tokens // BLOCK_TOKENS + 2)
        host_cache_bytes = max(16 << 20, 2 * sum(deposit.packed_bytes for deposit in deposits))
        max_lora_rank = max(deposit.details.rank for deposit in deposits)
        return cls(3 * (adapters + blocks) // 2, host_cache_bytes, max_lora_rank)


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
        """Returns the API key of a tenant, which is named by its id or its name. Creates both at the first call."""
        name = self._depot.tenant_name(tenant)
        if name not in self._keys:
            self._keys[name] = self._served.make_key(name)
        return self._keys[name]

    def set_quota(self, tenant: str, limits: Mapping[str, int]) -> None:
        self.key(tenant)
        response = self._client.patch(f"/admin/tenants/{tenant}/quota", json=limits)
        _check(response, response.text)

    def headers(self, tenant: str) -> dict[str, str]:
        return bearer(self.key(tenant))

    def first_token_s(self, deposit: Deposit) -> float:
        """Returns the time from a request until the first token of its stream. Reads the stream to its end."""
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
        """Loads an adapter into the pool, which must have room for it, and waits until it is loaded."""
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
        """Deletes the adapters and registers them again. They are then only in their stores."""
        for deposit in deposits:
            headers = self.headers(deposit.version.tenant)
            response = self._client.delete(f"/v1/adapters/{deposit.name}", headers=headers)
            _check(response, response.text)
            self._depot.register(deposit)

    def count_loads(self) -> int:
        """Returns how many adapter loads into the pool the server has made."""
        text = self._client.get("/metrics").raise_for_status().text
        line = next(line for line in text.splitlines() if line.startswith("slora_adapter_loads_total"))
        return int(float(line.rpartition(" ")[2]))

    def last_first_token_s(self, deposits: Sequence[Deposit]) -> float:
        """Sends one request for each adapter at once. Returns the time until each of them has its first token."""
        for deposit in deposits:
            self.headers(deposit.version.tenant)
        return asyncio.run(self._ask_all(deposits))

    async def _ask_all(self, deposits: Sequence[Deposit]) -> float:
        async with self.open_client() as client:
            # Open the connections before the clock starts.
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
        """Yields the time at which each chunk of a stream arrived, on `time.perf_counter`."""
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
    """Runs a Redis. Without options it has the settings of a warm tier, which persists nothing."""
    server = RedisServer(folder, *options)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def live_platform(depot: Depot, sizes: Sizes, *flags: str, threads: int | None = None) -> Iterator[Platform]:
    """Starts a server and waits until it is ready. threads: of the engine; None is one per core."""
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
