"""Pins adapters for the operator, checks the bounds of pins, and sends all pins to the engine.

The database holds the pins. The engine receives the complete list when it connects, and after each change of a pin, of
a pinned alias, or of a tenant's share. Only one task reads and sends the list, so an old list never replaces a newer
one.

A pin belongs to an alias; a bare name means its alias `latest`. All versions that the alias points at are pinned,
including both sides of a split. After a push, move or rollback, the pin applies to the new targets. A version that no
pinned alias points at can be evicted again. A single version cannot be pinned; create an alias for it.

All pins together may use at most half of the pool, and the pins of one tenant at most its max_pool_share. Both bounds
are checked when a pin is made. The tenant's bound is also checked when max_pool_share is lowered. Moving a pinned alias
to larger weights is not refused, but the engine enforces the bounds. The engine does not pin a version that would
exceed a bound, and loads this version on request like any other adapter. Pins of a suspended tenant are not sent.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence

from slora.client.client import EngineClient
from slora.core.engine_state import EngineInfo, Pin
from slora.core.errors import EngineUnavailable
from slora.core.request import TenantShare
from slora_adapters.errors import AdapterNotFound, StoreUnavailable
from slora_adapters.registry.record import AdapterDetails, Rollout
from slora_adapters.registry.registry import Registry
from slora_adapters.version import AdapterVersion
from slora_api.core.errors import NotFound, PinsFull
from slora_api.core.threads import control_thread
from slora_api.keys.key_record import TenantStatus
from slora_api.tenants.tenant_store import ShareChanges, Tenant, TenantStore

_log = logging.getLogger(__name__)

_PAUSE_S = 1.0
# The maximum number of pins that an error message names.
_MAX_SHOWN = 5


class Pinning:
    """Pins adapters, and sends the pins to the engine while `run` is running. Runs on one event loop."""

    def __init__(self, registry: Registry, tenant_store: TenantStore, client: EngineClient) -> None:
        self._registry = registry
        self._tenant_store = tenant_store
        self._client = client
        self._is_stale = asyncio.Event()

    async def pin(self, tenant: str, name: str) -> Rollout:
        """Pins `name` or `name@alias`; pinning it again is a no-op.

        Raises NotFound, BadAlias, PinsFull. Raises EngineUnavailable while the size of the page pool is not known.
        """
        record = await control_thread(self._pin, tenant, name)
        self.refresh()
        return record

    async def unpin(self, tenant: str, name: str) -> Rollout:
        """Unpins `name` or `name@alias`; unpinning it again is a no-op. Raises NotFound, BadAlias."""
        record = await control_thread(self._unpin, tenant, name)
        self.refresh()
        return record

    async def change_share(self, tenant: str, changes: ShareChanges) -> Tenant:
        """Changes a tenant's share. Raises the errors of `TenantStore.change_share`.

        Raises PinsFull if the tenant's pins exceed a lowered max_pool_share. Raises EngineUnavailable while the size of
        the page pool is not known.
        """
        changed = await control_thread(self._tenant_store.change_share, tenant, changes, self._check_ceiling)
        self.refresh()
        return changed

    def refresh(self) -> None:
        """Makes `run` send the pins again, because they have changed or a new engine has connected."""
        self._is_stale.set()

    async def run(self) -> None:
        """Sends the pins to the engine after each `refresh`, until cancelled."""
        while True:
            await self._is_stale.wait()
            self._is_stale.clear()
            try:
                await self._client.set_pins(await control_thread(self._read_pins))
            except EngineUnavailable:
                pass  # The pins are sent again when the next engine connects.
            except StoreUnavailable as error:
                _log.error(
                    "the pins cannot be read, so the engine does not have the current ones: %s; trying again",
                    error,
                )
                await asyncio.sleep(_PAUSE_S)
                self.refresh()
            except Exception:
                self.refresh()  # This task may be started again.
                raise

    def _pin(self, tenant: str, name: str) -> Rollout:
        owner = self._tenant_store.find_tenant(tenant)
        info = self._client.info

        def check(wanted: Rollout, others: Sequence[Rollout]) -> None:
            # The share is read inside the transaction, so that a concurrent reduction is taken into account.
            _check_room(wanted, others, self._tenant_store.find_tenant(tenant), info)

        try:
            return self._registry.pin(tenant, name, check)
        except AdapterNotFound:
            raise _no_adapter(owner, name) from None

    def _unpin(self, tenant: str, name: str) -> Rollout:
        owner = self._tenant_store.find_tenant(tenant)
        try:
            return self._registry.unpin(tenant, name)
        except AdapterNotFound:
            raise _no_adapter(owner, name) from None

    def _check_ceiling(self, before: TenantShare, tenant: Tenant) -> None:
        if tenant.share.max_share >= before.max_share:
            return
        pinned = [rollout for rollout in self._registry.pinned() if rollout.tenant == tenant.tenant_id]
        if not pinned:
            return
        info = self._client.info
        total, most = sum(_count_pages(pinned, info).values()), _max_own_pages(tenant, info)
        if total > most:
            labels = ", ".join(f"`{rollout.label}`" for rollout in pinned[:_MAX_SHOWN])
            more = f" and {len(pinned) - _MAX_SHOWN} more" if len(pinned) > _MAX_SHOWN else ""
            raise PinsFull(
                f"The pins of tenant `{tenant.name}` ({labels}{more}) take {total} pages; with a "
                f"max_pool_share of {tenant.share.max_share:g} they may take {most} of the pool's "
                f"{info.num_pages}. Unpin adapters first, or choose a higher max_pool_share."
            )

    def _read_pins(self) -> Sequence[Pin]:
        tenants = {tenant.tenant_id: tenant for tenant in self._tenant_store.list_tenants()}
        versions = dict.fromkeys(
            record.version for rollout in self._registry.pinned() for record in rollout.records.values()
        )
        owners = [(version, tenants.get(version.tenant)) for version in versions]
        return [
            Pin(version, owner.share)
            for version, owner in owners
            if owner is not None and owner.status is TenantStatus.ACTIVE
        ]


def _check_room(wanted: Rollout, others: Iterable[Rollout], owner: Tenant, info: EngineInfo) -> None:
    """Raises PinsFull if the pins would exceed a bound. A tenant's versions with the same weights share their pages."""
    num_pages = _count_pages((*others, wanted), info)
    own = sum(count for version, count in num_pages.items() if version.tenant == owner.tenant_id)
    own_bound, remedy = "its max_pool_share", "raise max_pool_share"
    _check_sum(own, _max_own_pages(owner, info), f"of tenant `{owner.name}`", own_bound, wanted, info, remedy)
    _check_sum(
        sum(num_pages.values()),
        info.num_pages // 2,
        "of all tenants",
        "half",
        wanted,
        info,
        "raise pool_bytes",
    )


def _max_own_pages(owner: Tenant, info: EngineInfo) -> int:
    """Returns the maximum number of pages that the tenant's pins may use. It is rounded in the same way as in the
    engine.
    """
    return int(owner.share.max_share * info.num_pages + 1e-6)


def _check_sum(
    total: int, most: int, owner_label: str, bound: str, wanted: Rollout, info: EngineInfo, remedy: str
) -> None:
    if total > most:
        num_pages = sum(_count_pages((wanted,), info).values())
        raise PinsFull(
            f"With `{wanted.label}` ({num_pages} pages) the pins {owner_label} would take {total} pages; they may take "
            f"{most} of the pool's {info.num_pages} ({bound}). Unpin others, or {remedy}."
        )


def _count_pages(rollouts: Iterable[Rollout], info: EngineInfo) -> dict[AdapterVersion, int]:
    records = (record for rollout in rollouts for record in rollout.records.values())
    return {record.version: _count_record_pages(record.details, info) for record in records}


def _count_record_pages(details: AdapterDetails, info: EngineInfo) -> int:
    return -(-info.count_rank_bytes(details.pool_bytes, details.target_modules) // info.full_page_bytes)


def _no_adapter(owner: Tenant, name: str) -> NotFound:
    return NotFound(f"The tenant `{owner.name}` has no adapter `{name[:128]}`.")
