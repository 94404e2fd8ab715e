"""The models of each tenant by name (the base model and the tenant's adapters), and how adapters are added and removed.

A request looks its model up in the registry once. A new version is therefore used by the next request, a deleted
version is refused, and a request that has started keeps its version. A name of another tenant gives the same error as a
name that does not exist. Lookups of some ten microseconds run on the event loop. Lookups over the network, and
everything that writes or reads weights, run on a thread.

This module knows no HTTP. Its dictionaries are the JSON of the API.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from slora.engine.client import EngineClient
from slora.errors import EngineUnavailable
from slora.text.generation_defaults import GenerationDefaults, read_generation_defaults, refuse_unhonoured
from slora_adapters.errors import (
    AdapterInUse,
    AdapterInvalid,
    AdapterNotFound,
    BadAdapterName,
    StoreUnavailable,
)
from slora_adapters.inspection.checked_adapter import CheckedAdapter
from slora_adapters.peft.adapter import AdapterExtras
from slora_adapters.registry.catalog import Catalog
from slora_adapters.registry.reference import check_adapter_name, parse_reference
from slora_adapters.registry.registry import RESERVATION_S, AdapterRecord, Holdings, Publication, Rollout
from slora_adapters.version import AdapterVersion
from slora_api.adapters.adapter_json import adapter_json, digest_text, version_json
from slora_api.adapters.base_identity import BaseIdentity
from slora_api.adapters.canary import Canary
from slora_api.adapters.inspector import Inspector
from slora_api.adapters.pinning import Pinning
from slora_api.errors import BadRequest, InUse, ModelNotFound
from slora_api.generation.chat_templates import ChatTemplates
from slora_api.generation.served_model import ServedModel
from slora_api.listing import DEFAULT_LIMIT, list_json
from slora_api.tenants.adapter_quota import AdapterQuota
from slora_api.tenants.tenancy import KeyRecord

__all__ = ["DEFAULT_MODEL", "BaseModel", "ModelCatalog"]

_log = logging.getLogger(__name__)

# A request with this model name uses the default adapter of its API key.
DEFAULT_MODEL = "default"
# Uploads that are tried out and published at once. Further uploads wait for a thread.
_MAX_PUBLISHING = 16

Json = dict[str, Any]
AwaitInspection = Callable[[Coroutine[Any, Any, CheckedAdapter]], Awaitable[CheckedAdapter]]


async def _await_always(inspection: Coroutine[Any, Any, CheckedAdapter]) -> CheckedAdapter:
    return await inspection


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The base model, which all tenants share. created_at: Unix time at which this server started."""

    name: str
    identity: BaseIdentity
    defaults: GenerationDefaults
    created_at: int


class ModelCatalog:
    """The models of all tenants. Each call sees only one tenant's."""

    def __init__(
        self,
        base: BaseModel,
        adapters: Catalog,
        templates: ChatTemplates,
        client: EngineClient,
        pinning: Pinning,
        inspector: Inspector,
        quota: AdapterQuota,
        canary: Canary,
    ) -> None:
        self._base = base
        self._adapters = adapters
        self._templates = templates
        self._client = client
        self._pinning = pinning
        self._inspector = inspector
        self._quota = quota
        self._canary = canary
        # Each of these threads waits for a canary. asyncio's default threads are shared and must not wait that long.
        self._publishers = ThreadPoolExecutor(_MAX_PUBLISHING, "publish")
        # One lock per tenant, so that its uploads are tried out one at a time. A lock exists only while an upload uses
        # it.
        self._publishing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def check_key_adapter(self, reference: str) -> None:
        """Checks the reference that a new API key has as its default adapter. The adapter need not exist yet.

        Raises BadRequest for a name that no adapter can have.
        """
        name, at, _ = reference.partition("@")
        if name == DEFAULT_MODEL or (name == self._base.name and at):
            raise BadRequest(
                f"`adapter` is `{reference[:257]}`, but no adapter can have that name here. Name an adapter "
                "of the tenant, or leave `adapter` out for the base model.",
                "adapter",
            )

    async def find_model(
        self, key: KeyRecord, name: str, user: str | None = None, *, is_doubtful: bool = False
    ) -> ServedModel:
        """Returns what `name` means for this API key.

        user: if an alias splits requests between versions, the same user always gets the same version. None chooses at
        random.
        is_doubtful: drop the cached entry first, because the store does not have the version that it gave.

        Raises ModelNotFound, and StoreUnavailable for a name that is not cached while the registry does not answer.
        """
        wanted = self._reference(key, name)
        if wanted is None:
            return ServedModel(name, None, None, None, self._base.defaults)
        registry = self._adapters.registry
        if is_doubtful:
            registry.doubt(key.tenant, wanted)
        if registry.is_near(key.tenant, wanted):
            record, extras = self._serve_version(key.tenant, wanted, user)
        else:
            record, extras = await asyncio.to_thread(self._serve_version, key.tenant, wanted, user)
        try:
            own = read_generation_defaults(extras.generation_config)
        except ValueError as error:
            # An earlier release with fewer checks accepted it.
            raise BadRequest(
                f"The generation_config.json of `{record.label}` is refused: {error}. Upload the adapter again without "
                "that value.",
                "model",
            ) from None
        return ServedModel(
            name, record.version, record.label, extras.chat_template, own.over(self._base.defaults)
        )

    def list_models(self, key: KeyRecord, limit: int | None = None, after: str | None = None) -> Json:
        """Lists the base model and the tenant's names and aliases in OpenAI's form. Single versions are not listed.

        limit: items per page; None lists all. after: the last model of the page before; BadRequest if it cannot be one.
        """
        models = [self._base_model()] if after is None else []
        behind = None if after in (None, self._base.name) else _name_and_alias(after)
        rollouts = self._adapters.registry.rollouts(
            key.tenant, limit=None if limit is None else limit + 1 - len(models), after=behind
        )
        models += [self._adapter_model(one.label, one.main) for one in rollouts]
        return list_json(models, "id", limit)

    def describe_model(self, key: KeyRecord, name: str) -> Json:
        """Describes a listed model or a single version. Raises ModelNotFound."""
        wanted = self._reference(key, name)
        if wanted is None:
            return self._base_model()
        rollout = self._find_rollout(key.tenant, wanted)
        if rollout is not None:
            return self._adapter_model(rollout.label, rollout.main)
        record = self._find_version(key.tenant, wanted)
        return self._adapter_model(record.label, record)

    def list_adapters(self, tenant: str, limit: int = DEFAULT_LIMIT, after: str | None = None) -> Json:
        """Lists a page of the tenant's names, sorted."""
        rollouts = self._adapters.registry.list(tenant, limit=limit + 1, after=after)
        return list_json([adapter_json(rollout) for rollout in rollouts], "name", limit)

    def describe_adapter(self, tenant: str, reference: str) -> Json:
        """Raises ModelNotFound."""
        rollout = self._find_rollout(tenant, reference)
        if rollout is not None:
            return adapter_json(rollout)
        return self._version_json(self._find_version(tenant, reference))

    def list_versions(
        self, tenant: str, name: str, limit: int = DEFAULT_LIMIT, after: int | None = None
    ) -> Json:
        """Lists a page of the versions of a name, newest first. Raises AdapterNotFound."""
        registry = self._adapters.registry
        rollouts = registry.aliases(tenant, name)
        records = registry.versions(tenant, name, limit=limit + 1, after=after)
        return list_json([version_json(record, rollouts) for record in records], "version", limit)

    async def publish(
        self,
        tenant: str,
        name: str,
        source: Path,
        base_fingerprint: str | None = None,
        await_inspection: AwaitInspection = _await_always,
    ) -> Json:
        """Inspects the adapter in `source`, tries it out, stores it durably, and makes it the next version of `name`.

        source: a PEFT directory or an archive of one.
        base_fingerprint: fingerprint of the base model that the adapter was trained on, if the client sent it.
        await_inspection: awaits the inspection and may cancel it. After the inspection, the upload always runs to its
        end.

        If the newest version is the same adapter, it is returned with `new_version` False. An upload whose answer was
        lost can therefore be sent again. Raises EngineUnavailable, BadRequest, AdapterInvalid with all reasons,
        InspectionFailed, QuotaExceeded, StoreUnavailable.
        """
        self._check_name(name)
        if not self._client.ready:
            # Checked before the work, too: without an engine no adapter can be tried out.
            raise EngineUnavailable(
                "the engine is starting, and no adapter is accepted untried; upload it again"
            )
        async with AsyncExitStack() as stack:
            inspection = stack.enter_async_context(self._inspector.inspect(tenant, source))
            adapter = await await_inspection(inspection)
            base = await self._base.identity.compare(base_fingerprint, adapter.certificate.base_name)
            await self._check_extras(tenant, adapter)
            async with self._publishing.setdefault(tenant, asyncio.Lock()):
                published, effect = await self._try_and_keep(tenant, name, adapter)
        if published.moved_pin:
            self._pinning.refresh()
        certificate = adapter.certificate.to_json() | {
            "base": base,
            "logprob_change": effect,
            "predicted_load_ms": await self._predict_load_ms(adapter),
        }
        return await asyncio.to_thread(self._version_json, published.record) | {
            "new_version": published.is_new,
            "certificate": certificate,
        }

    async def delete(self, tenant: str, reference: str, *, force: bool = False) -> None:
        """Deletes a version, or a name with all its versions. Raises ModelNotFound, BadAlias, InUse; see
        `Registry.delete`.

        Running requests that use a deleted version finish. After that its pages, prefixes and copies are freed.
        """
        try:
            removal = await asyncio.to_thread(self._adapters.withdraw, tenant, reference, force=force)
        except AdapterNotFound:
            raise ModelNotFound(reference) from None
        except AdapterInUse as error:
            raise InUse(reference, error.aliases) from None
        for version in removal.orphaned:
            with suppress(EngineUnavailable):  # a new engine starts without adapters
                await self._client.forget(version)
        if removal.moved_pin:
            self._pinning.refresh()

    async def prewarm(self, key: KeyRecord, reference: str) -> Json:
        """Starts to load all versions that the reference stands for, and returns where each of them is now.

        A version is copied into the page pool only if that needs no eviction. Raises ModelNotFound, EngineUnavailable.
        """
        records = await asyncio.to_thread(self._find_versions, key.tenant, reference)
        versions = [
            {
                "version": record.number,
                "digest": digest_text(record),
                "place": (await self._client.prewarm(record.version, key.share)).value,
            }
            for record in records
        ]
        return {"object": "adapter.prewarm", "name": reference, "versions": versions}

    async def sweep(self) -> None:
        """Deletes blobs that crashed uploads left in the store, until cancelled. It runs on a thread, because it looks
        at every blob.

        It runs at the start and then every `RESERVATION_S`. Within that time, an upload has finished or its reservation
        has expired.
        """
        while True:
            try:
                await asyncio.to_thread(self._adapters.sweep)
            except StoreUnavailable as error:
                _log.error("what nobody refers to stays in the store until the next time: %s", error)
            await asyncio.sleep(RESERVATION_S)

    async def _try_and_keep(
        self, tenant: str, name: str, adapter: CheckedAdapter
    ) -> tuple[Publication, float | None]:
        """Checks the tenant's quota, runs the canary, and publishes the adapter. Returns the publication and the change
        of log-probabilities that the canary found.

        If the newest version is the same adapter, the change is None: that version was tried out when it was uploaded.

        The trial loads the adapter without regard to the tenant's share of the pool. The engine therefore forgets the
        adapter afterwards, unless the tenant had these weights before.
        """
        loop = asyncio.get_running_loop()
        registry = self._adapters.registry

        def check(holdings: Holdings) -> None:
            self._quota.check(holdings, name, adapter)

        publish = partial(self._adapters.publish, tenant, name, adapter, check=check)
        version = AdapterVersion(tenant, adapter.digest)
        newest = await asyncio.to_thread(registry.newest, tenant, name)
        if newest is not None and newest.holds(version, adapter.extras):
            return await asyncio.to_thread(publish), None
        # Checked before the trial to save work, and again under the lock that creates the version.
        holdings = await asyncio.to_thread(registry.holdings, tenant, adapter.digest)
        check(holdings)
        effects: list[float] = []

        def try_out(version: AdapterVersion) -> None:
            trial = self._canary.try_out(version, adapter.embedded_tokens)
            effects.append(asyncio.run_coroutine_threadsafe(trial, loop).result())

        try:
            published = await loop.run_in_executor(self._publishers, publish, try_out)
        finally:
            if holdings.weights_bytes is None:
                with suppress(EngineUnavailable):
                    await self._client.forget(version)
        return published, effects[0]

    async def _predict_load_ms(self, adapter: CheckedAdapter) -> dict[str, float | None] | None:
        """Predicts load times from recent loads; see `LoadPaces.load_ms`. None if the engine has just died."""
        try:
            paces = (await self._client.stats()).load_paces
        except EngineUnavailable:
            return None
        return paces.load_ms(adapter.certificate.pool_bytes, self._adapters.store.tiers)

    def _reference(self, key: KeyRecord, name: str) -> str | None:
        """Returns the reference of the adapter that `name` means for this API key; None for the base model."""
        wanted = key.adapter if name == DEFAULT_MODEL else name
        return None if wanted == self._base.name else wanted

    def _find_version(self, tenant: str, reference: str) -> AdapterRecord:
        try:
            return self._adapters.registry.get(tenant, reference)
        except AdapterNotFound:
            raise ModelNotFound(reference) from None

    def _serve_version(
        self, tenant: str, reference: str, user: str | None
    ) -> tuple[AdapterRecord, AdapterExtras]:
        try:
            return self._adapters.registry.serve(tenant, reference, user)
        except AdapterNotFound:
            raise ModelNotFound(reference) from None

    def _find_versions(self, tenant: str, reference: str) -> list[AdapterRecord]:
        """Returns all versions that the reference stands for."""
        rollout = self._find_rollout(tenant, reference)
        return [self._find_version(tenant, reference)] if rollout is None else [*rollout.records.values()]

    def _find_rollout(self, tenant: str, reference: str) -> Rollout | None:
        """Returns None if the reference is not an existing name or alias."""
        try:
            return self._adapters.registry.rollout(tenant, reference)
        except AdapterNotFound:
            return None

    def _version_json(self, record: AdapterRecord) -> Json:
        return version_json(record, self._adapters.registry.aliases(record.version.tenant, record.name))

    def _check_name(self, name: str) -> None:
        if name in (DEFAULT_MODEL, self._base.name):
            raise BadRequest(f"`{name}` is the name of something else here; choose another.", "name")
        check_adapter_name(name)

    async def _check_extras(self, tenant: str, adapter: CheckedAdapter) -> None:
        reasons = refuse_unhonoured(adapter.extras.generation_config, self._client.info.vocab_size)
        if adapter.extras.chat_template is not None:
            reasons += await self._templates.check(tenant, adapter.extras.chat_template)
        if reasons:
            raise AdapterInvalid(tuple(reasons))

    def _base_model(self) -> Json:
        return self._model(self._base.name, "slora", self._base.created_at, self._base.name, None)

    def _adapter_model(self, name: str, record: AdapterRecord) -> Json:
        owner, root = record.version.tenant, digest_text(record)
        return self._model(name, owner, int(record.named_at), root, self._base.name)

    def _model(self, name: str, owner: str, created_at: int, root: str, parent: str | None) -> Json:
        return {
            "id": name,
            "object": "model",
            "created": created_at,
            "owned_by": owner,
            "root": root,
            "parent": parent,
            "permission": [],
            "max_model_len": self._max_model_len(),
        }

    def _max_model_len(self) -> int | None:
        """Returns None until an engine has connected for the first time."""
        try:
            return self._client.info.max_model_len
        except EngineUnavailable:
            return None


def _name_and_alias(model: str) -> tuple[str, str]:
    with suppress(BadAdapterName):
        wanted = parse_reference(model)
        if wanted.alias is not None:
            return wanted.name, wanted.alias
    raise BadRequest(
        f"`after` is {model[:257]!r}, which is no model of this list; send the `last_id` of the page before.",
        "after",
    )
