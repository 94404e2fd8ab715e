"""/v1/files: the files of batches, with OpenAI's fields."""

from collections.abc import AsyncIterator
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel
from typing_extensions import TypedDict

from slora_adapters.errors import DiskFull
from slora_api.batches.file_upload import receive_file
from slora_api.batches.files import PURPOSES, Files, StoredFile, check_purpose
from slora_api.core.errors import InUse, NotFound, QuotaExceeded
from slora_api.core.listing import PageObject, list_json
from slora_api.core.threads import tenant_thread
from slora_api.http.multipart_form import FormFile
from slora_api.http.openapi import errors, form_body
from slora_api.keys.authentication import InferenceKey
from slora_api.serve.services import TenantRoute, Wired

router = APIRouter(route_class=TenantRoute, tags=["batches"])

_FileLimit = Annotated[int, Query(ge=1, le=10_000)]


class FileForm(BaseModel):
    """The form of POST /v1/files."""

    file: FormFile
    purpose: Literal["batch"]


class FileObject(TypedDict):
    """A file of a tenant. created_at: Unix time in seconds. expires_at: Unix time in seconds; null if the file does not
    expire.
    """

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"]


class DeletedFile(TypedDict):
    id: str
    object: Literal["file"]
    deleted: bool


def _file_json(stored: StoredFile) -> FileObject:
    return {
        "id": stored.file_id,
        "object": "file",
        "bytes": stored.num_bytes,
        "created_at": int(stored.created_at),
        "expires_at": None if stored.expires_at is None else int(stored.expires_at),
        "filename": stored.filename,
        "purpose": stored.purpose,
        "status": "processed",
    }


@router.post("/v1/files", responses=errors(QuotaExceeded, DiskFull), openapi_extra=form_body(FileForm))
async def upload_file(request: Request, key: InferenceKey, services: Wired) -> FileObject:
    """Stores the input of a batch."""
    with services.generator.limiter.admit_upload(key.tenant):
        content_type = request.headers.get("content-type", "")
        limit = services.settings.max_file_bytes
        stream = request.stream()
        async with receive_file(key.tenant, services.quarantine, content_type, stream, limit) as received:
            stored = await tenant_thread(
                key.tenant,
                services.batches.files.create,
                key.tenant,
                received.filename,
                received.path,
                received.expires_after_s,
            )
    return _file_json(stored)


@router.get("/v1/files", response_model=PageObject[FileObject])
def list_files(
    key: InferenceKey,
    services: Wired,
    purpose: str | None = None,
    limit: _FileLimit = 10_000,
    after: str | None = None,
    order: Literal["asc", "desc"] = "desc",
) -> JSONResponse:
    """Lists the files of the key's tenant, newest first."""
    if purpose is not None:
        check_purpose(purpose, PURPOSES)
    files = services.batches.files
    found = files.list(key.tenant, purpose, limit + 1, after, newest_first=order == "desc")
    # Serialize the files on this thread: thousands of them take milliseconds.
    return JSONResponse(list_json([_file_json(one) for one in found], "id", limit))


@router.get("/v1/files/{file_id}", responses=errors(NotFound))
def get_file(file_id: str, key: InferenceKey, services: Wired) -> FileObject:
    return _file_json(services.batches.files.find(key.tenant, file_id))


@router.get(
    "/v1/files/{file_id}/content",
    response_model=str,
    responses=errors(NotFound)
    | {200: {"content": {"application/octet-stream": {"schema": {"type": "string"}}}}},
)
async def get_file_content(file_id: str, key: InferenceKey, services: Wired) -> Response:
    files = services.batches.files
    await tenant_thread(key.tenant, files.find, key.tenant, file_id)
    return StreamingResponse(_content(files, key.tenant, file_id), media_type="application/octet-stream")


@router.delete("/v1/files/{file_id}", responses=errors(NotFound, InUse))
async def delete_file(file_id: str, key: InferenceKey, services: Wired) -> DeletedFile:
    """Deletes a file. Answers 409 while a batch reads it."""
    await tenant_thread(key.tenant, services.batches.files.delete, key.tenant, file_id)
    return {"id": file_id, "object": "file", "deleted": True}


async def _content(files: Files, tenant: str, file_id: str) -> AsyncIterator[bytes]:
    pieces = files.read(file_id)
    while (piece := await tenant_thread(tenant, next, pieces, None)) is not None:
        yield piece
