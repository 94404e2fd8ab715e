"""Pins from the operator's view: named, bounded, and reported to the engine."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slora.core.engine_state import Pin
from slora.core.request import TenantShare
from slora_adapters.database.database import Database
from slora_adapters.errors import StoreUnavailable
from slora_adapters.registry.record import AdapterDetails, Rollout
from slora_adapters.registry.registry import PinCheck, Registry
from slora_adapters.version import AdapterVersion
from slora_api.adapters.pinning import Pinning
from slora_api.core.errors import PinsFull
from slora_api.tenants.tenant_store import ShareChanges, TenantStore
from slora_kernels.layout import lay_out_adapter, llama_shape
from slora_kernels.partition import Partition
from tests.adapters.hand_made import make_config, make_members, make_tensors
from tests.api.command import run_slora
from tests.api.platform import ADMIN_KEY, Platform, open_tenant_store, running_platform
from tests.api.scripted_engine import ScriptedEngine, deltas_of


@pytest.fixture
def platform(tmp_path: Path) -> Iterator[Platform]:
    """A platform whose pool has 100 pages of 1024 bytes."""
    with running_platform(tmp_path, ScriptedEngine([deltas_of(b"ok")])) as running:
        yield running


def pin_path(tenant: str, name: str) -> str:
    return f"/admin/tenants/{tenant}/adapters/{name}/pin"


def upload(platform: Platform, key: str, name: str, rank: int, seed: int = 0) -> None:
    """Uploads an adapter that takes 2 pages for each rank."""
    members = make_members(make_config(r=rank), make_tensors(rank, seed))
    assert platform.upload(key, name, members).status_code == 201


def test_pinning_and_unpinning_are_idempotent_and_visible_in_the_adapter(platform: Platform) -> None:
    key = platform.key("acme")
    upload(platform, key, "voice", 2)
    admin = platform.api(ADMIN_KEY)
    tenant = platform.api(key)
    for send, pinned in ((admin.put, True), (admin.put, True), (admin.delete, False), (admin.delete, False)):
        answer = send(pin_path("acme", "voice"))
        assert (answer.status_code, answer.json()["pinned"]) == (200, pinned)
        assert tenant.get("/v1/adapters").json()["data"] == [answer.json()]
        assert tenant.get("/v1/adapters/voice").json() == answer.json()


def test_pinning_a_missing_adapter_is_a_404(platform: Platform) -> None:
    upload(platform, platform.key("acme"), "voice", 2)
    platform.key("other")
    admin = platform.api(ADMIN_KEY)
    for tenant, name in (("nobody", "voice"), ("acme", "nothing"), ("other", "voice")):
        for answer in (admin.put(pin_path(tenant, name)), admin.delete(pin_path(tenant, name))):
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


def test_all_pins_together_take_at_most_half_of_the_pool(platform: Platform) -> None:
    first, second = platform.key("first"), platform.key("second")
    upload(platform, first, "large", 20)
    upload(platform, second, "fits", 5)
    upload(platform, second, "more", 1, seed=1)
    with platform.client(ADMIN_KEY) as admin:
        assert admin.put(pin_path("first", "large")).status_code == 200
        assert admin.put(pin_path("second", "fits")).status_code == 200, "40 and 10 pages of 100"
        refused = admin.put(pin_path("second", "more"))
        assert (refused.status_code, refused.headers["x-should-retry"]) == (409, "false")
        error = refused.json()["error"]
        assert error["code"] == "pins_full"
        assert error["message"] == (
            "With `more` (2 pages) the pins of all tenants would take 52 pages; they may take 50 of the pool's 100 "
            "(half). Unpin others, or raise pool_bytes."
        )
        assert admin.put(pin_path("first", "large")).status_code == 200, "it is pinned already"
        admin.delete(pin_path("second", "fits"))
        assert admin.put(pin_path("second", "more")).status_code == 200


def test_the_pins_of_a_tenant_may_not_exceed_its_ceiling(platform: Platform) -> None:
    key = platform.key("acme")
    upload(platform, key, "one", 3)
    upload(platform, key, "two", 3, seed=1)
    with platform.client(ADMIN_KEY) as admin:
        admin.patch("/admin/tenants/acme", json={"max_pool_share": 0.1}).raise_for_status()
        assert admin.put(pin_path("acme", "one")).status_code == 200
        refused = admin.put(pin_path("acme", "two"))
        assert refused.status_code == 409
        assert refused.json()["error"]["message"] == (
            "With `two` (6 pages) the pins of tenant `acme` would take 12 pages; they may take 10 of the pool's 100 "
            "(its max_pool_share). Unpin others, or raise max_pool_share."
        )
        admin.patch("/admin/tenants/acme", json={"max_pool_share": 0.12}).raise_for_status()
        assert admin.put(pin_path("acme", "two")).status_code == 200


def test_a_ceiling_cannot_be_lowered_below_the_pinned_pages(platform: Platform) -> None:
    key, other = platform.key("acme"), platform.key("other")
    for number in range(6):
        upload(platform, key, f"voice-{number}", 1, seed=number)
    upload(platform, other, "large", 15, seed=9)
    with platform.client(ADMIN_KEY) as admin:
        admin.put(pin_path("other", "large")).raise_for_status()
        for number in range(6):
            admin.put(pin_path("acme", f"voice-{number}")).raise_for_status()
        refused = admin.patch("/admin/tenants/acme", json={"max_pool_share": 0.11, "weight": 3})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "pins_full")
        assert refused.json()["error"]["message"] == (
            "The pins of tenant `acme` (`voice-0`, `voice-1`, `voice-2`, `voice-3`, `voice-4` and 1 more) take 12 "
            "pages; with a max_pool_share of 0.11 they may take 11 of the pool's 100. Unpin adapters first, or "
            "choose a higher max_pool_share."
        )
        kept = admin.get("/admin/tenants/acme").json()
        assert (kept["max_pool_share"], kept["weight"]) == (1, 1), "nothing of it was done"
        assert admin.patch("/admin/tenants/acme", json={"max_pool_share": 0.12}).status_code == 200
        admin.delete(pin_path("acme", "voice-0")).raise_for_status()
        assert admin.patch("/admin/tenants/acme", json={"max_pool_share": 0.1}).status_code == 200


def test_a_pin_that_outgrew_the_ceiling_does_not_block_other_changes(platform: Platform) -> None:
    key = platform.key("acme")
    upload(platform, key, "voice", 2)
    admin = platform.api(ADMIN_KEY)
    admin.patch("/admin/tenants/acme", json={"max_pool_share": 0.04}).raise_for_status()
    admin.put(pin_path("acme", "voice")).raise_for_status()
    # The pin follows the name to the new version.
    upload(platform, key, "voice", 3)
    for change in ({"weight": 2}, {"max_pool_share": 0.04}, {"max_pool_share": 0.05}):
        assert admin.patch("/admin/tenants/acme", json=change).status_code == 200
    assert admin.patch("/admin/tenants/acme", json={"max_pool_share": 0.04}).status_code == 409


def test_the_operator_lists_the_pins_of_all_tenants(platform: Platform) -> None:
    for tenant in ("zeta", "acme"):
        key = platform.key(tenant)
        upload(platform, key, "voice", 1)
        upload(platform, key, "voice", 2)
    admin = platform.api(ADMIN_KEY)
    client = platform.api(key)
    client.put("/v1/adapters/voice/aliases/prod", json={"versions": {"1": 90, "2": 10}})
    for tenant, name in (("zeta", "voice"), ("acme", "voice@prod")):
        admin.put(pin_path(tenant, name)).raise_for_status()
    listed = admin.get("/admin/pins").json()
    pins = [(one["tenant"], one["name"], one["alias"], one["versions"]) for one in listed["data"]]
    assert sorted(pins) == [
        ("acme", "voice", "prod", {"1": 90, "2": 10}),
        ("zeta", "voice", "latest", {"2": 100}),
    ]
    assert all(one["pinned"] for one in listed["data"])
    assert client.get("/admin/pins").status_code == 403
    shown = run_slora(platform.url, "adapter", "pins", SLORA_ADMIN_KEY=ADMIN_KEY)
    rows = [line.split() for line in shown.splitlines()]
    assert rows == [
        ["TENANT", "ALIAS", "VERSIONS"],
        ["acme", "voice@prod", "1=90", "2=10"],
        ["zeta", "voice@latest", "2=100"],
    ]


def test_pinned_names_with_the_same_weights_are_counted_once(platform: Platform) -> None:
    key = platform.key("acme")
    for name in ("one", "two"):
        upload(platform, key, name, 20)
    admin = platform.api(ADMIN_KEY)
    assert [admin.put(pin_path("acme", name)).status_code for name in ("one", "two")] == [200, 200]


def test_pins_count_the_pages_of_one_tensor_parallel_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Rows of q_proj have 2048 columns, and those of o_proj are read from 2048 columns: 8 KiB each in float32.
    shape = llama_shape(1, 2048, 16, 16, 128, 4096, vocab_size=50, element_bytes=4)
    info = replace(ScriptedEngine().info, shape=shape, full_page_bytes=2048)
    ranks = [16 * (module.path.endswith(("q_proj", "o_proj"))) for module in shape.modules]
    packed_bytes = lay_out_adapter(shape, ranks).num_bytes
    database = Database(tmp_path / "slora.db")
    tenant_store = open_tenant_store(database, tmp_path)
    acme = tenant_store.create_tenant("acme", ShareChanges(max_pool_share=0.4)).tenant_id
    registry = Registry(database)
    registry.put(
        "voice", AdapterVersion(acme, "1" * 64), AdapterDetails(16, ("q_proj", "o_proj"), 1, packed_bytes)
    )
    for num_ranks, num_pages in ((1, 256), (4, 160)):
        monkeypatch.setattr(
            ScriptedEngine, "info", replace(info, num_ranks=num_ranks, num_pages=500 - num_ranks)
        )
        of_rank = lay_out_adapter(Partition(shape, num_ranks).rank_shape, ranks).num_bytes
        assert info.count_rank_bytes(packed_bytes, ("q_proj",)) == packed_bytes
        assert ScriptedEngine().info.count_rank_bytes(packed_bytes, ("q_proj", "o_proj")) == of_rank
        assert of_rank == num_pages * 2048
        pinning = Pinning(registry, tenant_store, ScriptedEngine())
        if num_ranks == 1:
            with pytest.raises(PinsFull, match="would take 256 pages; they may take 199"):
                asyncio.run(pinning.pin(acme, "voice"))
        else:
            assert asyncio.run(pinning.pin(acme, "voice")).pinned
    database.close()


# -- messages to the engine --------------------------------------------------------------------------------------


class RacingShareRegistry(Registry):
    """A registry in which another operator lowers the tenant's share between the start of a pin and its transaction."""

    def __init__(self, database: Database, tenant_store: TenantStore) -> None:
        super().__init__(database)
        self._tenant_store = tenant_store

    def pin(self, tenant: str, reference: str, check: PinCheck) -> Rollout:
        self._tenant_store.change_share(tenant, ShareChanges(max_pool_share=0.01))
        return super().pin(tenant, reference, check)


def test_a_pin_is_checked_against_the_share_at_its_commit(tmp_path: Path) -> None:
    """Born from a bug: the share was read before the transaction, so a share lowered in between was below the pinned
    bytes."""
    database = Database(tmp_path / "slora.db")
    tenant_store = open_tenant_store(database, tmp_path)
    registry = RacingShareRegistry(database, tenant_store)
    acme = tenant_store.create_tenant("acme").tenant_id
    details = AdapterDetails(2, ("q_proj",), 4096)
    registry.put("voice", AdapterVersion(acme, "1" * 64), details)
    pinning = Pinning(registry, tenant_store, ScriptedEngine())
    with pytest.raises(PinsFull, match="would take 4 pages; they may take 1 of the pool's 100"):
        asyncio.run(pinning.pin(acme, "voice"))
    assert registry.pinned() == []
    database.close()


class FailingRegistry(Registry):
    """A registry that fails at its first query."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.num_asked = 0

    def pinned(self) -> list[Rollout]:
        self.num_asked += 1
        if self.num_asked == 1:
            raise StoreUnavailable("locked")
        return list(super().pinned())


def test_all_pins_with_their_shares_are_sent_until_the_engine_accepts_them(tmp_path: Path) -> None:
    database = Database(tmp_path / "slora.db")
    registry, tenant_store = FailingRegistry(database), open_tenant_store(database, tmp_path)
    details = AdapterDetails(2, ("q_proj",), 100)
    a, b = (
        tenant_store.create_tenant(name, share).tenant_id
        for name, share in (("a", ShareChanges(weight=2)), ("b", ShareChanges()))
    )
    for tenant in (a, b):
        registry.put("one", AdapterVersion(tenant, "1" * 64), details)
    registry.put("same", AdapterVersion(a, "1" * 64), details)
    engine = ScriptedEngine(ready=False)
    pinning = Pinning(registry, tenant_store, engine)
    one, two = Pin(AdapterVersion(a, "1" * 64), TenantShare(2)), Pin(AdapterVersion(b, "1" * 64))

    def by_tenant(pin: Pin) -> str:
        return pin.version.tenant

    async def told(count: int) -> list[Pin]:
        async with asyncio.timeout(300):
            while len(engine.pins) < count:
                await asyncio.sleep(0.001)
        return engine.pins[-1]

    async def main() -> None:
        running = asyncio.create_task(pinning.run())
        await pinning.pin(a, "one")
        # At first the database fails, and then the engine is not connected.
        async with asyncio.timeout(300):
            while not engine.num_refused_pins:
                await asyncio.sleep(0.001)
        assert registry.num_asked == 2
        engine.ready = True
        pinning.refresh()  # the engine connects
        assert await told(1) == [one]
        await pinning.pin(b, "one")
        assert await told(2) == sorted([one, two], key=by_tenant)
        await pinning.pin(a, "same")
        assert await told(3) == sorted([one, two], key=by_tenant)
        await pinning.unpin(a, "one")
        assert await told(4) == sorted([one, two], key=by_tenant), "another name stands for it"
        tenant_store.change_share(b, ShareChanges(max_pool_share=0.5))
        pinning.refresh()
        assert await told(5) == sorted([one, Pin(two.version, TenantShare(max_share=0.5))], key=by_tenant)
        registry.put("one", AdapterVersion(b, "2" * 64), details)
        registry.move(b, "one", "latest", {1: 90, 2: 10})
        pinning.refresh()
        digests = [pin.version.digest[0] for pin in await told(6) if pin.version.tenant == b]
        assert digests == ["1", "2"], "both sides of a canary"
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(main())
    database.close()
