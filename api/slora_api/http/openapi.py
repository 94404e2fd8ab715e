"""The OpenAPI document of the API, at /openapi.json, and the declarations of routes for this document.

FastAPI derives the parameters, the bodies and the successful answers from the signature of a route. A route declares
its own errors with `errors`, and a stream with `event_stream`. If a route reads the body itself, it declares the body
with `json_body` or `form_body`. The document adds the errors that all routes share. For routes that need a key, have
parameters or have a body, it also adds the errors of these checks.

Content that is expensive to make and the same for all clients.
"""

import importlib.resources
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from threading import Lock
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter

from slora_adapters.errors import StoreUnavailable
from slora_api.core.errors import (
    BadRequest,
    BodyEncoded,
    BodyTooLarge,
    ErrorObject,
    Forbidden,
    HeadersTooLarge,
    RequestTooSlow,
    ServerBusy,
    Stopping,
    TenantBusy,
    TenantSuspended,
    Unauthorized,
    find_status,
)
from slora_api.core.package_version import find_package_version

_Json = dict[str, Any]
_Responses = dict[int | str, _Json]

_SCHEMAS = "#/components/schemas/"
# The schemas of FastAPI's own answer to an invalid request. This API answers 400 in its own form instead.
_UNUSED_SCHEMAS = ("HTTPValidationError", "ValidationError")

# Finds the field names that begin a description in a docstring, such as "n, best_of: numbers of answers.".
_FIELDS = re.compile(r"(?:^|(?<=\. ))(\w+(?:, \w+)*): ")

_ANY_ROUTE = (Exception, RequestTooSlow, HeadersTooLarge, Stopping)
_WITH_KEY = (Unauthorized, Forbidden, TenantSuspended, StoreUnavailable)
_WITH_INPUT = (BadRequest,)
_WITH_BODY = (BodyTooLarge, BodyEncoded, TenantBusy, ServerBusy)

router = APIRouter(tags=["server"])


class LazyContent:
    """Content that the first request makes by calling `make`. Requests that arrive meanwhile wait for the same
    content.
    """

    def __init__(self, make: Callable[[], bytes]) -> None:
        self._make = make
        self._lock = Lock()
        self._content: bytes | None = None

    def content(self) -> bytes:
        with self._lock:
            if self._content is None:
                self._content = self._make()
            return self._content


def errors(*kinds: type[Exception]) -> _Responses:
    """Returns the `responses` of a route: the errors that only this route returns. The document adds the errors that
    all routes of its kind share. `slora_api.core.errors` maps each error to its status.
    """
    answers: _Responses = {}
    _add_errors(answers, kinds, int)
    return answers


def json_body(*models: type[BaseModel], **example: Any) -> _Json:
    """Returns the `openapi_extra` of a route that parses its JSON body itself. models: the schemas that the body may
    have. example: the fields of a body.
    """
    declared = _body("application/json", models)
    declared["requestBody"]["content"]["application/json"]["example"] = example
    return declared


def form_body(model: type[BaseModel]) -> _Json:
    """Returns the `openapi_extra` of a route that parses a multipart form itself. model: the schema of the form."""
    return _body("multipart/form-data", [model])


_CHUNKS = (
    "Server-sent events. The data of each is a JSON object, and `data: [DONE]` ends the stream. An error also ends "
    "the stream, as an event with the JSON of an error."
)


def event_stream(chunk: Any, description: str = _CHUNKS) -> _Responses:
    """Returns the `responses` of a route that may answer with server-sent events. chunk: the type of one event."""
    schema = {
        "type": "string",
        "description": description,
        "contentMediaType": "application/json",
        "contentSchema": partial(_type_schema, chunk),
    }
    return {200: {"content": {"text/event-stream": {"schema": schema}}}}


class OpenApiDocument:
    """The document of these routes. It is made at the first request, because making it takes half a second.

    required_scopes: returns the scopes that a route needs, with None for any key; see `authentication.py`.
    """

    def __init__(
        self, routes: Sequence[APIRoute], required_scopes: Callable[[APIRoute], Set[str | None]]
    ) -> None:
        self._routes = routes
        self._required_scopes = required_scopes
        self._lazy = LazyContent(lambda: json.dumps(self._make()).encode())

    def content(self) -> bytes:
        return self._lazy.content()

    def _make(self) -> _Json:
        for route in self._routes:
            _make_schemas(route.openapi_extra)
            _make_schemas(route.responses)
        document = get_openapi(
            title="slora",
            version=find_package_version(),
            summary="Multi-tenant LoRA serving, compatible with OpenAI's API.",
            routes=self._routes,
        )
        schemas = document["components"]["schemas"]
        for name in _UNUSED_SCHEMAS:
            schemas.pop(name, None)
        schemas["ErrorObject"] = _type_schema(ErrorObject)
        for route in self._routes:
            for method in (route.methods or ()) if route.include_in_schema else ():
                _complete(
                    document["paths"][route.path_format][method.lower()], route, self._required_scopes(route)
                )
        _hoist_definitions(document, schemas)
        _describe_fields(document)
        _describe_common(document, read_common_descriptions())
        document["components"]["securitySchemes"] = {
            "api_key": {
                "type": "http",
                "scheme": "bearer",
                "description": "An API key. The scopes that a route needs are listed as roles.",
            }
        }
        return document


@router.get("/openapi.json", response_model=_Json)
def get_openapi_document(request: Request) -> Response:
    """Returns this document. It needs no key, because it is the same for every server of a release."""
    document: OpenApiDocument = request.app.state.openapi_document
    return Response(document.content(), media_type="application/json")


def _complete(operation: _Json, route: APIRoute, scopes: Set[str | None]) -> None:
    """Adds the operation's id, security and errors, which FastAPI does not derive."""
    operation["operationId"] = route.name
    answers = operation["responses"]
    if _refers_to(answers.get("422", {}), "HTTPValidationError"):
        del answers["422"]
    kinds = list(_ANY_ROUTE)
    if scopes:
        operation["security"] = [{"api_key": sorted(scope for scope in scopes if scope is not None)}]
        kinds += _WITH_KEY
    has_body = "requestBody" in operation
    if has_body or "parameters" in operation:
        kinds += _WITH_INPUT
    if has_body:
        kinds += _WITH_BODY
    _add_errors(answers, kinds, str)
    operation["responses"] = dict(sorted(answers.items()))


def _add_errors(
    answers: _Responses, kinds: Sequence[type[Exception]], key: Callable[[int], int | str]
) -> None:
    for kind in kinds:
        status, code = find_status(kind)
        answer = answers.setdefault(
            key(status),
            {
                "description": "",
                "content": {"application/json": {"schema": {"$ref": _SCHEMAS + "ErrorObject"}}},
            },
        )
        text = "The server failed to handle the request." if kind is Exception else _first_sentence(kind)
        line = f"`{code}`: {text}" if code else text
        if line not in answer["description"]:
            answer["description"] = f"{answer['description']}\n\n{line}".strip()


def _first_sentence(kind: type) -> str:
    text = " ".join(inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0].split())
    return text.partition(". ")[0].removesuffix(".") + "."


def _body(media_type: str, models: Sequence[type[BaseModel]]) -> _Json:
    content = {media_type: {"schema": partial(_body_schemas, models)}}
    return {"requestBody": {"required": True, "content": content}}


def _make_schemas(node: Any) -> None:
    """Replaces the calls in a route's declaration with the schemas that they return."""
    if isinstance(node, dict):
        for name, value in node.items():
            if isinstance(value, partial):
                node[name] = value()
            else:
                _make_schemas(value)


def _type_schema(kind: Any) -> _Json:
    return TypeAdapter(kind).json_schema(ref_template=_SCHEMAS + "{model}")


def _body_schemas(models: Sequence[type[BaseModel]]) -> _Json:
    schemas = [_body_schema(model) for model in models]
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _body_schema(model: type[BaseModel]) -> _Json:
    schema = model.model_json_schema(ref_template=_SCHEMAS + "{model}")
    bases = [base for base in model.__mro__[1:] if issubclass(base, BaseModel) and base is not BaseModel]
    inherited = [part for base in bases for part in _split(base.__doc__)[1:]]
    schema["description"] = "\n\n".join([*_split(model.__doc__), *inherited])
    return schema


def _hoist_definitions(node: Any, schemas: _Json) -> None:
    """Moves the `$defs` of all schemas to the components, where references look for them."""
    if isinstance(node, dict):
        for name, schema in node.pop("$defs", {}).items():
            assert schemas.setdefault(name, schema) == schema, f"two schemas of the API have the name {name}"
        for value in list(node.values()):
            _hoist_definitions(value, schemas)
    elif isinstance(node, list):
        for value in node:
            _hoist_definitions(value, schemas)


def _describe_fields(node: Any) -> None:
    """Moves descriptions of fields from the descriptions of objects to the fields themselves."""
    if isinstance(node, dict):
        fields, text = node.get("properties"), node.get("description")
        if isinstance(fields, dict) and isinstance(text, str):
            kept = [_describe_some(fields, paragraph) for paragraph in _split(text)]
            node["description"] = "\n\n".join(filter(None, kept))
        for value in node.values():
            _describe_fields(value)
    elif isinstance(node, list):
        for value in node:
            _describe_fields(value)


def read_common_descriptions() -> dict[str, str]:
    text = (
        importlib.resources.files("slora_api.http")
        .joinpath("field_descriptions.txt")
        .read_text(encoding="utf-8")
    )
    lines = (line.partition(": ") for line in text.splitlines() if not line.startswith("#"))
    return {name: description for name, _, description in lines}


def _describe_common(node: Any, common: Mapping[str, str], owner: str = "") -> None:
    """Describes the fields and parameters that have no description yet. owner: the name of the schema around them."""
    if isinstance(node, list):
        for value in node:
            _describe_common(value, common, owner)
    if not isinstance(node, dict):
        return
    fields = node.get("properties")
    named = dict(fields) if isinstance(fields, dict) else {}
    if "in" in node and "schema" in node and isinstance(node.get("name"), str):
        named[node["name"]] = node
    owner = str(node.get("title", owner))
    for name, field in named.items():
        text = common.get(f"{owner}.{name}", common.get(name))
        if text is not None and isinstance(field, dict) and not field.get("description"):
            field["description"] = text
    for value in node.values():
        _describe_common(value, common, owner)


def _describe_some(fields: _Json, paragraph: str) -> str:
    """Moves the field descriptions in a paragraph to their fields. Returns the text before the first field
    description.
    """
    text = " ".join(paragraph.split())
    found = [match for match in _FIELDS.finditer(text) if set(match[1].split(", ")) <= fields.keys()]
    ends = [match.start() for match in found[1:]] + [len(text)]
    for match, end in zip(found, ends, strict=False):
        for name in match[1].split(", "):
            known = fields[name].get("description", "")
            fields[name]["description"] = f"{known} {text[match.end() : end]}".strip()
    return text[: found[0].start()].strip() if found else paragraph


def _split(text: str | None) -> list[str]:
    """Returns the paragraphs of a docstring."""
    return inspect.cleandoc(text or "").split("\n\n")


def _refers_to(answer: _Json, schema: str) -> bool:
    return f'"{_SCHEMAS}{schema}"' in json.dumps(answer)
