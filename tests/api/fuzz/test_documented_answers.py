"""Requests that schemathesis generates from the served OpenAPI document. Every answer must be as the document says:
its status, its media type and its schema.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import CheckFunction
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.api.conftest import Kit
from tests.api.fuzz.requests import ACCEPTED
from tests.api.fuzz.watched_server import WatchedServer, explain_answer
from tests.api.served import ADMIN_KEY

# Cases of each operation. There are 32 operations, and those without parameters have only one case.
_QUICK, _SOAK = 2, 100
_CHECKS: list[CheckFunction] = [
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
# Path parameters that name something on the watched server. DELETE gets names of its own.
_NAMES = {"tenant": "fuzz", "name": "small", "reference": "small", "model": "small", "alias": "latest"}
_DOOMED = {"reference": "doomed", "alias": "doomed"}


@pytest.fixture(scope="module")
def document(watched: WatchedServer) -> Any:
    loaded = schemathesis.openapi.from_url(f"{watched.served.url}/openapi.json")
    loaded.config.generation.with_security_parameters = False  # `_send` adds the key
    return loaded


def _operations(document: Any) -> list[Any]:
    return [found.ok() for found in document.get_all_operations()]


def _send(watched: WatchedServer, case: Case, session: requests.Session) -> int:
    """Returns the status of the answer, which must be as the document says."""
    scopes = case.operation.definition.raw.get("security", [{"api_key": []}])[0]["api_key"]
    key = ADMIN_KEY if "admin" in scopes else watched.key
    answer = case.call(headers={"Authorization": f"Bearer {key}"}, session=session)
    media_type = answer.headers.get("content-type", [""])[0]
    wrong = explain_answer(answer.status_code, answer.content, media_type)
    assert wrong is None, f"{case.as_curl_command()}: {wrong}"
    case.validate_response(answer, checks=_CHECKS)
    return answer.status_code


def test_every_operation_succeeds_as_the_openapi_document_says(
    watched: WatchedServer, document: Any, kit: Kit
) -> None:
    """A document can only be wrong about successes that a test has seen."""
    files = {
        "config": (kit.wide / "adapter_config.json").read_bytes(),
        "weights": (kit.wide / "adapter_model.safetensors").read_bytes(),
    }
    with watched.client() as client:
        named = {name: (name, content) for name, content in files.items()}
        client.post("/v1/adapters", data={"name": "doomed"}, files=named).raise_for_status()
        client.put("/v1/adapters/small/aliases/doomed", json={"versions": {"1": 100}}).raise_for_status()
    doomed = _DOOMED | {"key_id": watched.served.make_key("fuzz").split("_")[1]}
    failed = {}
    with requests.Session() as session:
        for operation in _operations(document):
            names = _NAMES | (doomed if operation.method == "delete" else {})
            body = (
                {"name": "small", **files}
                if operation.path == "/v1/adapters"
                else ACCEPTED.get(operation.path)
            )
            case = operation.Case(
                path_parameters={one.name: names.get(one.name) for one in operation.path_parameters},
                **({} if body is None or operation.method in ("get", "delete") else {"body": body}),
            )
            status = _send(watched, case, session)
            if status >= 300:
                failed[operation.label] = status
    assert not failed, "the document is not checked there; add a body to ACCEPTED or a name to _NAMES"


def test_every_answer_is_as_the_openapi_document_says(
    watched: WatchedServer, document: Any, soak: bool, report: Callable[[str], None]
) -> None:
    statuses: Counter[int] = Counter()
    with requests.Session() as session:
        for operation in _operations(document):
            _try_operation(watched, operation, session, statuses, _SOAK if soak else _QUICK)
    report(f"schemathesis: {statuses.total()} requests; answers by status: {dict(sorted(statuses.items()))}")
    assert statuses.total() >= (2000 if soak else 50)


def _try_operation(
    watched: WatchedServer, operation: Any, session: requests.Session, statuses: Counter[int], num_cases: int
) -> None:
    accepted = ACCEPTED.get(operation.path)

    @settings(max_examples=num_cases)
    @given(
        operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
        | operation.as_strategy(generation_mode=GenerationMode.NEGATIVE),
        st.booleans(),
        st.booleans(),
    )
    def send(case: Case, has_names: bool, has_body: bool) -> None:
        if has_names and operation.method != "delete":
            case.path_parameters |= {
                name: known for name, known in _NAMES.items() if name in case.path_parameters
            }
        if has_body and accepted is not None and isinstance(case.body, dict):
            # Most generated bodies break some rule. A field or two of them in an accepted body gets further.
            case.body = accepted | dict(list(case.body.items())[:2])
        statuses[_send(watched, case, session)] += 1

    send()
