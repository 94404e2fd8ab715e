"""Which adapters the operator pins, within which bounds, and how the engine hears of it.

The database has the pins; the engine is told all of them at once: when it says hello, and after each change of a pin,
of a pinned alias or of a tenant's share. One task reads and tells, so what the engine hears last is what was read last.

What is pinned is an alias, `latest` where it is a bare name: with it all versions that it points at, both sides of a
canary too, and after a push, a move or a rollback those that it points at then. A version that no pinned alias points
at any more leaves the pool like any other adapter. A single version has no pin of its own: an alias for it has.

Pins take at most half of the pool, and of one tenant at most its max_pool_share, when they are made and when that is
lowered. A tenant that moves a pinned alias to larger weights is not refused; the engine keeps to the bounds, and what
is beyond them is loaded when it is asked for, like any other adapter.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence

from slora.engine.client import EngineClient
from slora.engine.info import EngineInfo
from slora.engine.pin import Pin
from slora.errors import EngineUnavailable
from slora.tenant_share import DEFAULT_SHARE, TenantShare
from slora_adapters.errors import AdapterNotFound, StoreUnavailable
from slora_adapters.registry.registry import Registry, Rollout
from slora_adapters.version import AdapterVersion
from slora_api.errors import NotFound, PinsFull
from slora_api.tenants.tenancy import ShareChanges, Tenancy, Tenant

__all__ = ["Pinning"]

_log = logging.getLogger(__name__)

_PAUSE_S = 1.0
# Of what is pinned, in a message.
_MOST_SHOWN = 5


class Pinning:
    """Lives on one event loop. `run` must be running for the engine to hear of anything."""

    def __init__(self, registry: Registry, tenancy: Tenancy, client: EngineClient) -> None:
        self._registry = registry
        self._tenancy = tenancy
        self._client = client
        self._is_stale = asyncio.Event()

    async def pin(self, tenant: str, name: str) -> Rollout:
        """`name` may be `name@alias`. Again changes nothing. Raises NotFound, BadAlias, PinsFull, and EngineUnavailable
        before the pool's size is known.
        """
        record = await asyncio.to_thread(self._pin, tenant, name)
        self.refresh()
        return record

    async def unpin(self, tenant: str, name: str) -> Rollout:
        """`name` may be `name@alias`. Again changes nothing. Raises NotFound, BadAlias."""
        record = await asyncio.to_thread(self._unpin, tenant, name)
        self.refresh()
        return record

    async def list(self) -> Sequence[Rollout]:
        """All that is pinned, by tenant, name and alias."""
        return await asyncio.to_thread(self._registry.pinned)

    async def change_share(self, tenant: str, changes: ShareChanges) -> Tenant:
        """Raises what `Tenancy.change_share` raises, and PinsFull if a lower max_pool_share would not hold what is
        pinned of the tenant; EngineUnavailable before the pool's size is known."""
        changed = await asyncio.to_thread(self._tenancy.change_share, tenant, changes, self._check_ceiling)
        self.refresh()
        return changed

    def refresh(self) -> None:
        """Something has changed, or there is another engine."""
        self._is_stale.set()

    async def run(self) -> None:
        """Tells the engine, until cancelled."""
        while True:
            await self._is_stale.wait()
            self._is_stale.clear()
            try:
                await self._client.set_pins(await asyncio.to_thread(self._read))
            except EngineUnavailable:
                pass  # the next one says hello
            except StoreUnavailable as error:
                _log.error("the engine can't be told what is pinned: %s; trying again", error)
                await asyncio.sleep(_PAUSE_S)
                self.refresh()

    def _pin(self, tenant: str, name: str) -> Rollout:
        self._tenancy.find_tenant(tenant)
        info = self._client.info

        def check(wanted: Rollout, others: Sequence[Rollout]) -> None:
            # Read inside the transaction: a share that is lowered meanwhile counts.
            _check_room(wanted, others, self._tenancy.find_tenant(tenant), info)

        try:
            return self._registry.pin(tenant, name, check)
        except AdapterNotFound:
            raise _no_adapter(tenant, name) from None

    def _unpin(self, tenant: str, name: str) -> Rollout:
        self._tenancy.find_tenant(tenant)
        try:
            return self._registry.unpin(tenant, name)
        except AdapterNotFound:
            raise _no_adapter(tenant, name) from None

    def _check_ceiling(self, before: TenantShare, tenant: Tenant) -> None:
        if tenant.share.max_share >= before.max_share:
            return
        pinned = [rollout for rollout in self._registry.pinned() if rollout.tenant == tenant.name]
        if not pinned:
            return
        info = self._client.info
        total, most = sum(_pages(pinned, info).values()), _most_own(tenant, info)
        if total > most:
            labels = ", ".join(f"`{rollout.label}`" for rollout in pinned[:_MOST_SHOWN])
            more = f" and {len(pinned) - _MOST_SHOWN} more" if len(pinned) > _MOST_SHOWN else ""
            raise PinsFull(
                f"The pins of tenant `{tenant.name}` ({labels}{more}) take {total} pages; with a max_pool_share of "
                f"{tenant.share.max_share:g} they may take {most} of the pool's {info.num_pages}. Unpin some first, or "
                "leave it higher."
            )

    def _read(self) -> Sequence[Pin]:
        shares = {tenant.name: tenant.share for tenant in self._tenancy.list_tenants()}
        versions = dict.fromkeys(
            record.version for rollout in self._registry.pinned() for record in rollout.records.values()
        )
        return [Pin(version, shares.get(version.tenant, DEFAULT_SHARE)) for version in versions]


def _check_room(wanted: Rollout, others: Iterable[Rollout], owner: Tenant, info: EngineInfo) -> None:
    """Raises PinsFull. Versions of one tenant with the same weights share their pages."""
    num_pages = _pages((*others, wanted), info)
    own = sum(count for version, count in num_pages.items() if version.tenant == owner.name)
    own_bound, remedy = "its max_pool_share", "raise max_pool_share"
    _check_sum(own, _most_own(owner, info), f"of tenant `{owner.name}`", own_bound, wanted, info, remedy)
    _check_sum(
        sum(num_pages.values()),
        info.num_pages // 2,
        "of all tenants",
        "half",
        wanted,
        info,
        "raise pool_bytes",
    )


def _most_own(owner: Tenant, info: EngineInfo) -> int:
    """Pages; rounded as the engine does."""
    return int(owner.share.max_share * info.num_pages + 1e-6)


def _check_sum(
    total: int, most: int, whose: str, bound: str, wanted: Rollout, info: EngineInfo, remedy: str
) -> None:
    if total > most:
        num_pages = sum(_pages((wanted,), info).values())
        raise PinsFull(
            f"With `{wanted.label}` ({num_pages} pages) the pins {whose} would take {total} pages; they may take "
            f"{most} of the pool's {info.num_pages} ({bound}). Unpin others, or {remedy}."
        )


def _pages(rollouts: Iterable[Rollout], info: EngineInfo) -> dict[AdapterVersion, int]:
    records = (record for rollout in rollouts for record in rollout.records.values())
    return {record.version: -(-record.details.pool_bytes // info.full_page_bytes) for record in records}


def _no_adapter(tenant: str, name: str) -> NotFound:
    return NotFound(f"The tenant `{tenant[:128]}` has no adapter `{name[:128]}`.")
