"""What gateways made for vLLM read from /metrics.

The expected names, labels and forms are those of the metric protocol of the Kubernetes Gateway API inference extension
and of llm-d's endpoint picker (August 2026), and of the router of vLLM's production-stack (August 2026).
"""

import asyncio
import threading
from collections.abc import Collection, Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from slora.core.engine_state import EngineStats
from slora_adapters.errors import StoreUnavailable
from slora_adapters.version import AdapterVersion
from slora_api.metrics import scraper
from slora_api.metrics.names import CachedNames
from tests.adapters.hand_made import make_members, make_tensors
from tests.api.platform import ADMIN_KEY, Platform, running_platform
from tests.api.scripted_engine import ScriptedEngine, deltas_of
from tests.api.served import parse_metrics, wait_until

_LORA_LABELS = {"max_lora", "running_lora_adapters", "waiting_lora_adapters"}
_ALL = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
    "vllm:lora_requests_info",
}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    directory = tmp_path_factory.mktemp("gateway")
    with pytest.MonkeyPatch.context() as patch:
        # The tests change the engine between scrapes.
        patch.setattr("slora_api.metrics.scraper.CACHED_S", 0.0)
        with running_platform(
            directory, ScriptedEngine([deltas_of(b"hello.")]), gateway_metrics=True
        ) as platform:
            yield platform


def scrape(platform: Platform, key: str | None = None) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx.get(f"{platform.url}/metrics", headers=headers, verify=False)


def read_samples(text: str) -> dict[str, tuple[dict[str, str], float]]:
    """The labels and the value of each sample by name. No name has two samples."""
    samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
    assert len({one.name for one in samples}) == len(samples)
    return {one.name: (one.labels, one.value) for one in samples}


def list_adapters(label: str) -> set[str]:
    return {name.strip() for name in label.split(",") if name.strip()}


def test_a_gateway_without_a_key_reads_the_load_and_nothing_else(gateway: Platform) -> None:
    answer = scrape(gateway)
    assert answer.headers["content-type"].startswith("text/plain; version=")
    samples = read_samples(answer.raise_for_status().text)
    assert set(samples) == _ALL
    assert samples["vllm:num_requests_running"][1] == 1
    assert samples["vllm:num_requests_waiting"][1] == 2
    # A fraction, which the protocol calls a percentage.
    assert samples["vllm:kv_cache_usage_perc"][1] == pytest.approx(0.3)
    cache, _ = samples["vllm:cache_config_info"]
    assert int(cache["block_size"]) > 0 and int(cache["num_gpu_blocks"]) > 0
    lora, scraped_at = samples["vllm:lora_requests_info"]
    assert set(lora) == _LORA_LABELS and int(lora["max_lora"]) > 0 and scraped_at > 1.7e9


def test_adapters_are_listed_by_every_name_that_a_request_may_use(gateway: Platform) -> None:
    for seed in (1, 2):
        gateway.upload(
            gateway.key("acme"), "greeter", make_members(tensors=make_tensors(seed=seed))
        ).raise_for_status()
    with gateway.client(gateway.key("acme")) as client:
        client.put(
            "/v1/adapters/greeter/aliases/prod", json={"versions": {"1": 90, "2": 10}}
        ).raise_for_status()
        digests = [one["digest"] for one in client.get("/v1/adapters/greeter/versions").json()["data"]]
    second, first = digests
    acme = gateway.tenant_id("acme")
    gateway.engine.loaded_adapters = ((acme, first), ("gone", "f" * 64))
    gateway.engine.waiting_adapters = ((acme, second),)
    for key in (None, ADMIN_KEY):
        text = scrape(gateway, key).raise_for_status().text
        (lora,) = (
            one.labels
            for family in text_string_to_metric_families(text)
            for one in family.samples
            if one.name == "vllm:lora_requests_info"
        )
        assert list_adapters(lora["running_lora_adapters"]) == {"greeter@1", "greeter@prod"}
        assert list_adapters(lora["waiting_lora_adapters"]) == {
            "greeter",
            "greeter@2",
            "greeter@latest",
            "greeter@prod",
        }


def test_a_gateway_gets_no_other_route_and_a_wrong_key_is_still_refused(gateway: Platform) -> None:
    assert scrape(gateway, "slora_wrong").status_code == 401
    assert scrape(gateway, gateway.key("acme")).status_code == 403
    for path in ("/load", "/v1/models", "/admin/tenants", "/metrics/"):
        assert httpx.get(gateway.url + path, verify=False).status_code == 401
    assert "slora_ready" in scrape(gateway, ADMIN_KEY).text


def test_metrics_need_a_key_unless_the_operator_admits_gateways(tmp_path: Path) -> None:
    with running_platform(tmp_path, ScriptedEngine([deltas_of(b"hello.")])) as platform:
        assert scrape(platform).status_code == 401


def test_a_gateway_keeps_the_last_names_while_the_database_is_away() -> None:
    version, reads = AdapterVersion("acme", "1" * 64), 0
    times = iter((0.0, 0.5, 1.5, 2.0, 3.0))

    def find(versions: object) -> dict[AdapterVersion, list[str]]:
        nonlocal reads
        reads += 1
        if reads > 1:
            raise StoreUnavailable("the database is away")
        return {version: ["greeter"]}

    async def run() -> None:
        now = [0.0]
        references = CachedNames(find, 1.0, lambda: now[0])
        for now[0] in times:
            assert await references.find([version]) == {version: ["greeter"]}

    asyncio.run(run())
    assert reads == 3


def test_while_the_engine_computes_a_long_step_metrics_show_its_last_numbers_with_their_age(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_free = threading.Event()
    is_free.set()

    class Busy(ScriptedEngine):
        num_asked = 0

        async def stats(self, watched: Collection[str] | None = None) -> EngineStats:
            self.num_asked += 1
            while not is_free.is_set():
                await asyncio.sleep(0.001)
            return await super().stats(watched)

    with running_platform(tmp_path, engine := Busy()) as platform, platform.client(ADMIN_KEY) as operator:

        def read() -> dict[str, float]:
            return parse_metrics(operator.get("/metrics").raise_for_status().text)

        fresh = read()
        monkeypatch.setattr(scraper, "PATIENCE_S", 0.01)
        is_free.clear()
        scrapes = [read() for _ in range(6)]
        counters = [
            name for name in fresh if name.startswith(("vllm:prefix_cache", "slora_pages", "vllm:num_req"))
        ]
        assert counters and all(old[name] == fresh[name] for old in scrapes for name in counters)
        ages = [old["slora_engine_stats_age_seconds"] for old in scrapes]
        assert fresh["slora_engine_stats_age_seconds"] < ages[0] and ages == sorted(ages)
        assert engine.num_asked == 2  # The scrapes wait for one answer.
        is_free.set()
        wait_until(lambda: read()["slora_engine_stats_age_seconds"] < ages[0])
        engine.ready = False
        assert not any(name.startswith("vllm:num_requests") for name in read())


def test_gateways_that_scrape_at_the_same_time_share_one_answer(tmp_path: Path) -> None:
    """Anyone may scrape without a key, and each answer interrupts the engine."""

    class Counting(ScriptedEngine):
        num_asked = 0

        async def stats(self, watched: Collection[str] | None = None) -> EngineStats:
            self.num_asked += 1
            await asyncio.sleep(0.01)
            return await super().stats(watched)

    async def scrape_often(platform: Platform) -> set[bytes]:
        async with httpx.AsyncClient(verify=False) as client:
            answers = await asyncio.gather(*(client.get(f"{platform.url}/metrics") for _ in range(20)))
        return {answer.raise_for_status().content for answer in answers}

    engine = Counting()
    with (
        pytest.MonkeyPatch.context() as patch,
        running_platform(tmp_path, engine, gateway_metrics=True) as platform,
    ):
        patch.setattr("slora_api.metrics.scraper.CACHED_S", 3600.0)
        assert len(asyncio.run(scrape_often(platform))) == 1 and engine.num_asked == 1
        patch.setattr("slora_api.metrics.scraper.CACHED_S", 0.0)
        scrape(platform).raise_for_status()
        assert engine.num_asked == 2
