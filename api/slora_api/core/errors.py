"""All errors that a response can report: one tree of exceptions, and one table that maps them to HTTP.

SloraError (the project's root)
├── ApiError
│   ├── Unauthorized       no API key or an invalid one; one message for all cases, so that it reveals nothing
│   ├── KeyRevoked         the key of a request in progress was revoked or has expired
│   ├── Forbidden          a valid key that this route does not accept
│   ├── TenantSuspended    the operator has suspended the key's tenant
│   ├── ModelNotFound      unknown model, or another tenant's; the message is the same
│   ├── NotFound           a tenant, key or adapter that does not exist
│   ├── PurgeBegun         the tenant is being deleted
│   ├── Conflict           the name is taken
│   ├── KeyConflict        the state of a key forbids the change
│   ├── EngineConflict     the state of the engines forbids to restart one
│   ├── InUse              not deleted, because aliases point at it
│   ├── PinsFull           pins would use more of the page pool than they may
│   ├── QuotaExceeded      the tenant's quota of versions or stored bytes
│   ├── BadRequest         a field or a body that cannot be used
│   ├── BodyTooLarge       more bytes than the limit
│   ├── BodyEncoded        a body with a Content-Encoding
│   ├── HeadersTooLarge    the request head exceeds its limit
│   ├── RequestTooSlow     headers or body arrived below the minimum rate
│   ├── ServerBusy         a limit of the whole server is reached
│   ├── TenantBusy         a limit of this tenant is reached
│   ├── RateLimited        a quota per minute is used up, or too small for the request
│   ├── BudgetExhausted    the tokens of the day or month are used up
│   ├── Starting           the engine is not connected, or a child process is stalled
│   ├── InspectionFailed   the check of an upload could not be completed; a retry may succeed
│   ├── Stopping           the server is shutting down
│   └── ClientGone         the client hung up, so no client reads the answer
└── the branches of slora_adapters.errors and slora.core.errors

The body has OpenAI's form for every error, including the framework's: {"error": {"message", "type", "param", "code"}}.
The openai client retries 408, 409, 429 and every 5xx, unless `x-should-retry: false` says that a retry is pointless.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from types import UnionType
from typing import Any, NotRequired

from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send
from typing_extensions import TypedDict

from slora.core.errors import (
    AdapterFetchFailed,
    DeadlineMissed,
    EngineUnavailable,
    RequestFailed,
    RequestRefused,
    StepFailed,
    UsageJournalFull,
    describe_context,
)
from slora_adapters.errors import (
    AdapterCorrupt,
    AdapterInvalid,
    AdapterNotFound,
    AliasConflict,
    BadAdapterName,
    BadAlias,
    DiskFull,
    SloraError,
    StoreUnavailable,
    abbreviate,
)
from slora_adapters.process.shortage import find_shortage
from slora_api.core.key_masking import mask_keys


class ApiError(SloraError):
    """Base of the errors that this package raises; its message is sent to the client."""


class Unauthorized(ApiError):
    """The API key is missing or invalid."""

    def __init__(self) -> None:
        super().__init__(
            "The API key is missing or invalid; send it as 'Authorization: Bearer <key>', or to /v1/messages as "
            "'x-api-key: <key>'."
        )


class KeyRevoked(ApiError):
    """The key was revoked, or expired, while its request was in progress."""

    def __init__(self, what: str = "was revoked") -> None:
        super().__init__(f"The API key of this request {what}, so the request was ended.")


class Forbidden(ApiError):
    """The key is valid, but this route needs another kind of key."""


class TenantSuspended(ApiError):
    """The tenant of the key is suspended."""

    def __init__(self, tenant: str) -> None:
        super().__init__(
            f"The tenant `{tenant}` is suspended, so its requests are refused. The operator of this server can resume "
            "it."
        )


class ModelNotFound(ApiError):
    """The model is unknown or belongs to another tenant. The message does not reveal which.

    near: a model with a similar name that the key may use; None if there is none.
    """

    def __init__(self, model: str, near: str | None = None) -> None:
        hint = "" if near is None else f" Did you mean `{near}`?"
        super().__init__(f"The model `{model[:128]}` does not exist.{hint}")


class NotFound(ApiError):
    """A tenant, key or adapter that does not exist."""

    @staticmethod
    def of_tenant(name: str) -> "NotFound":
        return NotFound(f"There is no tenant `{name[:128]}`.")

    @staticmethod
    def of_key(key_id: str) -> "NotFound":
        return NotFound(f"There is no key `{key_id[:64]}`.")


class Conflict(ApiError):
    """The name is taken. Sending the same request again cannot succeed."""


class PurgeBegun(ApiError):
    def __init__(self, tenant: str) -> None:
        super().__init__(
            f"The tenant `{tenant}` is being purged, so it cannot be suspended, resumed or renamed. Repeat the purge "
            f"if it was interrupted (POST /admin/tenants/{tenant}/purge)."
        )


class KeyConflict(ApiError):
    """The state of a key forbids the change, for example because the key is revoked already."""


class BatchConflict(ApiError):
    """The state of a batch forbids the change."""


class EngineConflict(ApiError):
    """The state of the engines forbids to restart one of them. The message says why."""


class InUse(ApiError):
    """An adapter or a version cannot be deleted while aliases point at it."""

    def __init__(self, reference: str, aliases: Sequence[str]) -> None:
        name = reference.partition("@")[0]
        listed = ", ".join(f"`{alias}`" for alias in aliases)
        super().__init__(
            f"`{reference[:257]}` is not deleted, because the "
            f"{'aliases' if len(aliases) > 1 else 'alias'} {listed} of `{name[:128]}` needs it. Move "
            f"or delete each of them (PUT or DELETE /v1/adapters/{name[:128]}/aliases/{aliases[0]}), "
            "or send force=true."
        )


class PinsFull(ApiError):
    """Pins would use more of the page pool than a limit allows. The message states the numbers."""


class QuotaExceeded(ApiError):
    """A tenant would exceed its quota. The message states the numbers.

    param: the quota field whose limit is too low.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class BadRequest(ApiError):
    """The request cannot be used. param: the field that is wrong."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class BodyTooLarge(ApiError):
    """The body has more bytes than this route accepts."""

    def __init__(self, limit_bytes: int, setting: str, max_model_len: int | None = None) -> None:
        context = "" if max_model_len is None else f" {describe_context(max_model_len)}"
        super().__init__(
            f"The body is larger than {limit_bytes} bytes, this server's limit ({setting}).{context}"
        )


class BodyEncoded(ApiError):
    """The body has a Content-Encoding."""

    def __init__(self, encoding: str) -> None:
        super().__init__(
            f"The body has the Content-Encoding {encoding[:80]!r}; this server accepts only bodies "
            "without one. Send the body uncompressed."
        )


class HeadersTooLarge(ApiError):
    """The request line and the headers are larger than the server parses. The message states the limit."""


class RequestTooSlow(ApiError):
    """The client kept the server waiting for the rest of its request. The message states the limit."""


# The usual Retry-After in seconds. A restarted engine answers within seconds, and a permit is usually free after one
# answer.
SOON_S = 2


class ServerBusy(ApiError):
    """A limit of the whole server is reached. retry_after_s: seconds until a permit should be free."""

    def __init__(self, message: str, retry_after_s: int = SOON_S) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TenantBusy(ApiError):
    """A limit of one tenant is reached. retry_after_s: seconds until a permit should be free."""

    def __init__(self, message: str, retry_after_s: int = SOON_S) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimited(ApiError):
    """A quota per minute does not admit the request. retry_after_ms: milliseconds until the request fits; None if the
    request is larger than the quota.
    """

    def __init__(self, message: str, retry_after_ms: int | None) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class BudgetExhausted(ApiError):
    """A budget of tokens is used up. retry_after_s: seconds until the next day or month begins."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Starting(ApiError):
    """The engine is not ready, for example while it starts or restarts."""


class InspectionFailed(ApiError):
    """The check of an upload could not be completed, so it is unknown whether the upload is valid."""


class HubUnavailable(ApiError):
    """The hub does not answer, or answers too slowly, so the server could not download an adapter."""


class Stopping(ApiError):
    """The server is shutting down."""

    def __init__(self) -> None:
        super().__init__("The server is shutting down; send the request again.")


class ClientGone(ApiError):
    """The client hung up before its answer was ready."""


@dataclass(frozen=True, slots=True)
class _Rule:
    """The HTTP response to one class of errors. retry_after_s: seconds after which a retry makes sense."""

    status: int
    kind: str
    code: str | None = None
    retry_after_s: int | None = None
    should_retry: bool | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


_REQUEST, _GONE, _UNAVAILABLE = "invalid_request_error", "not_found_error", "service_unavailable"
_INTERNAL = _Rule(500, "server_error", "internal_error")

# Maps classes of errors to rules. The first matching class wins, so subclasses stand before their parents.
_RULES: tuple[tuple[type[Exception] | UnionType, _Rule], ...] = (
    (
        Unauthorized,
        _Rule(401, "authentication_error", "invalid_api_key", headers={"WWW-Authenticate": "Bearer"}),
    ),
    (
        KeyRevoked,
        _Rule(401, "authentication_error", "invalid_api_key", headers={"WWW-Authenticate": "Bearer"}),
    ),
    (Forbidden, _Rule(403, "permission_error", "insufficient_permissions")),
    (TenantSuspended, _Rule(403, "permission_error", "tenant_suspended", should_retry=False)),
    (ModelNotFound, _Rule(404, _GONE, "model_not_found")),
    (NotFound, _Rule(404, _GONE, "not_found")),
    (AdapterNotFound, _Rule(404, _GONE, "model_not_found")),
    (BadAdapterName, _Rule(400, _REQUEST, "invalid_name")),
    (BadAlias, _Rule(400, _REQUEST, "invalid_alias")),
    (Conflict, _Rule(409, "conflict_error", "name_taken", should_retry=False)),
    (PurgeBegun, _Rule(409, "conflict_error", "purge_begun", should_retry=False)),
    (KeyConflict, _Rule(409, "conflict_error", "key_conflict", should_retry=False)),
    (InUse, _Rule(409, "conflict_error", "adapter_in_use", should_retry=False)),
    (AliasConflict, _Rule(409, "conflict_error", "alias_conflict", should_retry=False)),
    (BatchConflict, _Rule(409, "conflict_error", "batch_conflict", should_retry=False)),
    (EngineConflict, _Rule(409, "conflict_error", "engine_conflict", should_retry=False)),
    (PinsFull, _Rule(409, "conflict_error", "pins_full", should_retry=False)),
    (QuotaExceeded, _Rule(409, "conflict_error", "quota_exceeded", should_retry=False)),
    (BadRequest, _Rule(400, _REQUEST)),
    (RequestRefused, _Rule(400, _REQUEST)),
    (RequestValidationError, _Rule(400, _REQUEST)),
    (BodyTooLarge, _Rule(413, _REQUEST, "body_too_large")),
    # RFC 9110 recommends this header for a 415 that refuses the encoding.
    (BodyEncoded, _Rule(415, _REQUEST, "body_encoded", headers={"Accept-Encoding": "identity"})),
    (HeadersTooLarge, _Rule(431, _REQUEST, "headers_too_large")),
    (RequestTooSlow, _Rule(408, _REQUEST, "request_too_slow")),
    (AdapterInvalid, _Rule(422, "adapter_invalid", "adapter_invalid")),
    (TenantBusy, _Rule(429, "rate_limit_error", "rate_limit_exceeded")),
    (RateLimited, _Rule(429, "rate_limit_error", "rate_limit_exceeded")),
    (BudgetExhausted, _Rule(429, "insufficient_quota", "insufficient_quota", should_retry=False)),
    (ServerBusy, _Rule(503, _UNAVAILABLE, "server_busy")),
    (Starting, _Rule(503, _UNAVAILABLE, "engine_unavailable", retry_after_s=SOON_S)),
    (InspectionFailed, _Rule(503, _UNAVAILABLE, "inspection_failed", retry_after_s=SOON_S)),
    (HubUnavailable, _Rule(503, _UNAVAILABLE, "hub_unavailable", retry_after_s=SOON_S)),
    (Stopping, _Rule(503, _UNAVAILABLE, "server_stopping", retry_after_s=SOON_S)),
    (EngineUnavailable, _Rule(503, _UNAVAILABLE, "engine_unavailable", retry_after_s=SOON_S)),
    (UsageJournalFull, _Rule(503, _UNAVAILABLE, "usage_journal_full", retry_after_s=SOON_S)),
    (DiskFull, _Rule(507, "server_error", "disk_full", should_retry=False)),
    (StoreUnavailable, _Rule(503, _UNAVAILABLE, "store_unavailable", retry_after_s=SOON_S)),
    (StepFailed, _Rule(503, _UNAVAILABLE, "step_failed", retry_after_s=SOON_S, should_retry=True)),
    (DeadlineMissed, _Rule(503, _UNAVAILABLE, "deadline_missed", retry_after_s=SOON_S)),
    # A retry cannot help: it would read the same corrupt bytes, or its computation would fail again.
    (AdapterCorrupt, _Rule(500, "server_error", "adapter_corrupt", should_retry=False)),
    (RequestFailed, _Rule(500, "server_error", "generation_failed", should_retry=False)),
    # 499 is nginx's status for this case. It appears only in logs and counters.
    (ClientGone | ClientDisconnect, _Rule(499, _REQUEST, "client_closed_request")),
)

# If an adapter could not be fetched, the engine reports the reason as one of these codes.
_FETCH_RULES = {
    "not_found": _Rule(404, _GONE, "model_not_found"),
    "unavailable": _Rule(503, _UNAVAILABLE, "store_unavailable", retry_after_s=SOON_S),
    "corrupt": _Rule(500, "server_error", "adapter_corrupt", should_retry=False),
}

# Errors that starlette raises with only a status code.
_STATUS_RULES = {
    404: _Rule(404, _GONE, "unknown_url"),
    405: _Rule(405, _REQUEST, "method_not_allowed"),
}


class RefusalReason(TypedDict):
    """One rule that a refused adapter breaks."""

    code: str
    message: str


class ErrorDetails(TypedDict):
    """The details of an error. param: the field that is wrong. reasons: all rules that a refused adapter breaks."""

    message: str
    type: str
    param: str | None
    code: str | None
    reasons: NotRequired[list[RefusalReason]]


class ErrorObject(TypedDict):
    """An error, in OpenAI's form."""

    error: ErrorDetails


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """An error as an HTTP response. `body` also serves as an SSE event."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str]

    @property
    def message(self) -> str:
        return str(self.body["error"]["message"])


def find_status(kind: type[Exception]) -> tuple[int, str | None]:
    """Returns the status and the code of a class of error. The code is None if it differs between the errors of the
    class.
    """
    rule = next((rule for known, rule in _RULES if issubclass(kind, known)), _INTERNAL)
    return rule.status, rule.code


def _find_rule(error: BaseException) -> _Rule:
    if isinstance(error, AdapterFetchFailed):
        return _FETCH_RULES.get(error.code, _INTERNAL)
    if isinstance(error, HTTPException):
        return _STATUS_RULES.get(error.status_code, _Rule(error.status_code, _REQUEST))
    return next((rule for kind, rule in _RULES if isinstance(error, kind)), _INTERNAL)


def _headers(rule: _Rule, error: BaseException) -> dict[str, str]:
    headers = dict(rule.headers)
    if isinstance(error, HTTPException) and error.headers:
        headers |= error.headers
    retry_after_s = rule.retry_after_s
    if isinstance(error, ServerBusy | TenantBusy | BudgetExhausted):
        retry_after_s = error.retry_after_s
    should_retry = rule.should_retry
    if isinstance(error, RateLimited):
        if error.retry_after_ms is None:
            should_retry = False
        else:
            retry_after_s = -(-error.retry_after_ms // 1000)
            headers["retry-after-ms"] = str(error.retry_after_ms)
    if retry_after_s is not None:
        headers["Retry-After"] = str(retry_after_s)
    if should_retry is not None:
        headers["x-should-retry"] = str(should_retry).lower()
    return headers


def describe_error(error: BaseException, *, for_operator: bool = False) -> ErrorAnswer:
    """Returns status, body and headers for any error. The details of an unforeseen error are not revealed.

    for_operator: include the paths and hosts that tenants must not see.
    """
    if not isinstance(error, SloraError) and (lacking := find_shortage(error)) is not None:
        error = ServerBusy(f"The server lacks {lacking} for this request; try again.")
    rule = _find_rule(error)
    param: str | None = "name" if isinstance(error, BadAdapterName) else getattr(error, "param", None)
    code: str | None = (
        getattr(error, "code", None) if isinstance(error, BadRequest | RequestRefused) else None
    )
    if rule is _INTERNAL:
        message = "The server failed to handle this request; its log has the details under this request's id."
    elif isinstance(error, StoreUnavailable) and not for_operator:
        message = error.public_message
    elif isinstance(error, HTTPException):
        message = (
            f"{error.detail}: this server has no such route or method." if rule.code else str(error.detail)
        )
    elif isinstance(error, RequestValidationError):
        message, param, code = _explain_validation(error.errors())
    else:
        message = str(error)
    body: dict[str, Any] = {
        "message": mask_keys(message),
        "type": rule.kind,
        "param": param and mask_keys(param),
        "code": code or rule.code,
    }
    if isinstance(error, AdapterInvalid):
        body["reasons"] = [
            {"code": reason.code, "message": mask_keys(reason.message)} for reason in error.reasons
        ]
    return ErrorAnswer(rule.status, {"error": body}, _headers(rule, error))


class _ErrorResponse(Response):
    """The HTTP response of an error, in the form of the API that the path belongs to."""

    def __init__(self, answer: ErrorAnswer) -> None:
        # Pure ASCII, because a message may quote lone surrogates, which UTF-8 cannot encode.
        super().__init__(json.dumps(answer.body), answer.status, answer.headers, "application/json")
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if speaks_anthropic(scope):
            request_id = scope.get("state", {}).get("request_id")
            self.body = json.dumps(describe_for_messages(self._answer, request_id)).encode("ascii")
            self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def error_response(error: BaseException, *, for_operator: bool = False) -> Response:
    """Makes the HTTP response of an error; see `describe_error`."""
    return _ErrorResponse(describe_error(error, for_operator=for_operator))


_MESSAGES_PATH, _MODELS_PATH = "/v1/messages/", "/v1/models/"
# The types of errors in Anthropic's API. Others are an `invalid_request_error` or an `api_error`.
_MESSAGES_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def speaks_anthropic(scope: Scope) -> bool:
    """Whether a request is one of Anthropic's API. Both APIs have the path of the list of models, so there the header
    tells which one is meant.
    """
    path = f"{scope['path']}/"
    return path.startswith(_MESSAGES_PATH) or (
        path.startswith(_MODELS_PATH) and "anthropic-version" in Headers(scope=scope)
    )


def describe_for_messages(answer: ErrorAnswer, request_id: str | None = None) -> dict[str, Any]:
    """Returns the body of an error in Anthropic's form. It keeps the fields `param` and `code`."""
    error = answer.body["error"]
    usual = "invalid_request_error" if answer.status < HTTPStatus.INTERNAL_SERVER_ERROR else "api_error"
    kind, message = _MESSAGES_KINDS.get(answer.status, usual), error["message"]
    if (
        error["code"] == "context_length_exceeded"
    ):  # Coding agents look for these words, and then shorten the prompt.
        message = f"prompt is too long: {message}"
    return {
        "type": "error",
        "error": {**error, "type": kind, "message": message},
        "request_id": request_id,
    }


def _explain_validation(details: Sequence[Any]) -> tuple[str, str | None, str | None]:
    """Returns message, param and code of the first error that pydantic found."""
    first = details[0]
    if first["type"] == "json_invalid":
        return (
            f"The body is not valid JSON: {first.get('ctx', {}).get('error', 'cannot be read')}.",
            None,
            None,
        )
    # The first element of `loc` is "body", "query" or "path".
    location = [str(part) for part in first["loc"][1:]]
    if not location and first["type"] in ("model_attributes_type", "model_type", "dict_type"):
        return "The body must be a JSON object, sent with 'Content-Type: application/json'.", None, None
    param = first.get("ctx", {}).get("param") or ".".join(location) or None
    if first["type"] == "extra_forbidden":
        meant = first.get("ctx", {}).get("meant")
        hint = f"; did you mean `{'.'.join([*location[:-1], meant])}`?" if meant else "."
        return f"`{param}` is not a parameter that this server knows{hint}", param, "unknown_parameter"
    if first["type"] == "unsupported_parameter":
        return f"`{param}` {first['msg']}", param, first["type"]
    if first["type"] == "invalid_value" and "param" in first.get("ctx", {}):
        return first["msg"], param, first["type"]
    if first["type"] == "missing":
        return (
            f"`{param}` is missing." if param else "The request needs a JSON body.",
            param,
            "missing_parameter",
        )
    text = first["msg"]
    if first["type"] == "too_short" and first["ctx"]["min_length"] == 1:
        text = "it is empty; send at least one entry"
    if first["type"] in ("dict_type", "model_type", "model_attributes_type"):
        text = "Input should be an object"
    if first["type"] == "string_unicode":
        text = "Input should be text without halves of surrogate pairs"
    # The text of pydantic's own errors does not show the value.
    if text.startswith("Input should be ") and "input" in first:
        text = f"{text}, but it is {abbreviate(first['input'])}"
    return f"`{param}`: {text}." if param else f"{text}.", param, None
