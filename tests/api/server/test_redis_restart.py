"""Redis as the only store, killed repeatedly while tenants upload and send requests. Acknowledged uploads persist."""

import itertools
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.api.conftest import Kit
from tests.api.platform import FIELDS
from tests.api.served import Served, serving, wait_for
from tests.api.server.test_server import upload
from tests.redis_server import DURABLE, RedisServer
from tests.support.repeated_calls import repeating

# The pool has room for two of the uploaded adapters (16 pages of 10 KiB each) and the running sequences. The host has
# room for one.
SMALL = ("--pool-bytes", "450KiB", "--host-cache-bytes", "160KiB")
SHORT = {"prompt": "hi", "max_tokens": 2, "temperature": 0}
# Between the calls of a thread. Without a pause, the threads and the server would compute all the time.
PAUSE_S = 0.05


class UploadingTenant:
    """Uploads adapters that differ in one number, and sends requests to them.

    acknowledged: digests by name, from each 201 response.
    num_uploads_refused, num_loads_refused: refusals because the store does not answer.
    num_resident: answers of an adapter that stays in the pool. Its requests are never refused.
    """

    def __init__(self, served: Served, kit: Kit) -> None:
        self.acknowledged: dict[str, str] = {}
        self.num_uploads_refused = self.num_loads_refused = 0
        self.num_resident = 0
        self._members = {path.name: path.read_bytes() for path in kit.wide.iterdir() if path.name in FIELDS}
        self._served = served
        self._key = served.make_key("acme")
        self._turns = itertools.count()

    def client(self) -> httpx.Client:
        return self._served.client(self._key)

    def upload(self) -> None:
        """Uploads the next adapter, or repeats the refused upload."""
        number = len(self.acknowledged)
        tensors = self._members["adapter_model.safetensors"][:-4] + struct.pack("<f", 0.01 + number)
        members = {**self._members, "adapter_model.safetensors": tensors}
        files = {FIELDS[name]: (name, content) for name, content in members.items()}
        name = f"voice-{number}"
        with self.client() as client:
            answer = client.post("/v1/adapters", data={"name": name}, files=files)
        if answer.status_code == 201:
            self.acknowledged[name] = answer.json()["digest"]
        else:
            check_refusal(answer)
            self.num_uploads_refused += 1

    def read(self) -> None:
        """Lists all adapters and sends a request to one: its digest is as listed, or the store is unavailable.

        The adapters take turns, so that each one was evicted from the pool and from the host before its next turn.
        """
        with self.client() as client:
            listed = client.get("/v1/adapters").raise_for_status().json()["data"]
            self.ask(client, listed[next(self._turns) % len(listed)])

    def ask(self, client: httpx.Client, adapter: dict[str, Any]) -> bool:
        """Returns whether the request was answered."""
        answer = client.post("/v1/completions", json=SHORT | {"model": adapter["name"]})
        if answer.status_code == 200:
            assert adapter["digest"] == answer.headers["x-slora-adapter-digest"]
            return True
        check_refusal(answer)
        self.num_loads_refused += 1
        return False

    def ask_resident(self) -> None:
        with self.client() as client:
            answer = client.post("/v1/completions", json=SHORT | {"model": "resident"})
        assert answer.status_code == 200, answer.text
        self.num_resident += 1

    def upload_resident(self, kit: Kit) -> None:
        upload(self._served, self._key, "resident", kit.small).raise_for_status()
        self.ask_resident()


def check_refusal(answer: httpx.Response) -> None:
    assert answer.status_code == 503, answer.text
    error = answer.json()["error"]
    assert error["code"] == "store_unavailable" and "is unavailable" in error["message"], error
    assert "127.0.0.1" not in error["message"], "where it is, is the operator's to know"
    assert int(answer.headers["retry-after"]) > 0


def test_repeated_kills_of_redis_lose_no_upload_and_stop_no_running_request(
    kit: Kit, tmp_path: Path, make_redis: type[RedisServer], soak: bool, report: Callable[[str], None]
) -> None:
    num_kills = 40 if soak else 1
    redis_server = make_redis(*DURABLE)
    with serving(kit.base, tmp_path / "data", "--store", redis_server.tcp_url, *SMALL) as served:
        served.wait_until_ready()
        tenant = UploadingTenant(served, kit)
        tenant.upload_resident(kit)
        for _ in range(3):
            tenant.upload()
        draw = random.Random(1)
        calls = (tenant.upload, tenant.read, tenant.ask_resident)
        with repeating(*calls, pause_s=PAUSE_S) as check:
            for kill in range(num_kills):
                wait_for_more(lambda: len(tenant.acknowledged), check)
                if kill % 2:
                    time.sleep(draw.random())
                else:  # during the next upload
                    wait_for_a_write(redis_server, check)
                redis_server.kill()
                wait_for_more(lambda: tenant.num_loads_refused, check)
                wait_for_more(lambda: tenant.num_resident, check, 3)
                redis_server.start()
        with tenant.client() as client:
            listed = client.get("/v1/adapters?limit=1000").json()["data"]
            held = {adapter["name"]: adapter["digest"] for adapter in listed if adapter["name"] != "resident"}
            assert held == tenant.acknowledged
            assert all(tenant.ask(client, adapter) for adapter in listed)
    report(
        f"Redis killed {num_kills} times: {len(held)} uploads acknowledged and there, {tenant.num_uploads_refused} "
        f"uploads and {tenant.num_loads_refused} loads refused for now, {tenant.num_resident} answers of a resident"
    )


def wait_for_more(count: Callable[[], int], check: Callable[[], None], more: int = 1) -> None:
    wanted = count() + more
    wait_for(lambda: count() >= wanted or None, check)


def wait_for_a_write(redis_server: RedisServer, check: Callable[[], None]) -> None:
    """Waits until Redis has a new key."""
    with redis_server.client() as client:
        num_keys = client.dbsize()
        while client.dbsize() == num_keys:
            check()
            time.sleep(0.0005)
