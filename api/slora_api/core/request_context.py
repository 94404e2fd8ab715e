"""The context of the HTTP request that is being answered: its id, its tenant and its span.

Log lines and spans read the context. It follows the request into its tasks and threads. Code that answers no HTTP
request, such as the runner of batches, has no context.
"""

import logging
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slora_api.core.otel_tracing import OtelSpan

# The field of a request's state that holds the error which has ended the request. A stream sends this error as its last
# event.
ENDED_BY = "ended_by"
# The batch runner passes the id of a batch line under this key in the request's state. Clients cannot set it.
BACKGROUND_ID = "background_id"


@dataclass(slots=True)
class RequestContext:
    """The context of one request. tenant, tenant_id: the name and the id of the tenant. They are None until the key is
    known, and for an operator.
    """

    request_id: str
    tenant: str | None = None
    tenant_id: str | None = None
    span: "OtelSpan | None" = None


current_request: ContextVar[RequestContext | None] = ContextVar("current_request", default=None)


class RequestFields(logging.Filter):
    """A log filter that adds the request's id, its tenant and the tenant's id to each record. It lets all records
    pass.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        context = current_request.get()
        if context is not None:
            record.request_id = context.request_id
            if context.tenant is not None:
                record.tenant, record.tenant_id = context.tenant, context.tenant_id
        return True


def current_span() -> "OtelSpan | None":
    context = current_request.get()
    return None if context is None else context.span
