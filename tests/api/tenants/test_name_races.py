"""Names change hands while tenants upload at two servers, and no tenant gets what another one owns."""

import json
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from slora_api.keys.key_record import PEPPER_BYTES
from tests.adapters.hand_made import make_members, make_tensors
from tests.api.platform import ADMIN_KEY, Platform, bearer, running_platform
from tests.api.scripted_engine import ScriptedEngine, deltas_of

LINE = {
    "custom_id": "1",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"model": "base", "prompt": "x"},
}


@dataclass
class Race:
    """One interleaving. keys: each key with the id of its tenant. names: the names that may be taken."""

    servers: tuple[Platform, Platform]
    rng: random.Random
    keys: dict[str, str] = field(default_factory=dict)
    names: tuple[str, ...] = ("one", "two")

    def ask(self, key: str, method: str, path: str, **body: object) -> httpx.Response:
        """Sends a request to one of the servers. Errors are part of the race."""
        url = f"{self.rng.choice(self.servers).url}{path}"
        with httpx.Client(headers=bearer(key), timeout=300, verify=False) as client:
            return client.request(method, url, **body)  # type: ignore[arg-type]

    def make_key(self, name: str) -> None:
        self.ask(ADMIN_KEY, "POST", "/admin/tenants", json={"name": name})
        made = self.ask(ADMIN_KEY, "POST", f"/admin/tenants/{name}/keys")
        if made.status_code == 201:
            key = made.json()
            self.keys[key["key"]] = key["tenant_id"]

    def change_names(self) -> None:
        """Does what operators do, on one thread."""
        for _ in range(4):
            name, other = self.rng.sample(self.names, 2)
            spare = f"spare-{self.rng.randrange(10**9)}"
            step = self.rng.randrange(5)
            if step == 0:
                self.ask(ADMIN_KEY, "PATCH", f"/admin/tenants/{name}", json={"name": spare})
            elif step == 1:
                self.ask(ADMIN_KEY, "PATCH", f"/admin/tenants/{name}", json={"name": spare})
                self.ask(ADMIN_KEY, "PATCH", f"/admin/tenants/{other}", json={"name": name})
                self.ask(ADMIN_KEY, "PATCH", f"/admin/tenants/{spare}", json={"name": other})
            elif step == 2:
                body = {"confirm": name, "ledger": "keep"}
                self.ask(ADMIN_KEY, "POST", f"/admin/tenants/{name}/purge", json=body)
            elif step == 3:
                key = self.rng.choice(list(self.keys))
                self.ask(ADMIN_KEY, "DELETE", f"/admin/keys/{key.split('_')[1]}")
            self.make_key(name)

    def upload(self, key: str) -> None:
        """Uploads an adapter, a file and a batch, all marked with the id of the key's tenant."""
        tenant = self.keys[key]
        members = make_members(tensors=make_tensors(seed=int(tenant[1:], 16) % 2**31))
        files = {"config": members["adapter_config.json"], "weights": members["adapter_model.safetensors"]}
        self.ask(key, "POST", "/v1/adapters", data={"name": f"of-{tenant.lower()}"}, files=files)
        file = {"file": (f"{tenant}.jsonl", json.dumps(LINE).encode())}
        made = self.ask(key, "POST", "/v1/files", data={"purpose": "batch"}, files=file)
        if made.status_code == 200:
            body = {
                "input_file_id": made.json()["id"],
                "endpoint": "/v1/completions",
                "completion_window": "24h",
                "metadata": {"owner": tenant},
            }
            self.ask(key, "POST", "/v1/batches", json=body)

    def check_owners(self) -> int:
        """Checks that each valid key sees only what its own tenant uploaded. Returns how much that was."""
        count = 0
        for key, tenant in self.keys.items():
            paths = ("/v1/me", "/v1/adapters", "/v1/files", "/v1/batches")
            answers = [self.ask(key, "GET", path) for path in paths]
            if any(answer.status_code in (401, 403) for answer in answers):
                continue  # It was revoked or purged, and the servers learn of it one after the other.
            me, *lists = [answer.raise_for_status().json() for answer in answers]
            assert me["tenant_id"] == tenant
            adapters, stored, batches = (listed["data"] for listed in lists)
            assert {adapter["name"] for adapter in adapters} <= {f"of-{tenant.lower()}"}
            assert {file["filename"] for file in stored if file["purpose"] == "batch"} <= {f"{tenant}.jsonl"}
            assert {batch["metadata"]["owner"] for batch in batches} <= {tenant}
            count += len(adapters) + len(stored) + len(batches)
        return count


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[Platform, Platform]]:
    (tmp_path / "pepper").write_bytes(b"p" * PEPPER_BYTES)
    engines = [ScriptedEngine([deltas_of(b"ok")]) for _ in range(2)]
    with (
        running_platform(tmp_path, engines[0], follows=True) as first,
        running_platform(tmp_path, engines[1], follows=True) as second,
    ):
        yield first, second


def test_names_that_change_hands_during_uploads_never_hand_over_what_was_uploaded(
    servers: tuple[Platform, Platform], soak: bool, report: Callable[[str], None]
) -> None:
    seen = 0
    for seed in range(1000 if soak else 4):
        race = Race(servers, random.Random(seed), names=(f"one-{seed}", f"two-{seed}"))
        for name in race.names:
            race.make_key(name)
        uploads = [threading.Thread(target=race.upload, args=(key,)) for key in list(race.keys)]
        for thread in uploads:
            thread.start()
        race.change_names()
        for thread in uploads:
            thread.join()
        seen += race.check_owners()
    report(f"objects that their owners saw afterwards: {seen}")
    assert seen
