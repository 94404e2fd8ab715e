"""A real server with an object store, a warm tier and no drain time. What a deletion frees, and when: only after the
last answer. What SIGTERM does to requests in progress."""

import json
import signal
from pathlib import Path

from tests.api.conftest import Kit
from tests.api.served import ADMIN_KEY, READY_S, environment, serving, wait_for
from tests.api.server.test_lifecycle import LONG, SHORT, LongRequest, wait_until_running
from tests.api.server.test_server import upload
from tests.redis_server import RedisServer


def test_a_deleted_adapter_drains_and_leaves_no_copy_in_any_tier_and_requests_that_outlast_the_drain_time_fail(
    kit: Kit, tmp_path: Path, make_redis: type[RedisServer]
) -> None:
    redis = make_redis()
    blobs, data = tmp_path / "objects" / "blobs", tmp_path / "data"
    env = environment(SLORA_ADMIN_KEY=ADMIN_KEY, SLORA_STORE=f"shared://{tmp_path}/objects")
    flags = ("--redis", redis.tcp_url, "--drain-seconds", "0")
    with redis.client() as chunks, serving(kit.base, data, *flags, env=env) as served:
        served.wait_until_ready()
        key = served.make_key("t")
        # Blocks of its prompt stay in the prefix cache, under the adapter.
        long = LONG | {"model": "voice", "prompt": "the quick brown fox " * 5}
        free, held = 'slora_pages{state="free"}', 'slora_pages{state="held"}'
        before = served.metric(free)
        with served.client(key) as client:
            created = upload(served, key, "voice", kit.wide).json()
            digest = created["digest"]
            whole = client.post("/v1/completions", json=long).json()["choices"][0]["text"]
            served.wait_for_metric(held, 0)
            adapter_pages, cached = (
                served.metric(name) for name in ("slora_adapter_pages", 'slora_pages{state="cached"}')
            )
            assert adapter_pages and cached and cached > adapter_pages, "there are prefix blocks beside it"
            wait_for(lambda: chunks.keys(f"slora:warm:{{{digest}}}:*") or None, served.alive)
            assert (blobs / digest[:2] / digest).is_dir() and not list(data.rglob("*.safetensors"))
            client.put("/v1/adapters/voice/aliases/prod", json={"versions": {"1": 100}}).raise_for_status()
            reader = LongRequest(served, key, long | {"stream": True})
            with served.slowed():
                reader.start()
                assert reader.begun.wait(READY_S)
                assert client.delete("/v1/adapters/voice").status_code == 409
                assert client.delete("/v1/adapters/voice?force=true").status_code == 200
                assert client.post("/v1/completions", json=SHORT | {"model": "voice"}).status_code == 404
                assert reader.is_alive() and served.metric("slora_adapter_pages") == adapter_pages
            reader.join(READY_S)
            events = [line[6:] for line in reader.text.splitlines() if line.startswith("data: ")]
            assert events[-1] == "[DONE]"
            assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == whole
            served.wait_for_metric(free, before or 0)
            served.wait_for_metric("slora_resident_adapters", 0)
        wait_for(lambda: not chunks.keys("*") or None, served.alive)
        assert not [path for path in blobs.rglob("*") if path.is_file()]
        streaming, waiting = LongRequest(served, key, LONG | {"stream": True}), LongRequest(served, key, LONG)
        with served.slowed():
            waiting.start()
            streaming.start()
            assert streaming.begun.wait(READY_S)
            wait_until_running(served, 2)
            served.process.send_signal(signal.SIGTERM)
            streaming.join(READY_S)
            waiting.join(READY_S)
        assert streaming.text.rstrip().endswith("}}") and '"code":"server_stopping"' in streaming.text
        assert waiting.status == 503 and "server_stopping" in waiting.text
        assert served.process.wait(READY_S) == 0
