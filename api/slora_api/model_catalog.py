"""What each tenant may call: the base model and its own adapters, by name; and how adapters come and go.

Names are looked up in the registry at each request, so a new adapter answers in the next one, and one that is gone
does not. A name of another tenant is not found, in the same words as a name that nobody has. Lookups take some ten
microseconds and run on the event loop; whatever writes or reads weights runs on a thread.

Knows no HTTP; its dictionaries are the API's JSON.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slora.engine_client import EngineClient
from slora.errors import EngineUnavailable
from slora.generation_defaults import GenerationDefaults, read_generation_defaults, refuse_unhonoured
from slora_adapters.adapter import Adapter
from slora_adapters.catalog import Catalog
from slora_adapters.errors import AdapterInvalid, AdapterNotFound
from slora_adapters.limits import AdapterLimits
from slora_adapters.peft_directory import read_adapter
from slora_adapters.registry import AdapterRecord, Change, check_adapter_name
from slora_api.chat_templates import ChatTemplates
from slora_api.errors import BadRequest, Conflict, ModelNotFound
from slora_api.pinning import Pinning
from slora_api.served_model import ServedModel
from slora_api.tenancy import KeyRecord
from slora_kernels.layout import ModelShape, lay_out_adapter

__all__ = ["DEFAULT_MODEL", "BaseModel", "ModelCatalog", "adapter_json"]

# The name that stands for the key's own adapter.
DEFAULT_MODEL = "default"

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The one model that is shared. created_at: seconds since 1970, when this server started."""

    name: str
    shape: ModelShape
    limits: AdapterLimits
    defaults: GenerationDefaults
    created_at: int


class ModelCatalog:
    """The models of all tenants, each tenant's for itself."""

    def __init__(
        self,
        base: BaseModel,
        adapters: Catalog,
        templates: ChatTemplates,
        client: EngineClient,
        pinning: Pinning,
    ) -> None:
        self._base = base
        self._adapters = adapters
        self._templates = templates
        self._client = client
        self._pinning = pinning

    def find_model(self, key: KeyRecord, name: str) -> ServedModel:
        """What `name` means for this key. Raises ModelNotFound."""
        record = self._resolve(key, name)
        if record is None:
            return ServedModel(name, None, None, self._base.defaults)
        extras = record.details.extras
        own = read_generation_defaults(extras.generation_config)
        return ServedModel(name, record.version, extras.chat_template, own.over(self._base.defaults))

    def list_models(self, key: KeyRecord) -> list[Json]:
        """The base model and the tenant's adapters, in OpenAI's form."""
        own = [self._adapter_model(record) for record in self._adapters.registry.list(key.tenant)]
        return [self._base_model(), *own]

    def describe_model(self, key: KeyRecord, name: str) -> Json:
        """One of them. Raises ModelNotFound."""
        record = self._resolve(key, name)
        return self._base_model() if record is None else self._adapter_model(record)

    def list_adapters(self, tenant: str) -> list[Json]:
        return [adapter_json(record) for record in self._adapters.registry.list(tenant)]

    def describe_adapter(self, tenant: str, name: str) -> Json:
        """Raises ModelNotFound."""
        return adapter_json(self._find_adapter(tenant, name))

    async def publish(self, tenant: str, name: str, directory: Path, *, replace: bool = False) -> Json:
        """Validates the PEFT adapter in `directory`, stores it durably, and points the name at it.

        The same adapter under the same name again changes nothing and succeeds, so that a lost answer can be asked
        for again. Raises BadRequest, AdapterInvalid with all reasons, Conflict, StoreUnavailable.
        """
        self._check_name(name)
        adapter = await asyncio.to_thread(read_adapter, directory, self._base.shape, self._base.limits)
        await self._check_extras(adapter)
        if not replace:
            self._check_not_taken(tenant, name, adapter)
        packed_bytes = lay_out_adapter(self._base.shape, adapter.ranks(self._base.shape)).num_bytes
        change = await asyncio.to_thread(
            self._adapters.publish, tenant, name, adapter, directory, packed_bytes
        )
        await self._tell(change)
        return adapter_json(change.record)

    async def delete(self, tenant: str, name: str) -> None:
        """Raises ModelNotFound."""
        try:
            change = await asyncio.to_thread(self._adapters.withdraw, tenant, name)
        except AdapterNotFound:
            raise ModelNotFound(name) from None
        await self._tell(change)

    async def _tell(self, change: Change) -> None:
        """The name has moved already; an engine that just died has nothing to forget."""
        if change.orphaned is not None:
            with suppress(EngineUnavailable):
                await self._client.forget(change.orphaned)
        if change.record.pinned:
            self._pinning.refresh()

    def _resolve(self, key: KeyRecord, name: str) -> AdapterRecord | None:
        """The adapter that `name` means for this key; None for the base model. Raises ModelNotFound."""
        wanted = key.adapter if name == DEFAULT_MODEL else name
        if wanted is None or wanted == self._base.name:
            return None
        return self._find_adapter(key.tenant, wanted)

    def _find_adapter(self, tenant: str, name: str) -> AdapterRecord:
        try:
            return self._adapters.registry.get(tenant, name)
        except AdapterNotFound:
            raise ModelNotFound(name) from None

    def _check_name(self, name: str) -> None:
        if name in (DEFAULT_MODEL, self._base.name):
            raise BadRequest(f"`{name}` is the name of something else here; choose another.", "name")
        check_adapter_name(name)

    def _check_not_taken(self, tenant: str, name: str, adapter: Adapter) -> None:
        try:
            found = self._adapters.registry.get(tenant, name)
        except AdapterNotFound:
            return
        if (found.version.digest, found.details.extras) != (adapter.digest, adapter.extras):
            raise Conflict(
                f"You have another adapter named `{name}`. Delete it first, or send replace=true to put this one in "
                "its place."
            )

    async def _check_extras(self, adapter: Adapter) -> None:
        reasons = refuse_unhonoured(adapter.extras.generation_config)
        if adapter.extras.chat_template is not None:
            reasons += await self._templates.check(adapter.extras.chat_template)
        if reasons:
            raise AdapterInvalid(tuple(reasons))

    def _base_model(self) -> Json:
        return self._model(self._base.name, "slora", self._base.created_at, self._base.name, None)

    def _adapter_model(self, record: AdapterRecord) -> Json:
        owner, root = record.version.tenant, _digest_text(record)
        return self._model(record.name, owner, int(record.created_at), root, self._base.name)

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
        """Known once there has been an engine."""
        try:
            return self._client.info.max_model_len
        except EngineUnavailable:
            return None


def _digest_text(record: AdapterRecord) -> str:
    return f"sha256:{record.version.digest}"


def adapter_json(record: AdapterRecord) -> Json:
    """An adapter as /v1/adapters shows it."""
    details = record.details
    return {
        "object": "adapter",
        "name": record.name,
        "digest": _digest_text(record),
        "rank": details.rank,
        "target_modules": list(details.target_modules),
        "bytes": details.num_bytes,
        "chat_template": details.extras.chat_template is not None,
        "generation_config": details.extras.generation_config is not None,
        "pinned": record.pinned,
        "created": int(record.created_at),
        "updated": int(record.updated_at),
    }
