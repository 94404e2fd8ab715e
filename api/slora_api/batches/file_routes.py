"""/v1/files: the files of batches, with OpenAI's fields.

Receives a file as multipart/form-data, as OpenAI's clients send it.
"""

from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel
from typing_extensions import TypedDict

from slora_adapters.errors import DiskFull
from slora_api.adapters.quarantine import Quarantine
from slora_api.batches.files import PURPOSES, Files, StoredFile, check_purpose
from slora_api.batches.routes import BatchServices
from slora_api.core.errors import BadRequest, BodyTooLarge, InUse, NotFound, QuotaExceeded
from slora_api.core.listing import PageObject, list_json
from slora_api.core.threads import tenant_thread
from slora_api.http.multipart_form import FormFile, FormPart, check_fields, read_boundary, read_form
from slora_api.http.openapi import errors, form_body
from slora_api.http.wiring import TenantRoute, Wired
from slora_api.keys.authentication import InferenceKey

router = APIRouter(route_class=TenantRoute, tags=["batches"])

_FileLimit = Annotated[int, Query(ge=1, le=10_000)]

_FILE = "file"

_TEXTS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")

_MAX_TEXT_BYTES = 256

_MAX_FILENAME_CHARS = 255

_MAX_HEADER_BYTES = 4096

# As in OpenAI's API: from an hour to thirty days.
_EXPIRES_S = (3600, 2_592_000)


@dataclass(frozen=True, slots=True)
class ReceivedFile:
    filename: str
    path: Path
    expires_after_s: int | None


@asynccontextmanager
async def receive_file(
    tenant: str, quarantine: Quarantine, content_type: str, stream: AsyncIterator[bytes], max_bytes: int
) -> AsyncIterator[ReceivedFile]:
    """Receives the file in `stream`. The copy on disk exists for the duration of the context.

    Raises BadRequest, BodyTooLarge, DiskFull, and the errors of `stream`.
    """
    remedy = "Send the file as multipart/form-data with the fields file and purpose."
    boundary = read_boundary(content_type, remedy)
    async with quarantine.folder(tenant) as folder:
        path = folder / "file"
        parts = await read_form(
            tenant, stream, boundary, _MAX_HEADER_BYTES, partial(_open_part, path, max_bytes)
        )
        check_fields(parts, "purpose", _FILE)
        check_purpose(parts["purpose"].text)
        file = parts[_FILE]
        if not file.num_bytes:
            raise BadRequest("`file` is empty; send the lines of a batch.", _FILE)
        shown = "".join(letter for letter in file.file_name if letter.isprintable())
        yield ReceivedFile(shown[-_MAX_FILENAME_CHARS:] or "file.jsonl", path, _read_expiry(parts))


def _open_part(path: Path, max_bytes: int, field: str, file_name: str, earlier: Collection[str]) -> FormPart:
    """Opens the part of a multipart field. Raises BadRequest. A file that is too large raises BodyTooLarge."""
    if field == _FILE:
        too_large = BodyTooLarge(max_bytes, "max_file_bytes")
        return FormPart(field, file_name, path.open("xb"), max_bytes, too_large)
    if field not in _TEXTS:
        raise BadRequest(
            f"`{field[:80]}` is not a multipart field of this route; the fields are file, {', '.join(_TEXTS)}.",
            field[:80],
            "unknown_parameter",
        )
    return FormPart(field, file_name, None, _MAX_TEXT_BYTES)


def _read_expiry(parts: Mapping[str, FormPart]) -> int | None:
    """Returns the seconds after which the file expires; None if it does not expire."""
    anchor, seconds = (parts.get(name) for name in _TEXTS[1:])
    if anchor is None and seconds is None:
        return None
    if anchor is None or seconds is None or anchor.text != "created_at":
        raise BadRequest(
            "`expires_after` needs `anchor`, which must be `created_at`, and `seconds`.", "expires_after"
        )
    text = seconds.text
    num_seconds = int(text) if text.isascii() and text.isdigit() else -1
    if not _EXPIRES_S[0] <= num_seconds <= _EXPIRES_S[1]:
        raise BadRequest(
            f"`expires_after[seconds]` is {text[:32]!r}; it must be a whole number from {_EXPIRES_S[0]} to "
            f"{_EXPIRES_S[1]}.",
            "expires_after",
        )
    return num_seconds


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
async def upload_file(request: Request, key: InferenceKey, services: Wired[BatchServices]) -> FileObject:
    """Stores the input of a batch."""
    with services.limiter.admit_upload(key.tenant):
        content_type = request.headers.get("content-type", "")
        limit = services.max_file_bytes
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
    services: Wired[BatchServices],
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
def get_file(file_id: str, key: InferenceKey, services: Wired[BatchServices]) -> FileObject:
    return _file_json(services.batches.files.find(key.tenant, file_id))


@router.get(
    "/v1/files/{file_id}/content",
    response_model=str,
    responses=errors(NotFound)
    | {200: {"content": {"application/octet-stream": {"schema": {"type": "string"}}}}},
)
async def get_file_content(file_id: str, key: InferenceKey, services: Wired[BatchServices]) -> Response:
    files = services.batches.files
    await tenant_thread(key.tenant, files.find, key.tenant, file_id)
    return StreamingResponse(_content(files, key.tenant, file_id), media_type="application/octet-stream")


@router.delete("/v1/files/{file_id}", responses=errors(NotFound, InUse))
async def delete_file(file_id: str, key: InferenceKey, services: Wired[BatchServices]) -> DeletedFile:
    """Deletes a file. Answers 409 while a batch reads it."""
    await tenant_thread(key.tenant, services.batches.files.delete, key.tenant, file_id)
    return {"id": file_id, "object": "file", "deleted": True}


async def _content(files: Files, tenant: str, file_id: str) -> AsyncIterator[bytes]:
    pieces = files.read(file_id)
    while (piece := await tenant_thread(tenant, next, pieces, None)) is not None:
        yield piece
