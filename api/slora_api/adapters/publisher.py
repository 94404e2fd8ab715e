"""Publishes an upload: inspect it, store its blob, try it out on the engine, and commit the version.

The route first stages the files in the quarantine. `Publisher.publish` does the other steps, in the order of the table.
The table shows what is durable after each step, and what a crash leaves behind. A step that fails cleans up at once.

| step      | durable afterwards        | a crash leaves                   | cleaned up by                       |
|-----------|---------------------------|----------------------------------|-------------------------------------|
| 1 stage   | nothing                   | files in the quarantine          | the next start                      |
| 2 inspect | nothing                   | files in the quarantine          | the next start                      |
| 3 store   | the blob, its reservation | a blob that no version refers to | `sweep`, after the reservation ends |
| 4 canary  | the blob, its reservation | a blob that no version refers to | `sweep`, after the reservation ends |
| 5 commit  | the blob, the version     | nothing                          |                                     |

The blob is stored before the canary, because the engine loads the adapter from the store like any other adapter. No
request can name the adapter before the commit.

Blocking calls run on asyncio's default threads. At most `_MAX_WRITERS` of these threads write to the store or create
versions for uploads, so that a slow store leaves threads for everything else. No thread waits for the canary.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import ParamSpec, TypeVar
from weakref import WeakValueDictionary

from starlette.types import Receive

from slora.client.client import EngineClient
from slora.core.errors import EngineUnavailable
from slora.text.generation_defaults import find_unsupported_fields
from slora_adapters.errors import AdapterInvalid, StoreUnavailable
from slora_adapters.peft.checked_adapter import CheckedAdapter
from slora_adapters.registry.blobs import RESERVATION_S
from slora_adapters.registry.catalog import Catalog
from slora_adapters.registry.record import StorageUsage, check_adapter_name
from slora_adapters.version import AdapterVersion
from slora_api.adapters.adapter_json import CertificateObject, PublishedObject, VersionObject, version_json
from slora_api.adapters.base_model import DEFAULT_MODEL, BaseModelInfo
from slora_api.adapters.canary import Canary
from slora_api.adapters.inspector import Inspector
from slora_api.adapters.pinning import Pinning
from slora_api.adapters.quarantine import Quarantine, StagedUpload
from slora_api.core.errors import BadRequest
from slora_api.core.threads import HOUSEKEEPING, tenant_thread
from slora_api.http.sse import unless_disconnected
from slora_api.sandbox.chat_templates import ChatTemplates
from slora_api.tenants.tenant_store import TenantStore

_log = logging.getLogger(__name__)

# Equal to the number of uploads that are inspected at once. asyncio has at least five default threads.
_MAX_WRITERS = 4

# Raises QuotaExceeded if a tenant, with this usage, may not have the adapter as a new version of the name.
CheckQuota = Callable[[str, StorageUsage, str, CheckedAdapter], None]

P = ParamSpec("P")
T = TypeVar("T")


class Publisher:
    """Publishes the uploads of all tenants. Runs on one event loop."""

    def __init__(
        self,
        base: BaseModelInfo,
        quarantine: Quarantine,
        inspector: Inspector,
        templates: ChatTemplates,
        check_quota: CheckQuota,
        tenant_store: TenantStore,
        adapters: Catalog,
        canary: Canary,
        client: EngineClient,
        pinning: Pinning,
    ) -> None:
        self._base = base
        self._quarantine = quarantine
        self._inspector = inspector
        self._templates = templates
        self._check_quota = check_quota
        self._tenant_store = tenant_store
        self._adapters = adapters
        self._canary = canary
        self._client = client
        self._pinning = pinning
        self._writers = asyncio.Semaphore(_MAX_WRITERS)
        # The lock of a tenant exists only while an upload of the tenant uses it.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def publish(
        self, tenant: str, upload: StagedUpload, receive: Receive | None = None
    ) -> PublishedObject:
        """Makes the upload the next version of its name, and returns the version with its certificate.

        receive: the ASGI channel of the client. If the client hangs up, the inspection is cancelled. After the
        inspection, the upload always runs to its end.

        If the newest version is the same adapter, that version is returned with `new_version` False. So a client that
        lost the answer can repeat the upload. Raises EngineUnavailable, BadRequest, AdapterInvalid with all reasons,
        InspectionFailed, QuotaExceeded, TenantSuspended, StoreUnavailable.
        """
        self._check_name(upload.name)
        if not self._client.ready:
            # Check this first, because no adapter can be tried out without an engine.
            raise EngineUnavailable(
                "the engine is starting and cannot try the adapter yet; upload it again shortly"
            )
        async with self._quarantine.folder(tenant) as scratch:
            inspection = self._inspector.inspect(tenant, upload.source, scratch)
            adapter = await (inspection if receive is None else unless_disconnected(receive, inspection))
            base = await self._base.identity.compare(upload.base_fingerprint, adapter.certificate.base_name)
            await self._check_extras(tenant, adapter)
            # Store one upload of a tenant at a time, so that one tenant never occupies all writers or runs several
            # canaries.
            async with self._locks.setdefault(tenant, asyncio.Lock()):
                version, is_new, effect = await self._store_and_commit(tenant, upload.name, adapter)
        certificate = adapter.certificate
        shown: CertificateObject = {
            "modules_adapted": certificate.adapted,
            "modules_total": certificate.base_modules,
            "modules": dict(certificate.modules),
            "pool_bytes": self._count_pool_bytes(adapter),
            "base": base,
            "logprob_change": effect,
            "uses": list(adapter.extras.uses),
            "predicted_load_ms": await self._predict_load_ms(adapter),
        }
        return {**version, "new_version": is_new, "certificate": shown}

    async def sweep(self) -> None:
        """Runs until cancelled. Each sweep deletes the blobs that crashed uploads left in the store. It runs on a
        thread, because it examines every blob.

        The first sweep runs at the start, the others every `RESERVATION_S`. Within that time, an upload has finished or
        its reservation has expired.
        """
        while True:
            try:
                await tenant_thread(HOUSEKEEPING, self._adapters.sweep)
            except StoreUnavailable as error:
                _log.error(
                    "unreferenced adapters could not be deleted from the store; the next sweep tries "
                    "again: %s",
                    error,
                )
            await asyncio.sleep(RESERVATION_S)

    def _check_name(self, name: str) -> None:
        if name in (DEFAULT_MODEL, self._base.name):
            raise BadRequest(f"`{name}` is a reserved name on this server; choose another name.", "name")
        check_adapter_name(name)

    async def _check_extras(self, tenant: str, adapter: CheckedAdapter) -> None:
        reasons = find_unsupported_fields(adapter.extras.generation_config, self._client.info.vocab_size)
        if adapter.extras.chat_template is not None:
            reasons += await self._templates.check(tenant, adapter.extras.chat_template)
        if reasons:
            raise AdapterInvalid(tuple(reasons))

    async def _store_and_commit(
        self, tenant: str, name: str, adapter: CheckedAdapter
    ) -> tuple[VersionObject, bool, float | None]:
        """Stores the blob, runs the canary and commits the version. Returns the version, whether it is new, and the
        change of log-probabilities that the canary found.

        The change is None if the newest version is the same adapter, which was tried out when it was uploaded.
        """
        registry = self._adapters.registry
        # Read the usage before anything is stored, because `_try_out` must know whether the tenant already had these
        # weights.
        version = AdapterVersion(tenant, adapter.digest)
        is_new, usage = await tenant_thread(tenant, registry.before_push, name, version, adapter.extras)

        def check(usage: StorageUsage) -> None:
            self._tenant_store.find_tenant(tenant).check_active()
            self._check_quota(tenant, usage, name, adapter)

        if is_new:
            # Check here to save work. The transaction that creates the version checks again.
            await tenant_thread(tenant, check, usage)
        reservation = await self._write(tenant, self._adapters.store_blob, adapter)
        try:
            effect = await self._try_out(tenant, adapter, usage) if is_new else None
            published = await self._write(
                tenant, self._adapters.commit, tenant, name, adapter, reservation, check
            )
        except BaseException:
            await self._write(tenant, self._adapters.discard, adapter, reservation)
            raise
        if published.moved_pin:
            self._pinning.refresh()
        return version_json(published.record, published.rollouts), published.is_new, effect

    async def _try_out(self, tenant: str, adapter: CheckedAdapter, usage: StorageUsage) -> float:
        """Runs the canary. The engine loads the adapter without regard to the tenant's share of the pool, so the engine
        drops the adapter afterwards. An adapter with weights that the tenant already had is kept.
        """
        version = AdapterVersion(tenant, adapter.digest)
        try:
            return await self._canary.try_out(version, adapter.embedded_tokens)
        finally:
            if usage.weights_bytes is None:
                with suppress(EngineUnavailable):
                    await self._client.remove_adapter(version)

    async def _predict_load_ms(self, adapter: CheckedAdapter) -> dict[str, float | None] | None:
        """Predicts load times from recent loads; see `LoadPaces.load_ms`. Returns None if the engine has just died."""
        try:
            paces = (await self._client.stats()).load_paces
        except EngineUnavailable:
            return None
        return paces.load_ms(
            self._count_pool_bytes(adapter), self._adapters.store.tiers, self._client.info.num_ranks
        )

    def _count_pool_bytes(self, adapter: CheckedAdapter) -> int:
        return self._client.info.count_rank_bytes(adapter.certificate.pool_bytes, adapter.target_modules)

    async def _write(self, tenant: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        async with self._writers:
            return await tenant_thread(tenant, call, *args, **kwargs)
