"""/v1/adapters: upload, list, prewarm and delete a tenant's adapters, and move and roll back their aliases.

A reference is `name`, `name@3` for a version or `name@prod` for an alias, as in the field `model` of a request.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, status
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, BeforeValidator, Field
from typing_extensions import TypedDict

from slora.core.errors import EngineUnavailable
from slora_adapters.errors import AdapterInvalid, AdapterNotFound, AliasConflict, DiskFull
from slora_api.adapters.model_catalog import (
    AdapterObject,
    AliasObject,
    ModelCatalog,
    PrewarmObject,
    PublishedObject,
    VersionObject,
)
from slora_api.adapters.publisher import Publisher
from slora_api.adapters.quarantine import HubAdapters, LocalAdapters, StagedUpload, Uploads
from slora_api.core.errors import (
    BadRequest,
    Forbidden,
    HubUnavailable,
    InspectionFailed,
    InUse,
    ModelNotFound,
    NotFound,
    QuotaExceeded,
    ServerBusy,
    TenantBusy,
)
from slora_api.core.listing import DEFAULT_LIMIT, ListObject, PageObject
from slora_api.core.threads import control_thread
from slora_api.http.field_types import STRICT, Limit, Name, Text, make_refusal
from slora_api.http.multipart_form import FormFile
from slora_api.http.openapi import errors, form_body
from slora_api.http.permit_pool import RequestLimiter
from slora_api.http.request_bounds import ServerBounds
from slora_api.http.sse import unless_disconnected
from slora_api.http.wiring import TenantRoute, Wired
from slora_api.keys.authentication import AdapterReader, AdapterWriter, InferenceKey, Operator
from slora_api.keys.key_record import Scope
from slora_api.tenants.tenant_store import Tenant, TenantStore

router = APIRouter(route_class=TenantRoute, tags=["adapters"])

# A version number has at most 18 digits, as in references.
VersionNumber = Annotated[int, Field(ge=1, lt=10**18)]


@dataclass(frozen=True, slots=True)
class AdapterServices:
    """What the routes of adapters use."""

    limiter: RequestLimiter
    uploads: Uploads
    publisher: Publisher
    catalog: ModelCatalog
    local_adapters: LocalAdapters
    hub_adapters: HubAdapters
    tenant_store: TenantStore
    bounds: ServerBounds


def _check_targets(value: Any) -> Any:
    """Converts the keys of an alias's targets from JSON strings to version numbers."""
    if value is None:
        return None
    if isinstance(value, dict) and all(
        isinstance(number, str) and number.isascii() and number.isdigit() and len(number) < 19
        for number in value
    ):
        return {int(number): weight for number, weight in value.items()}
    raise make_refusal(
        "must be an object that maps version numbers to percentages, such as {example}",
        example='{"3": 90, "4": 10}',
    )


_Targets = Annotated[dict[int, int], BeforeValidator(_check_targets)]


class AliasMove(BaseModel):
    """PUT /v1/adapters/{name}/aliases/{alias}.

    versions: version number -> percentage of the requests, 100 in all.
    expected: the targets that the alias must have before the move. If it has other targets, the move is refused. An
    empty object means that the alias must not exist yet.
    follows_pushes: whether each later push moves the alias to the new version.
    """

    model_config = STRICT
    versions: _Targets
    expected: Annotated[dict[int, int] | None, BeforeValidator(_check_targets)] = None
    follows_pushes: bool = False


class UploadForm(BaseModel):
    """The form of POST /v1/adapters: the files of an adapter, or an archive of them.

    tool_template: additional_chat_templates/tool_use.jinja. chat_template_json: chat_template.json.
    model_labels: the config.json of a model that classifies texts, for the names of its labels.
    archive: a .zip, .tar or .tar.gz of the adapter's files, which replaces the other files. Each file in it has the
    name that peft or transformers gives it.
    base_fingerprint: the fingerprint of the base model that the adapter was trained on.
    source: hf://ORG/REPO[@REVISION][/FOLDER], an adapter that the server downloads from the Hugging Face hub, which
    replaces all files. A tenant's key needs the scope `adapters:hub` for it.
    """

    name: Name
    config: FormFile | None = None
    weights: FormFile | None = None
    tokenizer_config: FormFile | None = None
    chat_template: FormFile | None = None
    generation_config: FormFile | None = None
    tokenizer: FormFile | None = None
    special_tokens_map: FormFile | None = None
    added_tokens: FormFile | None = None
    chat_template_json: FormFile | None = None
    tool_template: FormFile | None = None
    model_labels: FormFile | None = None
    archive: FormFile | None = None
    base_fingerprint: str | None = None
    source: str | None = None


class DeletedAdapter(TypedDict):
    object: Literal["adapter"]
    name: str
    deleted: bool


class DeletedAlias(TypedDict):
    object: Literal["adapter.alias"]
    name: str
    alias: str
    deleted: bool


UPLOAD_ERRORS = errors(
    AdapterInvalid,
    QuotaExceeded,
    TenantBusy,
    ServerBusy,
    EngineUnavailable,
    InspectionFailed,
    HubUnavailable,
    DiskFull,
)


@router.post(
    "/v1/adapters",
    status_code=status.HTTP_201_CREATED,
    openapi_extra=form_body(UploadForm),
    responses=UPLOAD_ERRORS,
)
async def upload_adapter(
    request: Request, key: AdapterWriter, services: Wired[AdapterServices]
) -> PublishedObject:
    """Uploads an adapter as a new version of its name.

    The multipart fields are name, config and weights, and optionally base_fingerprint, chat templates,
    generation_config and the tokenizer's files. One archive may replace all files, and so may `source`, an adapter of
    the Hugging Face hub.
    """

    def check(upload: StagedUpload) -> None:
        if key.models is not None and not key.models.permits_whole(upload.name):
            raise Forbidden(
                f"Your key's allow-list does not contain `{upload.name[:128]}`, so the key cannot push it. Use a "
                "key without an allow-list, or one that has this name."
            )
        if upload.hub is not None and Scope.ADAPTERS_HUB not in key.scopes:
            raise Forbidden(
                f"`source` needs a key with the scope `{Scope.ADAPTERS_HUB}`, which your key does not have. Ask the "
                "operator for such a key, or download the adapter and upload its files."
            )

    return await receive_upload(request, key.tenant, services, check)


async def receive_upload(
    request: Request, tenant: str, services: AdapterServices, check: Callable[[StagedUpload], None]
) -> PublishedObject:
    """Receives the form of an upload, or downloads the adapter that the form names, and publishes it. check: raises an
    error if the caller may not do so.
    """
    with services.limiter.admit_upload(tenant):
        content_type = request.headers.get("content-type", "")
        async with services.uploads.receive(tenant, content_type, request.stream()) as upload:
            check(upload)
            return await _publish(request, tenant, services, upload)


async def _publish(
    request: Request, tenant: str, services: AdapterServices, upload: StagedUpload
) -> PublishedObject:
    if upload.hub is not None:
        services.publisher.check_upload(upload)
        upload = await unless_disconnected(request.receive, services.hub_adapters.download(tenant, upload))
    return await services.publisher.publish(tenant, upload, request.receive)


@router.get("/v1/adapters")
def list_adapters(
    key: AdapterReader,
    services: Wired[AdapterServices],
    limit: Limit = DEFAULT_LIMIT,
    after: str | None = None,
) -> PageObject[AdapterObject]:
    return services.catalog.list_adapters(key, limit, after)


@router.get("/v1/adapters/{reference}", responses=errors(ModelNotFound))
def get_adapter(
    reference: str, key: AdapterReader, services: Wired[AdapterServices]
) -> VersionObject | AdapterObject:
    key.check_model(reference)
    return services.catalog.describe_adapter(key.tenant, reference)


@router.delete("/v1/adapters/{reference}", responses=errors(ModelNotFound, InUse, DiskFull))
async def delete_adapter(
    reference: str, key: AdapterWriter, services: Wired[AdapterServices], force: bool = False
) -> DeletedAdapter:
    """Deletes a version, or a name with all of its versions. Answers 409 while an alias points at a version to delete,
    unless `force` is set.
    """
    key.check_adapter(reference.partition("@")[0])
    await services.catalog.delete(key.tenant, reference, force=force)
    return {"name": reference, "object": "adapter", "deleted": True}


@router.post(
    "/v1/adapters/{reference}/prewarm",
    status_code=status.HTTP_202_ACCEPTED,
    responses=errors(ModelNotFound, EngineUnavailable),
)
async def prewarm_adapter(
    reference: str, key: InferenceKey, services: Wired[AdapterServices]
) -> PrewarmObject:
    """Starts to load the adapter and shows where the adapter is now. Repeat the request to follow the progress."""
    return await services.catalog.prewarm(key, reference)


@router.get("/v1/adapters/{name}/versions", responses=errors(AdapterNotFound))
def list_versions(
    name: str,
    key: AdapterReader,
    services: Wired[AdapterServices],
    limit: Limit = DEFAULT_LIMIT,
    after: VersionNumber | None = None,
) -> PageObject[VersionObject]:
    key.check_adapter(name)
    return services.catalog.list_versions(key.tenant, name, limit, after)


@router.get("/v1/adapters/{name}/aliases", responses=errors(AdapterNotFound))
def list_aliases(name: str, key: AdapterReader, services: Wired[AdapterServices]) -> ListObject[AliasObject]:
    key.check_adapter(name)
    return {"object": "list", "data": services.catalog.list_aliases(key.tenant, name)}


@router.get("/v1/adapters/{name}/aliases/{alias}", responses=errors(AdapterNotFound))
def get_alias(name: str, alias: str, key: AdapterReader, services: Wired[AdapterServices]) -> AliasObject:
    key.check_model(f"{name}@{alias}")
    return services.catalog.describe_alias(key.tenant, name, alias)


@router.put("/v1/adapters/{name}/aliases/{alias}", responses=errors(AdapterNotFound, AliasConflict, DiskFull))
async def move_alias(
    name: str, alias: str, body: AliasMove, key: AdapterWriter, services: Wired[AdapterServices]
) -> AliasObject:
    key.check_adapter(name)
    return await services.catalog.move_alias(
        key.tenant,
        name,
        alias,
        body.versions,
        expected=body.expected,
        follows_pushes=body.follows_pushes,
    )


@router.delete("/v1/adapters/{name}/aliases/{alias}", responses=errors(AdapterNotFound, DiskFull))
async def delete_alias(
    name: str, alias: str, key: AdapterWriter, services: Wired[AdapterServices]
) -> DeletedAlias:
    key.check_adapter(name)
    await services.catalog.delete_alias(key.tenant, name, alias)
    return {"name": name, "alias": alias, "object": "adapter.alias", "deleted": True}


@router.post(
    "/v1/adapters/{name}/aliases/{alias}/rollback",
    responses=errors(AdapterNotFound, AliasConflict, DiskFull),
)
async def roll_back_alias(
    name: str, alias: str, key: AdapterWriter, services: Wired[AdapterServices]
) -> AliasObject:
    key.check_adapter(name)
    return await services.catalog.roll_back_alias(key.tenant, name, alias)


# /v1/load_lora_adapter and /v1/unload_lora_adapter, compatible with vLLM, for operators who migrate.
#
# Loading publishes an adapter from a directory below `lora_root`, or from hf://ORG/REPO of the Hugging Face hub, as the
# next version of its name. The version is durable, so it need not be loaded again after a restart. Unloading deletes
# the name with all its versions.
vllm_router = APIRouter(prefix="/v1", tags=["adapters"])


class LoadLoraRequest(BaseModel):
    """POST /v1/load_lora_adapter, with vLLM's fields and a tenant.

    tenant: the owner of the adapter; may be left out if the server has only one tenant.
    load_inplace: as in vLLM, whether to replace an adapter of the same name. By default, the request is refused if the
        name exists. Replacing keeps the old version.
    """

    model_config = STRICT
    lora_name: Name
    lora_path: Text
    load_inplace: bool | None = None
    tenant: Name | None = None


class UnloadLoraRequest(BaseModel):
    """POST /v1/unload_lora_adapter. lora_int_id: vLLM's internal number of the adapter, which this server ignores."""

    model_config = STRICT
    lora_name: Name
    lora_int_id: int | None = None
    tenant: Name | None = None


@vllm_router.post(
    "/load_lora_adapter",
    response_class=PlainTextResponse,
    responses={**UPLOAD_ERRORS, **errors(NotFound)},
)
async def load_lora_adapter(
    request: Request, body: LoadLoraRequest, _operator: Operator, services: Wired[AdapterServices]
) -> PlainTextResponse:
    tenant = await control_thread(_find_tenant, services, body.tenant)
    async with services.local_adapters.take_turn(tenant.tenant_id):
        if not body.load_inplace and await services.catalog.has_adapter(tenant.tenant_id, body.lora_name):
            raise BadRequest(
                f"The adapter `{body.lora_name}` of tenant `{tenant.name}` has already been loaded. Send "
                "`load_inplace: true` to add a version, or choose another `lora_name`.",
                "lora_name",
            )
        with services.limiter.admit_upload(tenant.tenant_id):
            async with services.local_adapters.copy(
                tenant.tenant_id, body.lora_name, body.lora_path
            ) as upload:
                loaded = await _publish(request, tenant.tenant_id, services, upload)
    name = f"{loaded['name']}@{loaded['version']}"
    return PlainTextResponse(f"Success: the adapter {name} of tenant {tenant.name} was loaded successfully.")


@vllm_router.post(
    "/unload_lora_adapter",
    response_class=PlainTextResponse,
    responses=errors(NotFound, ModelNotFound, InUse, DiskFull),
)
async def unload_lora_adapter(
    body: UnloadLoraRequest, _operator: Operator, services: Wired[AdapterServices]
) -> PlainTextResponse:
    tenant = await control_thread(_find_tenant, services, body.tenant)
    await services.catalog.delete(tenant.tenant_id, body.lora_name)
    return PlainTextResponse(
        f"Success: the adapter {body.lora_name} of tenant {tenant.name} was unloaded successfully."
    )


def _find_tenant(services: AdapterServices, name: str | None) -> Tenant:
    """Returns the tenant of the request. The field `tenant` may be missing if the server has only one tenant, because
    vLLM's clients do not send it.
    """
    if name is not None:
        return services.tenant_store.find_named(name)
    tenants = services.tenant_store.list_tenants()
    if len(tenants) != 1:
        raise BadRequest(
            f"This server has {len(tenants)} tenants; name the tenant of the adapter in `tenant`.",
            "tenant",
            "missing_parameter",
        )
    return tenants[0]
