"""Finds, lists and deletes the models of each tenant: the base model and the tenant's adapters, and describes them as
the JSON of the API. `publisher.py` adds adapters to a tenant.

Each request looks its model up in the registry once. So a new version is used from the next request on, a deleted
version is refused, and a request that has started keeps its version. A name of another tenant gives the same error as a
name that does not exist. Lookups that take some ten microseconds run on the event loop. Lookups over the network,
writes, and all reads of weights run on threads.

This module does not depend on HTTP. Its dictionaries are the JSON of the API.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Literal, NamedTuple
from weakref import WeakKeyDictionary

from typing_extensions import TypedDict

from slora.client.client import EngineClient
from slora.core.engine_state import AdapterPlace
from slora.core.errors import EngineUnavailable
from slora.core.request import WeightedAdapter
from slora.text.generation_defaults import (
    Classifier,
    GenerationDefaults,
    read_classifier,
    read_generation_defaults,
)
from slora_adapters.errors import (
    AdapterInUse,
    AdapterNotFound,
    BadAdapterName,
    StoreUnavailable,
    find_nearest,
)
from slora_adapters.peft.adapter import AdapterExtras, ModuleSummary
from slora_adapters.peft.extras import AddedToken, read_added_rows, read_added_tokens
from slora_adapters.registry.record import LATEST, AdapterRecord, Rollout, Targets, parse_reference
from slora_adapters.registry.registry import StoredAdapters
from slora_api.adapters.base_model import DEFAULT_MODEL, BaseMatch, BaseModelInfo
from slora_api.adapters.pinning import Pinning
from slora_api.adapters.served_model import AdapterWeight, ServedModel, add_up_models
from slora_api.core.errors import BadRequest, InUse, ModelNotFound
from slora_api.core.listing import DEFAULT_LIMIT, PageObject, list_json
from slora_api.core.threads import tenant_thread
from slora_api.keys.key_record import MAX_MODELS, AllowList, KeyRecord


class AdapterObject(TypedDict):
    """A name or an alias, with the version that it serves.

    bytes: size of the weights. stored_bytes: size of the adapter's files, chat template and generation config. The
    tenant's quota counts the files of versions with the same weights once.
    created: when the name was made. updated: when the version was made. Both are Unix times in seconds.
    """

    object: Literal["adapter"]
    name: str
    version: int
    digest: str
    rank: int
    target_modules: list[str]
    bytes: int
    stored_bytes: int
    chat_template: bool
    generation_config: bool
    pinned: bool
    created: int
    updated: int


class VersionObject(AdapterObject):
    """A version. aliases: alias -> percentage of the alias's requests that this version gets."""

    aliases: dict[str, int]


class AliasObject(TypedDict):
    """An alias. versions: version number -> percentage of the requests."""

    object: Literal["adapter.alias"]
    name: str
    alias: str
    versions: dict[str, int]
    follows_pushes: bool
    pinned: bool
    updated: int


class CertificateObject(TypedDict):
    """The results of the checks of an upload.

    modules: the adapted modules, by module name.
    pool_bytes: size in the page pool; with tensor parallelism, in the pool of each rank.
    logprob_change: greatest change of a log-probability that the canary found; null if the version already existed,
    because the canary did not run again.
    uses: the files, special tokens, magnitudes and biases that are served beside A and B, and, after the word `not`,
    those that are not.
    predicted_load_ms: the predicted load time from each tier; null for a tier from which no adapter was loaded yet.
    """

    modules_adapted: int
    modules_total: int
    modules: dict[str, ModuleSummary]
    pool_bytes: int
    base: BaseMatch
    logprob_change: float | None
    uses: list[str]
    predicted_load_ms: dict[str, float | None] | None


class PublishedObject(VersionObject):
    """The version that an upload has made. new_version: false if the newest version of the name already was the
    uploaded adapter. source: the repository and commit, for an adapter that the server downloaded from the hub.
    """

    new_version: bool
    source: str | None
    certificate: CertificateObject


def adapter_json(rollout: Rollout) -> AdapterObject:
    """Returns the JSON of a name or an alias. For an alias that splits requests, the JSON shows the version with the
    largest percentage.
    """
    return _fields(rollout.main, rollout.label, pinned=rollout.pinned)


def version_json(record: AdapterRecord, rollouts: Iterable[Rollout]) -> VersionObject:
    """Returns the JSON of a version, with the aliases that point at it. For each alias, the JSON has the percentage of
    the alias's requests that this version gets.
    """
    using = [one for one in rollouts if record.number in one.targets]
    fields = _fields(record, record.name, pinned=any(one.pinned for one in using))
    return {**fields, "aliases": {one.alias: one.targets[record.number] for one in using}}


def alias_json(rollout: Rollout) -> AliasObject:
    return {
        "object": "adapter.alias",
        "name": rollout.main.name,
        "alias": rollout.alias,
        "versions": {str(number): rollout.targets[number] for number in sorted(rollout.targets)},
        "follows_pushes": rollout.follows_pushes,
        "pinned": rollout.pinned,
        "updated": int(rollout.updated_at),
    }


def _fields(record: AdapterRecord, name: str, *, pinned: bool) -> AdapterObject:
    details = record.details
    return {
        "object": "adapter",
        "name": name,
        "version": record.number,
        "digest": record.version.digest,
        "rank": details.rank,
        "target_modules": list(details.target_modules),
        "bytes": details.num_bytes,
        "stored_bytes": details.stored_bytes + record.extras.num_bytes,
        "chat_template": record.extras.template_bytes is not None,
        "generation_config": record.extras.defaults_bytes is not None,
        "pinned": pinned,
        "created": int(record.named_at),
        "updated": int(record.created_at),
    }


# A suggestion for an unknown model compares up to twice this many names, which takes about 10 ms.
_MAX_COMPARED = 256
_MAX_REFERENCE_CHARS = 128
# The number of threads that find suggestions at the same time.
_MAX_SUGGESTING = 2


class ModelObject(TypedDict):
    """The base model, or a tenant's adapter as a model.

    root: digest of the adapter; for the base model, its repository and commit on the hub, or its name.
    parent: the base model of an adapter.
    max_model_len: null until the engine has started for the first time.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    permission: list[str]
    max_model_len: int | None


class VersionPlace(TypedDict):
    """Where a version is now. `pool` means that a request can run at once."""

    version: int
    digest: str
    place: AdapterPlace


class PrewarmObject(TypedDict):
    object: Literal["adapter.prewarm"]
    name: str
    versions: list[VersionPlace]


class _GenerationConfig(NamedTuple):
    """What the generation config of an adapter says."""

    defaults: GenerationDefaults
    classifier: Classifier | None
    added_tokens: tuple[AddedToken, ...]
    num_added_rows: int

    @staticmethod
    def read(text: str | None) -> "_GenerationConfig":
        """Raises ValueError; see `read_generation_defaults`."""
        return _GenerationConfig(
            read_generation_defaults(text),
            read_classifier(text),
            read_added_tokens(text),
            read_added_rows(text),
        )


class ModelCatalog:
    """The models of all tenants. Each call sees only the models of one tenant."""

    def __init__(
        self, base: BaseModelInfo, adapters: StoredAdapters, client: EngineClient, pinning: Pinning
    ) -> None:
        self._base = base
        self._adapters = adapters
        self._client = client
        self._pinning = pinning
        self._num_suggesting = 0
        # A config with many added tokens takes milliseconds to read. What it says is kept as long as the registry
        # keeps the text.
        self._generation: WeakKeyDictionary[AdapterExtras, _GenerationConfig] = WeakKeyDictionary()

    def check_key_adapter(self, reference: str) -> None:
        """Checks a reference to the default adapter of a new API key. The adapter need not exist yet.

        Raises BadRequest for a reserved name.
        """
        name, at, _ = reference.partition("@")
        if name == DEFAULT_MODEL or (name == self._base.name and at):
            raise BadRequest(
                f"`adapter` is `{reference[:257]}`, a reserved name. Name an adapter of the tenant, "
                "or omit `adapter` to use the base model.",
                "adapter",
            )

    def read_allow_list(self, tenant: str, models: Sequence[str], adapter: str | None) -> AllowList:
        """Returns the allow-list of a new API key. Raises a BadRequest that names the field.

        adapter: the key's default adapter, which the list must permit. Without a default adapter, the model name
            `default` selects the base model, which the list need not permit.
        """
        if not 1 <= len(models) <= MAX_MODELS:
            raise BadRequest(
                f"`models` has {len(models)} entries; an allow-list has 1 to {MAX_MODELS}. Omit `models` to permit all "
                "models of the tenant.",
                "models",
            )
        for model in models:
            if model != self._base.name and self._find_rollout(tenant, model) is None:
                raise BadRequest(
                    f"`models` contains {model[:257]!r}, which is neither the base model nor an adapter or alias of "
                    f"the tenant. Name an adapter as `name` or `name@alias`.",
                    "models",
                )
        allowed = AllowList(frozenset(models))
        if adapter is not None and not allowed.permits(adapter):
            raise BadRequest(
                f"`adapter` is `{adapter[:257]}`, which `models` does not permit; add it to `models`, or name another "
                "default adapter.",
                "adapter",
            )
        return allowed

    async def find_model(
        self, key: KeyRecord, name: str, user: str | None = None, *, is_stale: bool = False
    ) -> ServedModel:
        """Returns the model that `name` stands for with this API key.

        user: if an alias splits requests between versions, the same user always gets the same version. Without a user,
        the version is chosen at random.
        is_stale: whether to drop the cached entry first, because the store lacks the version that the entry names.

        Raises ModelNotFound. Raises StoreUnavailable if the name is not cached and the registry does not answer.
        """
        try:
            return await self._find_model(key, name, user, is_stale=is_stale)
        except ModelNotFound:
            near = await self._suggest(key, name)
            if near in (None, name):
                raise
            raise ModelNotFound(name, near) from None

    async def _find_model(
        self, key: KeyRecord, name: str, user: str | None, *, is_stale: bool
    ) -> ServedModel:
        wanted = self._reference(key, name)
        if wanted is None:
            return ServedModel(name, (), (), frozenset([None]), self._base.defaults)
        registry = self._adapters.registry
        if is_stale:
            registry.drop_cached(key.tenant, wanted)
        if registry.is_lookup_local(key.tenant, wanted):
            record, extras = self._serve_version(key.tenant, wanted, user)
        else:
            record, extras = await tenant_thread(key.tenant, self._serve_version, key.tenant, wanted, user)
        generation = self._generation.get(extras)
        try:
            if generation is None:
                generation = await tenant_thread(key.tenant, _GenerationConfig.read, extras.generation_config)
                self._generation[extras] = generation
        except ValueError as error:
            # An earlier release with fewer checks accepted this generation config.
            raise BadRequest(
                f"The generation_config.json of `{record.label}` is refused: {error}. Upload the adapter again without "
                "that value.",
                "model",
            ) from None
        return ServedModel(
            name,
            (WeightedAdapter(record.version),),
            (record.label,),
            frozenset([extras.chat_template]),
            generation.defaults.override(self._base.defaults),
            generation.classifier,
            frozenset([generation.added_tokens]),
            generation.num_added_rows,
        )

    async def find_answering_model(
        self,
        key: KeyRecord,
        model: str,
        adapters: Sequence[AdapterWeight] | None,
        user: str | None,
        *,
        is_stale: bool = False,
    ) -> ServedModel:
        """Returns the model that `model` and `adapters` of a request stand for together. See `find_model`.

        With small weights, a sum is almost the base model. So the key must be allowed to use the base model and each of
        the adapters.
        """
        if not adapters:
            return await self.find_model(key, model, user, is_stale=is_stale)
        if model not in (self._base.name, DEFAULT_MODEL):
            raise BadRequest(
                f"`model` is {model[:257]!r}, but with `adapters`, `model` must be the base model. Send "
                f"`{DEFAULT_MODEL}` or `{self._base.name}` as `model`, and name every adapter in `adapters`.",
                "model",
            )
        key.check_model(self._base.name)
        for index, entry in enumerate(adapters):
            if entry.name in (self._base.name, DEFAULT_MODEL):
                raise BadRequest(
                    f"`adapters.{index}.name` is `{entry.name}`, which is not an adapter's name. Every sum includes "
                    "the base model.",
                    f"adapters.{index}.name",
                )
        parts = [await self.find_model(key, entry.name, user, is_stale=is_stale) for entry in adapters]
        weights = [entry.weight for entry in adapters]
        return add_up_models(model, parts, weights, self._base.defaults)

    def list_models(
        self, key: KeyRecord, limit: int | None = None, after: str | None = None, before: str | None = None
    ) -> PageObject[ModelObject]:
        """Lists the base model and the tenant's names and aliases in OpenAI's form. Single versions are not listed.

        limit: items per page; None lists all. after: the last model of the previous page. before: the first model of
        the page that follows. Raises BadRequest if no model can have that name.
        """
        if before is not None:
            return self._list_before(key, limit, before)
        has_base = after is None and (key.models is None or key.models.permits(self._base.name))
        models = [self._base_model()] if has_base else []
        behind = None if after in (None, self._base.name) else _name_and_alias(after, "after")
        most = None if limit is None else limit + 1 - len(models)
        registry = self._adapters.registry
        if key.models is None:
            rollouts = registry.rollouts(key.tenant, limit=most, after=behind)
        else:
            rollouts = [
                rollout
                for name in key.models.names()
                for rollout in registry.aliases(key.tenant, name)
                if key.models.permits(rollout.label) and (behind is None or (name, rollout.alias) > behind)
            ][:most]
        models += [self._adapter_model(key, one.label, one.main) for one in rollouts]
        return list_json(models, "id", limit)

    def _list_before(self, key: KeyRecord, limit: int | None, before: str) -> PageObject[ModelObject]:
        """Lists the last models that precede `before`. `has_more` tells of models that precede this page."""
        models = self.list_models(key)["data"]
        if before == self._base.name:
            models = []
        else:
            end = _name_and_alias(before, "before_id")
            models = [
                model
                for model in models
                if model["id"] == self._base.name or _name_and_alias(model["id"], "before_id") < end
            ]
        page = list_json(models[-limit:] if limit else models, "id")
        return {**page, "has_more": len(page["data"]) < len(models)}

    def describe_model(self, key: KeyRecord, name: str) -> ModelObject:
        """Describes a listed model or a single version. Raises ModelNotFound."""
        try:
            return self._describe_model(key, name)
        except ModelNotFound:
            raise ModelNotFound(name, self._find_near(key, name[:_MAX_REFERENCE_CHARS].lower())) from None

    def _describe_model(self, key: KeyRecord, name: str) -> ModelObject:
        wanted = self._reference(key, name)
        if wanted is None:
            return self._base_model()
        rollout = self._find_rollout(key.tenant, wanted)
        if rollout is not None:
            return self._adapter_model(key, rollout.label, rollout.main)
        record = self._find_version(key.tenant, wanted)
        return self._adapter_model(key, record.label, record)

    def list_adapters(
        self, key: KeyRecord, limit: int = DEFAULT_LIMIT, after: str | None = None
    ) -> PageObject[AdapterObject]:
        """Lists a page of the adapters that the key may use, sorted by name."""
        if key.models is None:
            return self.list_tenant_adapters(key.tenant, limit, after)
        names = [name for name in key.models.names() if key.models.permits(name) and name > (after or "")]
        found = (self._find_rollout(key.tenant, name) for name in names)
        rollouts = [rollout for rollout in found if rollout is not None][: limit + 1]
        return list_json([adapter_json(rollout) for rollout in rollouts], "name", limit)

    def list_tenant_adapters(
        self, tenant: str, limit: int = DEFAULT_LIMIT, after: str | None = None
    ) -> PageObject[AdapterObject]:
        """Lists a page of the tenant's adapters, sorted by name."""
        rollouts = self._adapters.registry.list(tenant, limit=limit + 1, after=after)
        return list_json([adapter_json(rollout) for rollout in rollouts], "name", limit)

    def describe_adapter(self, tenant: str, reference: str) -> AdapterObject | VersionObject:
        """Describes a name, an alias or a version. Raises ModelNotFound."""
        rollout = self._find_rollout(tenant, reference)
        if rollout is not None:
            return adapter_json(rollout)
        return self._version_json(self._find_version(tenant, reference))

    def list_versions(
        self, tenant: str, name: str, limit: int = DEFAULT_LIMIT, after: int | None = None
    ) -> PageObject[VersionObject]:
        """Lists a page of the versions of a name, newest first. Raises AdapterNotFound."""
        registry = self._adapters.registry
        rollouts = registry.aliases(tenant, name)
        records = registry.versions(tenant, name, limit=limit + 1, after=after)
        return list_json([version_json(record, rollouts) for record in records], "version", limit)

    async def has_adapter(self, tenant: str, name: str) -> bool:
        return await tenant_thread(tenant, self._find_rollout, tenant, name) is not None

    async def delete(self, tenant: str, reference: str, *, force: bool = False) -> None:
        """Deletes a version, or a name with all its versions. Raises ModelNotFound, BadAlias, InUse; see
        `Registry.delete`.

        Running requests that use a deleted version finish first. Then the version's pages, prefixes and copies are
        freed.
        """
        try:
            removal = await tenant_thread(tenant, self._adapters.withdraw, tenant, reference, force=force)
        except AdapterNotFound:
            raise ModelNotFound(reference) from None
        except AdapterInUse as error:
            raise InUse(reference, error.aliases) from None
        for version in removal.orphaned:
            with suppress(EngineUnavailable):  # A new engine starts without adapters, so it needs no removal.
                await self._client.remove_adapter(version)
        if removal.moved_pin:
            self._pinning.refresh()

    def list_aliases(self, tenant: str, name: str) -> list[AliasObject]:
        """Lists the aliases of a name. Raises AdapterNotFound, like all methods for aliases."""
        registry = self._adapters.registry
        registry.rollout(tenant, f"{name}@{LATEST}")  # Raises AdapterNotFound for an unknown name.
        return [alias_json(rollout) for rollout in registry.aliases(tenant, name)]

    def describe_alias(self, tenant: str, name: str, alias: str) -> AliasObject:
        return alias_json(self._adapters.registry.rollout(tenant, f"{name}@{alias}"))

    async def move_alias(
        self,
        tenant: str,
        name: str,
        alias: str,
        targets: Targets,
        *,
        expected: Targets | None,
        follows_pushes: bool,
    ) -> AliasObject:
        """Moves or creates an alias, in one transaction. So a request is served either by the old targets or by the new
        ones. Raises the errors of `Registry.move`.
        """
        move = partial(self._adapters.registry.move, expected=expected, follows_pushes=follows_pushes)
        return self._moved(await tenant_thread(tenant, move, tenant, name, alias, targets))

    async def roll_back_alias(self, tenant: str, name: str, alias: str) -> AliasObject:
        """Moves the alias back to its previous targets. Raises AliasConflict if it has none."""
        return self._moved(
            await tenant_thread(tenant, self._adapters.registry.roll_back, tenant, name, alias)
        )

    async def delete_alias(self, tenant: str, name: str, alias: str) -> None:
        """Deletes the alias. Raises BadAlias for `latest`."""
        self._moved(await tenant_thread(tenant, self._adapters.registry.delete_alias, tenant, name, alias))

    def _moved(self, rollout: Rollout) -> AliasObject:
        """A pin moves with its alias."""
        if rollout.pinned:
            self._pinning.refresh()
        return alias_json(rollout)

    async def prewarm(self, key: KeyRecord, reference: str) -> PrewarmObject:
        """Starts to load all versions that the reference stands for, and returns where each version is now.

        A version is copied into the page pool only if the copy needs no eviction. Raises ModelNotFound,
        EngineUnavailable.
        """
        key.check_model(reference)
        records = await tenant_thread(key.tenant, self._find_versions, key.tenant, reference)
        versions: list[VersionPlace] = [
            {
                "version": record.number,
                "digest": record.version.digest,
                "place": await self._client.prewarm(record.version, key.share),
            }
            for record in records
        ]
        return {"object": "adapter.prewarm", "name": reference, "versions": versions}

    def _reference(self, key: KeyRecord, name: str) -> str | None:
        """Returns the reference of the adapter that `name` stands for with this API key; None for the base model.
        Raises ModelNotFound if the key may not use it.
        """
        wanted = (key.adapter or self._base.name) if name == DEFAULT_MODEL else name
        key.check_model(wanted)
        return None if wanted == self._base.name else wanted

    async def _suggest(self, key: KeyRecord, name: str) -> str | None:
        """Returns an existing model with a similar name that the key may use. While many requests name unknown models,
        most of them get no suggestion.
        """
        if self._num_suggesting >= _MAX_SUGGESTING:
            return None
        self._num_suggesting += 1
        try:
            return await tenant_thread(key.tenant, self._find_near, key, name[:_MAX_REFERENCE_CHARS].lower())
        except StoreUnavailable:
            return None
        finally:
            self._num_suggesting -= 1

    def _find_near(self, key: KeyRecord, name: str) -> str | None:
        registry, own = self._adapters.registry, name.partition("@")[0]
        if key.models is not None:
            rollouts = [
                rollout for known in key.models.names() for rollout in registry.aliases(key.tenant, known)
            ]
        else:
            rollouts = [*registry.list(key.tenant, limit=_MAX_COMPARED), *registry.aliases(key.tenant, own)]
            if len(rollouts) >= _MAX_COMPARED:
                rollouts += registry.list(key.tenant, limit=_MAX_COMPARED, after=own[:1])
        known = [self._base.name, *(rollout.label for rollout in rollouts)]
        usable = [one for one in known if key.models is None or key.models.permits(one)]
        return find_nearest(name, usable)

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
        """Returns the rollout of an existing name or alias; None for any other reference."""
        try:
            return self._adapters.registry.rollout(tenant, reference)
        except AdapterNotFound:
            return None

    def _version_json(self, record: AdapterRecord) -> VersionObject:
        return version_json(record, self._adapters.registry.aliases(record.version.tenant, record.name))

    def _base_model(self) -> ModelObject:
        return self._model(self._base.name, "slora", self._base.created_at, self._base.root, None)

    def _adapter_model(self, key: KeyRecord, name: str, record: AdapterRecord) -> ModelObject:
        return self._model(
            name, key.tenant_name, int(record.named_at), record.version.digest, self._base.name
        )

    def _model(self, name: str, owner: str, created_at: int, root: str, parent: str | None) -> ModelObject:
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
        """Returns the engine's max_model_len; None until an engine has connected for the first time."""
        try:
            return self._client.info.max_model_len
        except EngineUnavailable:
            return None


def _name_and_alias(model: str, field: str) -> tuple[str, str]:
    with suppress(BadAdapterName):
        wanted = parse_reference(model)
        if wanted.alias is not None:
            return wanted.name, wanted.alias
    raise BadRequest(
        f"`{field}` is {model[:257]!r}, which is not a model of this list; send an id of another page.",
        field,
    )
