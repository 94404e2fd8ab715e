"""/v1/usage for a tenant and /admin/usage for the operator: sums of the usage ledger by minute, hour or day."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Response
from fastapi.responses import StreamingResponse

from slora.core.usage_journal import UsageJournal
from slora_api.core.errors import NotFound, TenantBusy
from slora_api.core.fair_slots import FairSlots
from slora_api.core.foundation import Foundation
from slora_api.core.threads import control_thread, tenant_thread
from slora_api.http.openapi import errors
from slora_api.http.wiring import Wired
from slora_api.keys.authentication import Operator, UsageReader
from slora_api.usage.usage_ledger import UsageLedger
from slora_api.usage.usage_recorder import Observer, UsageRecorder
from slora_api.usage.usage_report import UsagePageObject, UsageParameters, UsageQuery, UsageReport
from slora_api.usage.usage_shipper import UsageShipper

router = APIRouter(tags=["usage"])

# Operators' queries wait for slots under this name. No tenant has an empty name.
_OPERATOR = ""


# The maximum number of usage queries that run concurrently, and of queries of one tenant that wait for a slot.
_READING_SLOTS = 3
_MAX_READING = 16


@dataclass(frozen=True, slots=True)
class UsageServices:
    """What the routes of usage use. find_tenant: see `TenantStore.find_id`."""

    find_tenant: Callable[[str], str]
    usage: UsageReport
    reading: FairSlots = field(
        default_factory=lambda: FairSlots(_READING_SLOTS, _MAX_READING, "queries of usage")
    )


_Asked = Annotated[UsageParameters, Depends()]
_CSV: dict[int | str, Any] = {200: {"content": {"text/csv": {"schema": {"type": "string"}}}}}
_ANSWERS = _CSV | errors(TenantBusy)


@router.get("/v1/usage", response_model=UsagePageObject, responses=_ANSWERS)
async def show_own_usage(asked: _Asked, key: UsageReader, services: Wired[UsageServices]) -> Response:
    return await _answer(services, asked, asked.make_query(key.tenant, is_operator=False), key.tenant)


@router.get("/admin/usage", response_model=UsagePageObject, responses=_ANSWERS | errors(NotFound))
async def show_usage(
    asked: _Asked, _operator: Operator, services: Wired[UsageServices], tenant: str | None = None
) -> Response:
    """Shows the usage of one tenant, or of all tenants. tenant: a name or an id. The tenant may have been deleted."""
    tenant_id = None if tenant is None else await control_thread(services.find_tenant, tenant)
    return await _answer(services, asked, asked.make_query(tenant_id, is_operator=True), _OPERATOR)


async def _answer(
    services: UsageServices, asked: UsageParameters, query: UsageQuery, charged: str
) -> Response:
    if asked.format == "json":
        async with services.reading.hold(charged):
            body = await tenant_thread(charged, services.usage.write_json, query)
        return Response(body, media_type="application/json")
    lines = _csv(services, query.for_csv(), charged)
    # Read the first page before the status is sent, so that an error of the ledger can still be answered with its own
    # status.
    first = await anext(lines)
    headers = {"Content-Disposition": 'attachment; filename="usage.csv"'}
    return StreamingResponse(_joined(first, lines), media_type="text/csv; charset=utf-8", headers=headers)


async def _csv(services: UsageServices, query: UsageQuery, charged: str) -> AsyncIterator[bytes]:
    """Yields the CSV of all pages from `start_time` to `end_time`. Holds no slot while the client reads a page."""
    following: UsageQuery | None = query
    with_header = True
    while following is not None:
        async with services.reading.hold(charged):
            body, following = await tenant_thread(
                charged, services.usage.write_csv, following, with_header=with_header
            )
        with_header = False
        yield body


async def _joined(first: bytes, others: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for lines in others:
        yield lines


@dataclass(frozen=True, slots=True)
class RecordedUsage:
    ledger: UsageLedger
    shipper: UsageShipper
    recorder: UsageRecorder


def build_usage(foundation: Foundation, observe: Observer) -> RecordedUsage:
    """observe: see `UsageRecorder`."""
    journal = UsageJournal(foundation.data.usage)
    foundation.stack.callback(journal.close)
    ledger = UsageLedger(foundation.database)
    kept_days = foundation.settings.usage_days if foundation.is_main else None
    shipper = UsageShipper(journal, foundation.data.usage, ledger, kept_days)
    foundation.stack.callback(shipper.ship)
    recorder = UsageRecorder(foundation.client, journal, observe=observe)
    foundation.stack.callback(recorder.close)
    return RecordedUsage(ledger, shipper, recorder)
