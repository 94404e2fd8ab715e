"""/v1/batches: files of requests that are computed in the background, with OpenAI's fields."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel
from typing_extensions import TypedDict

from slora_adapters.errors import DiskFull
from slora_api.adapters.build import Adapters
from slora_api.adapters.quarantine import Quarantine
from slora_api.batches.batches import Batch, Batches, BatchProblem
from slora_api.batches.files import Files, file_limits
from slora_api.completions.schemas import Metadata
from slora_api.core.errors import BatchConflict, NotFound, QuotaExceeded
from slora_api.core.foundation import Foundation
from slora_api.core.listing import PageObject, list_json
from slora_api.core.threads import tenant_thread
from slora_api.http.field_types import STRICT, Text
from slora_api.http.openapi import errors
from slora_api.http.permit_pool import RequestLimiter
from slora_api.http.unsupported import Unsupported
from slora_api.http.wiring import TenantRoute, Wired
from slora_api.keys.authentication import InferenceKey

router = APIRouter(route_class=TenantRoute, tags=["batches"])

_BatchLimit = Annotated[int, Query(ge=1, le=100)]
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


@dataclass(frozen=True, slots=True)
class BatchServices:
    """What the routes of files and batches use."""

    batches: Batches
    limiter: RequestLimiter
    max_file_bytes: int
    quarantine: Quarantine


class NewBatchRequest(BaseModel):
    """POST /v1/batches.

    input_file_id: a file with the purpose `batch`, which has one request in each line.
    endpoint: the route that answers every line.
    metadata: up to 16 pairs that the server keeps with the batch.
    """

    model_config = STRICT
    input_file_id: Text
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: Annotated[Any, Unsupported(None)] = None


class BatchErrorObject(TypedDict):
    """One reason why a batch failed. line: the number of the line in the input file; null for the whole file."""

    code: str
    message: str
    line: int | None
    param: str | None


class BatchErrors(TypedDict):
    object: Literal["list"]
    data: list[BatchErrorObject]


class RequestCounts(TypedDict):
    """How many lines a batch has. total: 0 until the input file is checked."""

    total: int
    completed: int
    failed: int


class BatchObject(TypedDict):
    """A batch. Times are Unix times in seconds. output_file_id: null until the batch has ended; also null if no line
    succeeded. error_file_id: null until the batch has ended; also null if no line failed.
    """

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: Literal["24h"]
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


def _batch_json(batch: Batch) -> BatchObject:
    times: dict[str, Any] = {
        f"{name}_at": int(batch.times[f"{name}_at"]) if f"{name}_at" in batch.times else None
        for name in _TIMES
    }
    return {
        "id": batch.batch_id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": [_error_json(one) for one in batch.errors]}
        if batch.errors
        else None,
        "input_file_id": batch.input_file_id,
        "completion_window": "24h",
        "status": batch.status.value,
        "output_file_id": batch.output_file_id or None if batch.is_final else None,
        "error_file_id": batch.error_file_id or None if batch.is_final else None,
        "created_at": int(batch.created_at),
        "expires_at": int(batch.expires_at),
        **times,  # type: ignore[typeddict-item]
        "request_counts": {
            "total": batch.num_lines,
            "completed": batch.num_completed,
            "failed": batch.num_failed,
        },
        "metadata": None if batch.metadata is None else dict(batch.metadata),
    }


def _error_json(problem: BatchProblem) -> BatchErrorObject:
    return {
        "code": problem.code,
        "message": problem.message,
        "line": problem.line,
        "param": problem.param,
    }


@router.post("/v1/batches", responses=errors(NotFound, QuotaExceeded, DiskFull))
async def create_batch(
    body: NewBatchRequest, key: InferenceKey, services: Wired[BatchServices]
) -> BatchObject:
    """Starts a batch. Its lines are computed with the lowest priority, within 24 hours."""
    created = await tenant_thread(
        key.tenant,
        services.batches.create,
        key.tenant,
        key.key_id,
        body.endpoint,
        body.input_file_id,
        body.metadata,
    )
    return _batch_json(created)


@router.get("/v1/batches")
def list_batches(
    key: InferenceKey, services: Wired[BatchServices], limit: _BatchLimit = 20, after: str | None = None
) -> PageObject[BatchObject]:
    """Lists the batches of the key's tenant, newest first."""
    found = services.batches.list(key.tenant, limit + 1, after)
    return list_json([_batch_json(one) for one in found], "id", limit)


@router.get("/v1/batches/{batch_id}", responses=errors(NotFound))
def get_batch(batch_id: str, key: InferenceKey, services: Wired[BatchServices]) -> BatchObject:
    return _batch_json(services.batches.find(key.tenant, batch_id))


@router.post("/v1/batches/{batch_id}/cancel", responses=errors(NotFound, BatchConflict))
async def cancel_batch(batch_id: str, key: InferenceKey, services: Wired[BatchServices]) -> BatchObject:
    """Cancels a batch. Its status is `cancelling` until the lines in progress have ended. Lines that are already
    answered stay in the output file.
    """
    return _batch_json(await tenant_thread(key.tenant, services.batches.cancel, key.tenant, batch_id))


def build_batches(foundation: Foundation, adapters: Adapters, limiter: RequestLimiter) -> BatchServices:
    settings = foundation.settings
    files = Files(foundation.database, adapters.stored, file_limits(settings))
    batches = Batches(foundation.database, files, settings.max_batches_per_tenant)
    return BatchServices(batches, limiter, settings.max_file_bytes, adapters.quarantine)
